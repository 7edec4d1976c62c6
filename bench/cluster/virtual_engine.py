"""One engine in virtual time: continuous batching over the simulator's block pool and encoder cache.

It behaves like ``mmrouter_sim.core.scheduler`` (tests compare the two), but consecutive steps that only decode are one
event, and blocks are named by the caller, because traces have no token ids.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from mmrouter_sim.core.caches import BlockPool, EncoderCache
from mmrouter_sim.core.requests import Media

NEVER: Final = float("inf")


@dataclass(frozen=True, slots=True)
class Machine:
    """Speed and size of an engine; docs/performance.md gives the source of the defaults."""

    prefill_rate: float = 9_500.0  # prompt tokens per second
    encode_seconds: float = 42e-6  # per visual token
    decode_seconds: float = 24e-3  # per step that decodes
    read_seconds: float = 88e-9  # per step and token of context that decodes
    kv_tokens: int = 400_000  # size of the KV cache
    max_batched_tokens: int = 2048
    max_seqs: int = 256
    largest_image: int = 16_384  # visual tokens


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A request and its progress. ``names``: one per complete block, equal for equal prefixes."""

    number: int
    names: Sequence[bytes]
    tokens: int
    output: int
    media: tuple[Media, ...] = ()

    length: int = field(init=False)  # tokens, answer included
    computed: int = 0  # while decoding: as of ``joined``
    joined: int = 0  # decode steps of the engine before it began to decode
    decodes: bool = False
    life: int = 0  # grows when it leaves the running ones, which voids its scheduled events
    order: int = 0  # of admission
    blocks: list[int] = field(default_factory=list)
    stored: int = 0
    cached: int | None = None  # prompt tokens from the cache, at first admission
    answered: bool = False

    def __post_init__(self) -> None:
        self.length = self.tokens


@dataclass(slots=True)
class StepResult:
    """Requests whose first token came, and requests that ended, in a step."""

    answered: list[EngineRequest] = field(default_factory=list)
    ended: list[EngineRequest] = field(default_factory=list)


class VirtualEngine:
    """One engine. Call :meth:`add`, and :meth:`advance` at each time :attr:`due`."""

    def __init__(self, machine: Machine, block_size: int) -> None:
        self._machine, self._size = machine, block_size
        self.pool = BlockPool(machine.kv_tokens // block_size + 1, self._evicted)
        self._encoder = EncoderCache(max(machine.max_batched_tokens, machine.largest_image))
        self.waiting: deque[EngineRequest] = deque()
        self.running: dict[EngineRequest, None] = {}  # in order of admission
        self._prefilling: list[EngineRequest] = []
        self._steps = 0  # that decoded
        self._context = 0  # tokens whose keys and values the next decode step reads
        self._decoding = 0
        self._finishes: list[tuple[int, int, int, EngineRequest]] = []
        self._growths: list[tuple[int, int, int, EngineRequest]] = []
        self._planned: dict[EngineRequest, int] = {}
        self._span = 0  # current decode steps; 0: a step that also computes prompts
        self._began = 0.0
        self._admissions = 0
        self._changes: dict[bytes, bool] = {}
        self.due = NEVER  # seconds; end of the current step or run of steps
        self.first_due = NEVER  # end of the first step of a run, when the engine publishes
        self.computed_tokens = 0
        self.encoded_tokens = 0
        self.preemptions = 0

    def changes(self) -> tuple[list[bytes], list[bytes]]:
        if not self._changes:
            return [], []
        changed, self._changes = self._changes, {}
        return [name for name, held in changed.items() if held], [name for name, held in changed.items() if not held]

    def add(self, sequence: EngineRequest, now: float) -> None:
        """Queue a request. Raises ``ValueError`` for one that never fits."""
        if -(-(sequence.tokens + sequence.output) // self._size) >= self.pool.size:
            raise ValueError(f"{sequence.tokens} tokens and {sequence.output} more do not fit into the cache")
        self.waiting.append(sequence)
        if self.due == NEVER:
            self._schedule(now)
        elif self._span > 1 and len(self.waiting) == 1:
            self._cut(now)

    def advance(self, now: float) -> StepResult:
        result = StepResult()
        if self._span or self._decoding:
            steps = self._span or 1
            self._steps += steps
            self._context += steps * self._decoding
        while self._finishes and self._finishes[0][0] <= self._steps:
            _, _, life, sequence = heapq.heappop(self._finishes)
            if life == sequence.life:
                self._end(sequence, result)
        if self._planned:
            planned, self._planned = self._planned, {}
            for sequence, count in planned.items():
                before, sequence.computed = sequence.computed, sequence.computed + count
                for item in sequence.media:
                    if before < item.end <= sequence.computed:
                        self._encoder.done(str(sequence.number), item.identifier)
                if sequence.computed == sequence.length:
                    self._sample_first(sequence, result)
        self._schedule(now)
        return result

    def _sample_first(self, sequence: EngineRequest, result: StepResult) -> None:
        """Give a computed prompt its first token; it decodes from now on."""
        self._prefilling.remove(sequence)
        sequence.length += 1
        if not sequence.answered:
            sequence.answered = True
            result.answered.append(sequence)
        left = sequence.tokens + sequence.output - sequence.length
        if left <= 0:
            self._release(sequence)
            result.ended.append(sequence)
            return
        sequence.decodes, sequence.joined = True, self._steps
        self._decoding += 1
        self._context += sequence.computed + 1
        heapq.heappush(self._finishes, (self._steps + left, sequence.order, sequence.life, sequence))
        room = len(sequence.blocks) * self._size - sequence.computed
        heapq.heappush(self._growths, (self._steps + room, sequence.order, sequence.life, sequence))

    def _end(self, sequence: EngineRequest, result: StepResult) -> None:
        self._settle(sequence)
        self._release(sequence)
        result.ended.append(sequence)

    def _settle(self, sequence: EngineRequest) -> None:
        steps = self._steps - sequence.joined
        sequence.computed += steps
        sequence.length += steps
        sequence.decodes = False
        self._decoding -= 1
        self._context -= sequence.computed + 1

    def _release(self, sequence: EngineRequest) -> None:
        sequence.life += 1
        del self.running[sequence]
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.stored = [], 0
        self._forget_images(sequence)

    def _forget_images(self, sequence: EngineRequest) -> None:
        for item in sequence.media:
            self._encoder.done(str(sequence.number), item.identifier)

    def _schedule(self, now: float) -> None:
        self._grow()
        budget = self._machine.max_batched_tokens - self._decoding
        visual = 0
        planned = self._planned
        for sequence in list(self._prefilling):
            if budget <= 0:
                break
            if sequence not in self.running:
                continue  # preempted
            wanted, fresh = self._encode(sequence, min(sequence.length - sequence.computed, budget), visual)
            if wanted <= 0:
                continue
            if not self._fit(sequence, partial(self._allocate, sequence, wanted)):
                break
            visual += self._encoded(sequence, fresh)
            planned[sequence] = wanted
            budget -= wanted
        while self.waiting and budget > 0 and len(self.running) < self._machine.max_seqs:
            sequence = self.waiting[0]
            admitted = self._admit(sequence, budget, visual)
            if admitted is None:
                break
            self.waiting.popleft()
            planned[sequence] = admitted[0]
            budget -= admitted[0]
            visual += admitted[1]
        self.computed_tokens += sum(planned.values())
        self.encoded_tokens += visual
        self._began = now
        self._span = 0
        if not planned and not self._decoding:
            self.due = self.first_due = NEVER
        elif planned:
            self.due = self.first_due = now + self._mixed(planned, visual)
        else:
            self._span = min(self._next(self._finishes), self._next(self._growths)) - self._steps
            self.due = now + self._seconds(self._span)
            self.first_due = now + self._seconds(1)

    def _mixed(self, planned: dict[EngineRequest, int], visual: int) -> float:
        """Return the time of a step that computes prompts; recomputing an answer costs a decode step."""
        machine = self._machine
        prefill = sum(count for sequence, count in planned.items() if sequence.computed < sequence.tokens)
        seconds = prefill / machine.prefill_rate + visual * machine.encode_seconds
        if self._decoding or any(sequence.computed >= sequence.tokens for sequence in planned):
            seconds += machine.decode_seconds + machine.read_seconds * self._context
        return seconds

    def _seconds(self, steps: int) -> float:
        """Return the time of consecutive decode steps; each reads one more token per request."""
        machine = self._machine
        first = machine.decode_seconds + machine.read_seconds * self._context
        return steps * first + machine.read_seconds * self._decoding * (steps * (steps - 1) / 2)

    def _cut(self, now: float) -> None:
        """End the current run of decode steps with its current step, because a request waits."""
        low, high = 1, self._span
        while low < high:
            middle = (low + high) // 2
            if self._began + self._seconds(middle) >= now:
                high = middle
            else:
                low = middle + 1
        self._span = low
        self.due = self._began + self._seconds(low)

    def _next(self, heap: list[tuple[int, int, int, EngineRequest]]) -> int:
        while heap and heap[0][2] != heap[0][3].life:
            heapq.heappop(heap)
        return heap[0][0] if heap else 1 << 60

    def _grow(self) -> None:
        """Give a block to each request that decodes into a new one; preempt the youngest where none is free."""
        growing: list[EngineRequest] = []
        while self._next(self._growths) <= self._steps:
            growing.append(heapq.heappop(self._growths)[3])
        for sequence in sorted(growing, key=lambda s: s.order):
            if not sequence.decodes:
                continue  # preempted
            if self._fit(sequence, lambda: self.pool.free > 0):
                sequence.blocks += self.pool.take(1)
                heapq.heappush(self._growths, (self._steps + self._size, sequence.order, sequence.life, sequence))

    def _fit(self, sequence: EngineRequest, fits: Callable[[], bool]) -> bool:
        """Preempt the youngest until a request fits. ``False``: it was the youngest itself."""
        while not fits():
            victim = next(reversed(self.running))
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: EngineRequest) -> None:
        if sequence.decodes:
            self._settle(sequence)
        else:
            self._prefilling.remove(sequence)
        self._planned.pop(sequence, None)
        self._release(sequence)
        sequence.computed = 0
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def _admit(self, sequence: EngineRequest, budget: int, visual: int) -> tuple[int, int] | None:
        """Give a waiting request its first blocks; return (tokens, visual tokens), ``None`` if it must wait."""
        size, find = self._size, self.pool.find
        hits: list[int] = []
        for name in sequence.names[: (sequence.length - 1) // size]:
            block = find(name)
            if block is None:
                break
            hits.append(block)
        sequence.computed = len(hits) * size
        wanted, fresh = self._encode(sequence, min(sequence.length - sequence.computed, budget), visual)
        whole = -(-sequence.length // size) - len(hits)
        # The whole prompt must fit, or a long one would preempt itself half-way.
        if wanted <= 0 or whole + self.pool.idle(hits) > self.pool.free:
            sequence.computed = 0
            self._forget_images(sequence)
            return None
        self._admissions += 1
        sequence.order = self._admissions
        self.running[sequence] = None
        self._prefilling.append(sequence)
        self.pool.hold(hits)
        sequence.blocks, sequence.stored = hits, len(hits)
        if not self._allocate(sequence, wanted):
            raise AssertionError("a prompt that fits does not fit in part")
        if sequence.cached is None:
            sequence.cached = sequence.computed
        return wanted, self._encoded(sequence, fresh)

    def _allocate(self, sequence: EngineRequest, count: int) -> bool:
        """Take the blocks for ``count`` more tokens and register the full ones. ``False``: not enough free blocks."""
        reach = sequence.computed + count
        missing = -(-reach // self._size) - len(sequence.blocks)
        if missing > self.pool.free:
            return False
        if missing > 0:
            sequence.blocks += self.pool.take(missing)
        full = min(reach // self._size, len(sequence.names))
        first = sequence.stored
        if first < full:
            names = sequence.names[first:full]
            for name in names:
                if self.pool.find(name) is None:
                    self._changes[name] = True
            self.pool.fill(sequence.blocks[first:full], names)
            sequence.stored = full
        return True

    def _evicted(self, name: bytes) -> None:
        if self.pool.find(name) is None:
            self._changes[name] = False

    def _encode(self, sequence: EngineRequest, wanted: int, visual: int) -> tuple[int, list[Media]]:
        if not sequence.media:
            return wanted, []
        room = self._encoder.room - visual
        return self._encoder.plan(str(sequence.number), sequence.media, sequence.computed, wanted, room)

    def _encoded(self, sequence: EngineRequest, fresh: list[Media]) -> int:
        for item in fresh:
            self._encoder.add(str(sequence.number), item)
        return sum(item.length for item in fresh)
