"""Continuous batching of one rank over its block pool, in steps.

A step is two calls. :meth:`Scheduler.schedule` selects requests, allocates and fills blocks, and returns the duration;
:meth:`Scheduler.complete`, called after that time, samples tokens, ends requests and returns the events. As in the
engine, blocks become findable when they are scheduled, so of two equal requests in one step the second one hits the
first. Physical copies arise from blocks that are filled side by side: during decoding, for the last block of a prompt
of exactly n blocks, and for prompts that are computed over several steps.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from mmrouter_sim.core.caches import BlockPool, CacheContents, EncoderCache
from mmrouter_sim.core.events import AllBlocksCleared, Dialect, Event, VllmDialect
from mmrouter_sim.core.requests import Finish, Media, Request
from mmrouter_sim.core.step_cost import Cost


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one rank from the launch flags. Raises ``ValueError`` if the engine would not start with them."""

    blocks: int  # the reserved one included
    block_size: int = 16
    max_model_len: int = 32_768
    max_batched_tokens: int = 2048
    max_seqs: int = 256
    largest_image: int = 0  # visual tokens; the encoder cache holds at least these
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.max_batched_tokens < 1 or self.max_seqs < 1:
            raise ValueError("block size, batched tokens and sequences must be at least 1")
        room = (self.blocks - 1) * self.block_size
        if self.max_model_len > room:
            raise ValueError(
                f"the KV cache holds {room} tokens ({self.blocks} blocks of {self.block_size}, one reserved), "
                f"fewer than the maximum model length of {self.max_model_len}"
            )


@dataclass(slots=True)
class Step:
    """One scheduled step: tokens per request, and its duration in seconds."""

    tokens: dict[Request, int]
    seconds: float
    visual_tokens: int


@dataclass(frozen=True, slots=True)
class Output:
    """One sampled token of a request; ``finished`` says why it was the last one."""

    request: Request
    token: int
    finished: Finish | None


@dataclass(slots=True)
class Counters:
    """Totals since the start, in tokens unless the name says otherwise."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    external_hits: int = 0  # received from another engine
    visual_tokens: int = 0  # encoded here
    prompt_tokens: int = 0
    generated: int = 0
    preemptions: int = 0  # requests
    expired: int = 0  # requests whose blocks were not fetched in time


class Scheduler:
    """One data-parallel rank. Deterministic for a given seed and order of calls."""

    def __init__(
        self,
        limits: Limits,
        *,
        cost: Cost | None = None,
        seed: int = 0,
        dialect: Dialect | None = None,
        embedded: Callable[[str], bool] = lambda identifier: False,
    ) -> None:
        """``dialect``: vLLM's by default. ``embedded``: whether an image's embedding came from an encoder."""
        self.limits = limits
        self.cost = cost or Cost()
        self.counters = Counters()
        self.pool = BlockPool(limits.blocks, self._evicted)
        self.contents = CacheContents(limits.block_size)
        self.encoder = EncoderCache(max(limits.max_batched_tokens, limits.largest_image))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.held: dict[str, list[int]] = {}  # request -> blocks held until another engine has fetched them
        self._embedded = embedded
        self._dialect = dialect or VllmDialect(limits.block_size)
        self._rng = random.Random(seed)
        self._events: list[Event] = []

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, request: Request) -> None:
        """Queue a request. Raises ``ValueError`` if it can never run; the server refuses those before."""
        if not request.ids:
            raise ValueError("the prompt is empty")
        if len(request.ids) >= self.limits.max_model_len:
            raise ValueError(f"the prompt has {len(request.ids)} tokens, the model takes {self.limits.max_model_len}")
        if any(item.length > self.encoder.room for item in request.media):
            raise ValueError(f"an image has more than {self.encoder.room} tokens")
        self._dialect.extend(request)
        self.waiting.append(request)

    def abort(self, request: Request, reason: Finish = "abort") -> None:
        """End a request whose client is gone or has its answer. Does nothing for one that has ended."""
        if request.finished is None:
            self._end(request, reason)

    def give(self, name: str) -> None:
        self.pool.release(self.held.pop(name))

    def reset(self) -> bool:
        """Clear the prefix cache; ``False`` while requests hold blocks. The event is published with the next step."""
        if not self.pool.clear():
            return False
        self.contents.clear()
        self._events.append(AllBlocksCleared())
        return True

    def schedule(self) -> Step | None:
        """Return the next step, or ``None`` if no request can run. Running requests are first, oldest first."""
        budget = self.limits.max_batched_tokens
        visual = 0
        tokens: dict[Request, int] = {}
        position = 0
        while position < len(self.running) and budget > 0:
            request = self.running[position]
            wanted = min(len(request.ids) - request.computed, budget)
            wanted, fresh = self._encode(request, wanted, visual)
            if wanted <= 0:
                position += 1
                continue
            # Preempt the youngest until this one fits, itself last (first come, first served).
            while (fits := self._allocate(request, wanted)) is False:
                victim = self.running.pop()
                self._preempt(victim)
                if victim is request:
                    break
            if not fits:
                break
            visual += self._encoded(request, fresh)
            tokens[request] = wanted
            budget -= wanted
            position += 1
        # A request that was just preempted is first here and lacks a block, so no other request overtakes it.
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_seqs:
            admitted = self._admit(self.waiting[0], budget, visual)
            if admitted is None:
                break
            wanted, encoded = admitted
            request = self.waiting.popleft()
            self.running.append(request)
            visual += encoded
            tokens[request] = wanted
            budget -= wanted
        if not tokens:
            return None
        prefill = sum(count for request, count in tokens.items() if request.computed < request.prompt_length)
        decoding = any(request.computed >= request.prompt_length for request in tokens)
        seconds = self.cost.seconds(prefill=prefill, visual=visual, decoding=decoding, rng=self._rng)
        return Step(tokens, seconds, visual)

    def complete(self, step: Step) -> tuple[list[Output], list[Event]]:
        outputs: list[Output] = []
        for request, count in step.tokens.items():
            if request.finished is not None:  # aborted while it ran
                continue
            before = request.computed
            request.computed += count
            for item in request.media:
                if before < item.end <= request.computed:
                    self.encoder.done(request.id, item.identifier)
            if request.computed == len(request.ids):
                outputs.append(self._sample(request))
        return outputs, self.news()

    def news(self) -> list[Event]:
        events, self._events = self._events, []
        return self._dialect.joined(events)

    def _sample(self, request: Request) -> Output:
        token = request.sample(request.answer_length)
        if not request.answer_length:
            self.counters.prompt_tokens += request.prompt_length
        self.counters.generated += 1
        request.ids.append(token)
        self._dialect.extend(request)
        finished: Finish | None = None
        if token in request.stop_ids:
            finished = "stop"
        elif request.answer_length >= request.max_tokens or len(request.ids) >= self.limits.max_model_len:
            finished = "length"
        if finished is not None:
            self._end(request, finished)
        return Output(request, token, finished)

    def _admit(self, request: Request, budget: int, visual: int) -> tuple[int, int] | None:
        """Allocate the first blocks of a waiting request. Returns (tokens, visual tokens), ``None`` to wait."""
        hits = self._hits(request)
        hit = len(hits) * self.limits.block_size
        request.computed = received = max(hit, min(request.external, len(request.ids) - 1))
        wanted = min(len(request.ids) - request.computed, budget)
        wanted, fresh = self._encode(request, wanted, visual)
        size = self.limits.block_size
        whole = -(-len(request.ids) // size) - len(hits)
        # The whole prompt must fit, or a long one would preempt itself half-way.
        if wanted <= 0 or whole + self.pool.idle(hits) > self.pool.free:
            request.computed = 0
            self._forget_images(request)  # or a waiting request could block the encoding of running ones
            return None
        self.pool.hold(hits)
        request.blocks = hits
        request.stored = len(hits)
        if hits and request.report_hits:
            self._events.append(self._dialect.stored(request, 0, len(hits)))
        request.computed = hit
        # Received tokens are in blocks of their own at once, without computation.
        fits = self._allocate(request, received - hit)
        request.computed = received
        if not (fits and self._allocate(request, wanted)):
            raise AssertionError("a prompt that fits whole does not fit in part")
        if request.cached_tokens is None:
            request.cached_tokens = hit
            self.counters.external_hits += received - hit
            self.counters.prefix_queries += len(request.ids)
            self.counters.prefix_hits += hit
        return wanted, self._encoded(request, fresh)

    def _hits(self, request: Request) -> list[int]:
        """Return the cached blocks of the longest prefix, without the last token, from which the next is sampled."""
        if not self.limits.prefix_caching:
            return []
        hits: list[int] = []
        for digest in request.digests[: (len(request.ids) - 1) // self.limits.block_size]:
            block = self.pool.find(digest)
            if block is None:
                break
            hits.append(block)
        return hits

    def _encode(self, request: Request, wanted: int, visual: int) -> tuple[int, list[Media]]:
        if not request.media:
            return wanted, []
        return self.encoder.plan(request.id, request.media, request.computed, wanted, self.encoder.room - visual)

    def _encoded(self, request: Request, fresh: list[Media]) -> int:
        for item in fresh:
            self.encoder.add(request.id, item)
        encoded = sum(item.length for item in fresh if not self._embedded(item.identifier))
        self.counters.visual_tokens += encoded
        return encoded

    def _allocate(self, request: Request, count: int) -> bool:
        """Allocate blocks for ``count`` more tokens and make full ones findable. Returns ``False`` without space."""
        size = self.limits.block_size
        reach = request.computed + count
        missing = -(-reach // size) - len(request.blocks)
        if missing > self.pool.free:
            return False
        if missing > 0:
            request.blocks += self.pool.take(missing)
        self._store(request, min(reach, request.prompt_length if self._dialect.single else reach) // size)
        return True

    def _store(self, request: Request, full: int) -> None:
        """Make the first ``full`` blocks of a request findable."""
        first = request.stored
        if not self.limits.prefix_caching or full <= first:
            return
        if self._dialect.single:
            while first < full and self.pool.find(request.digests[first]) is not None:
                first += 1  # another request computed it too: its copy stays, this one is freed unnamed
            full = next((n for n in range(first, full) if self.pool.find(request.digests[n]) is not None), full)
        if first < full:
            self.pool.fill(request.blocks[first:full], request.digests[first:full])
            self.contents.fill(request, first, full)
            self._events.append(self._dialect.stored(request, first, full))
        request.stored = full

    def _evicted(self, digest: bytes) -> None:
        if self.pool.find(digest) is None:
            self.contents.forget(digest)
        self._events.append(self._dialect.removed(digest))

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.computed = request.external = 0  # received blocks are gone too
        request.preemptions += 1
        self.counters.preemptions += 1
        self.waiting.appendleft(request)

    def _end(self, request: Request, reason: Finish) -> None:
        if self._dialect.single and request in self.running:
            self._store(request, request.computed // self.limits.block_size)
        request.finished = reason
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        if request.hold and reason != "abort":
            self.held[request.id], request.blocks = request.blocks, []
        self._release(request)

    def _release(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        request.stored = 0
        self._forget_images(request)

    def _forget_images(self, request: Request) -> None:
        for item in request.media:
            self.encoder.done(request.id, item.identifier)
