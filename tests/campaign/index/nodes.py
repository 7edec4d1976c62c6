"""Engine, sidecar and router of one simulated deployment, in virtual time: the product's own cores without sockets.

The engine is the simulator's scheduler over its block pool, and publishes its bytes. The sidecar is the product's event
order, ledger, journal and relay, the router its feed session, fleet and index. What is written here is what their
sockets and timers do (``mmrouter_sidecar.engine.sockets``, ``mmrouter_sidecar.app``,
``mmrouter_router.fleet.feed_client``).
"""

import random
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from campaign.index.history import CacheChange, Record
from campaign.index.network import Node, VirtualTime

from mmrouter_lib import feed
from mmrouter_router.fleet.cache_query import cache_query
from mmrouter_router.fleet.feed_session import CHECK_SECONDS, FeedSession
from mmrouter_router.fleet.workers import Fleet, Member, Target, Worker
from mmrouter_router.telemetry.metrics import Metrics as RouterMetrics
from mmrouter_sidecar.app import BEAT_SECONDS, FLUSH_SECONDS
from mmrouter_sidecar.engine.event_order import EventStream, Lost, NextBatch, ReplayRequest, Skipped, Step
from mmrouter_sidecar.engine.sockets import QUIET_SECONDS, REPLAY_SECONDS, RESUME_SECONDS, TAIL_SECONDS
from mmrouter_sidecar.feed.relay import DISCONNECTED, EventRelay
from mmrouter_sidecar.metrics import Metrics as SidecarMetrics
from mmrouter_sidecar.settings import Settings
from mmrouter_sim.core.events import encode_events
from mmrouter_sim.core.requests import Request
from mmrouter_sim.core.scheduler import Limits, Scheduler

BLOCK = 4  # tokens
SEQUENCES = 4  # that an engine runs at a time


@dataclass(frozen=True)
class Prompt:
    """``names``: the engine's digests of its blocks; ``keys``: the router's keys of the same blocks."""

    ids: "array[int]"
    names: tuple[bytes, ...]
    keys: "array[int]"


class EngineNode(Node):
    """One engine process. Every change of its cache goes to ``record`` when it happens."""

    def __init__(
        self,
        time: VirtualTime,
        name: str,
        *,
        blocks: int,
        buffer: int,
        record: Callable[[Record], None],
        publish: Callable[[int, bytes], None],
        dice: random.Random,
    ) -> None:
        super().__init__(time)
        self.name, self._record, self._publish, self._dice = name, record, publish, dice
        limits = Limits(blocks, BLOCK, max_model_len=(blocks - 1) * BLOCK, max_batched_tokens=64, max_seqs=SEQUENCES)
        self.scheduler = Scheduler(limits)
        self.sent: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self._sequence = self._requests = 0
        self._held: frozenset[bytes] = frozenset()
        self._steps = False

    def ask(self, prompt: Prompt, tokens: int) -> None:
        self._requests += 1
        answer = self._dice.randrange(1 << 30)
        request = Request(str(self._requests), prompt.ids[:], lambda number: answer + number & 0xFFFF, tokens)
        self.scheduler.add(request)
        if not self._steps:
            self._step()

    def reset(self) -> None:
        """Clear the cache, if no request uses it."""
        self.scheduler.reset()
        self._observe()

    def end(self) -> None:
        self.alive = False
        self._record(CacheChange(self.name, self._time.now, self._time.now, (), tuple(self._held)))

    def _step(self) -> None:
        step = self.scheduler.schedule()
        self._observe()
        self._steps = step is not None
        if step is None:
            return

        def done() -> None:
            _, events = self.scheduler.complete(step)
            self._observe()
            if events:
                payload = encode_events(self._time.now, events, 0)
                self.sent.append((self._sequence, payload))
                self._publish(self._sequence, payload)
                self._sequence += 1
            self._step()

        self.act_after(step.seconds, done)

    def _observe(self) -> None:
        held, now = frozenset(self.scheduler.pool.contents()), self._time.now
        if held != self._held:
            self._record(CacheChange(self.name, now, now, tuple(held - self._held), tuple(self._held - held)))
            self._held = held


class SidecarNode(Node):
    """One sidecar process. ``lost`` is called when it finds that it cannot know the whole cache any more."""

    def __init__(
        self,
        time: VirtualTime,
        settings: Settings,
        *,
        publish: Callable[[feed.Published], None],
        fetch: Callable[["SidecarNode", int], None],
        lost: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        super().__init__(time)
        self._fetch, self._lost = fetch, lost
        self.relay = EventRelay(settings, SidecarMetrics(), publish, clock=clock, monotonic=lambda: time.now)
        self.stream = EventStream(self.relay.proofs.get(0))
        self.replay = 0  # number of the replay under way
        self._connected = self._flushes = False
        self._received = self._checked = 0.0
        self._resumed = time.now if self.stream.resumed else None
        self.repeat(BEAT_SECONDS, self.relay.beat)
        self.repeat(QUIET_SECONDS, self._check_tail)

    def connected(self) -> None:
        self._connected, self._received = True, self._time.now
        self.relay.connected()
        self._process(self.stream.connected())
        self.relay.update_facts(state="up", version="0.32.0", block_size=BLOCK)

    def disconnected(self) -> None:
        self._connected = False
        self.replay += 1
        self.stream.ended()
        self.relay.engine_ended(DISCONNECTED)

    def live(self, seq: int, payload: bytes) -> None:
        self._received = self._time.now
        self._process(self.stream.live(seq, payload))

    def replayed(self, replay: int, batches: Sequence[tuple[int, bytes]]) -> None:
        for seq, payload in batches:
            if replay != self.replay:
                return
            self._process(self.stream.replayed(seq, payload))
        if replay == self.replay:
            self.replay += 1
            self._process(self.stream.replay_ended())

    def _check_tail(self) -> None:
        now = self._time.now
        if self._resumed is not None and now - self._resumed >= RESUME_SECONDS:
            self._process(self.stream.expire())
        if not self._connected or now - self._received < QUIET_SECONDS:
            return
        if self._checked < self._received or now - self._checked >= TAIL_SECONDS:
            self._checked = now
            self._process(self.stream.quiet())

    def _process(self, steps: list[Step]) -> None:
        for step in steps:
            match step:
                case NextBatch(seq, payload, digest):
                    self.relay.batch(0, seq, payload, digest)
                case ReplayRequest(first):
                    self.replay += 1
                    self._fetch(self, first)
                    self.act_after(REPLAY_SECONDS, lambda number=self.replay: self._unanswered(number))
                case Lost(reason):
                    self._lost()
                    self.relay.lost(0, reason)
                case Skipped():
                    self._lost()
        if self._resumed is not None and not self.stream.resumed:
            self._resumed = None
            self.relay.confirm(0)
        if self.relay.dirty and not self._flushes:
            self._flushes = True
            self.act_after(FLUSH_SECONDS, self._flush)

    def _unanswered(self, replay: int) -> None:
        if replay == self.replay:
            self._process(self.stream.replay_failed())

    def _flush(self) -> None:
        self._flushes = False
        self.relay.flush()


class RouterNode(Node):
    """One router process that follows all engines. ``reader`` names it in the history."""

    def __init__(self, time: VirtualTime, reader: str, engines: Sequence[str]) -> None:
        super().__init__(time)
        self.reader = reader
        self.fleet = Fleet(RouterMetrics(), clock=lambda: time.now)
        self.workers = {name: self.fleet.join(Member(name, name, name, "worker", "worker")) for name in engines}
        self.sessions = {name: FeedSession(worker, self.fleet) for name, worker in self.workers.items()}

    def follow(self, ask: Callable[["RouterNode", str, feed.Request], None]) -> None:
        """Open every feed. ``ask`` sends a request to the sidecar of an engine."""

        def check(name: str, session: FeedSession) -> None:
            self._ask_all(name, session.check())

        self._ask = ask
        for name, session in self.sessions.items():
            self._ask_all(name, session.opened())
            self.repeat(CHECK_SECONDS, lambda name=name, session=session: check(name, session))
        self.repeat(CHECK_SECONDS, self.fleet.index.sweep)

    def published(self, name: str, payload: bytes) -> None:
        self._ask_all(name, self.sessions[name].on_published(feed.decode_published(payload)))

    def replied(self, name: str, payload: bytes) -> None:
        self._ask_all(name, self.sessions[name].on_reply(feed.decode_reply(payload)))

    def overlaps(self, prompt: Prompt) -> dict[str, int]:
        """Return engine -> blocks of the prompt that its cache is said to hold, for engines that may be chosen."""
        routable = {name: worker for name, worker in self.workers.items() if worker.routable}
        hits = self.fleet.lookup(
            prompt.keys, len(prompt.ids), cache_query(Target(worker, 0, BLOCK) for worker in routable.values())
        )
        return {name: hits[worker.slots.get(0, -1)] for name, worker in routable.items()}

    def held(self, worker: Worker) -> set[int]:
        slot = worker.slots.get(0)
        return set() if slot is None else self.fleet.index.keys(slot)

    def _ask_all(self, name: str, requests: Sequence[feed.Request]) -> None:
        for request in requests:
            self._ask(self, name, request)
