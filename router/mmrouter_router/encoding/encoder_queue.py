"""Inputs and outputs of the encoder scheduler, and the queue of one encoder with the embeddings that it holds."""

import math
from bisect import bisect_right, insort
from collections import OrderedDict
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, Literal

from mmrouter_lib.api.routing import EncoderScheduling
from mmrouter_router.core.linear_cost import Line, Rate

Mode = EncoderScheduling
How = Literal["held", "joined", "queued"]
Failure = Literal["no_encoder", "image_refused", "attempts"]  # why the encoders cannot encode the images of a request
OVERRUN: Final = 0.25  # a job that runs longer than estimated is assumed to need this share of its elapsed time again
# An encoder stalls when its jobs take STALL_FACTOR times their estimate, and at least STALL_LEAST seconds; one that has
# not encoded yet after STALL_COLD: its estimate is a guess, and first images compile kernels.
STALL_FACTOR, STALL_LEAST, STALL_COLD = 8.0, 2.0, 120.0
BACKOFF, BACKOFF_MOST = 1.0, 60.0  # seconds without new work after a stall or failure, doubled until it encodes again


@dataclass(frozen=True, slots=True)
class Image:
    """One image of a request. ``key``: equal exactly where one embedding serves (identity, tenant's salt included)."""

    key: bytes
    tokens: int  # visual tokens, the cost of encoding
    size: int = 0  # bytes of its embedding, the cost of holding it


@dataclass(frozen=True, slots=True)
class Encoder:
    """One encoder of the fleet. ``id`` changes when it restarts, because its cache is empty then."""

    id: str
    kind: str  # accelerator kind, for the first guess at its rate
    weight: int = 100  # share of the work in the weighted modes
    queue: int = 64  # images that may wait for it in this router
    slots: int = 1  # images that it is sent at once
    cache_entries: int = 4096
    cache_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class ImagePlacement:
    """Decision for one image of a request, in the request's order.

    ``weighed``: (encoder, estimated finish on the caller's clock) of all candidates, empty where nothing was compared.
    """

    how: How
    encoder: str
    weighed: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Start:
    """Send this image to this encoder now; report ``finished`` or ``failed`` for this ``run``.

    An image that is sent again, elsewhere, is another run.
    """

    run: int
    encoder: str
    image: Image


@dataclass(slots=True)
class Outcome:
    """Actions to carry out after a call, in this order. ``placed`` and ``full`` are set by ``place`` only.

    ``aborts``: started runs that no request needs there, late results of which are ignored. ``failed``: request -> why.
    ``ready``: request -> the encoders' answers, which are opaque here, in the order of its images.
    ``moved``: images that wait or run elsewhere than before. ``full``: the queues lack space for all images of the
    request, or there is no encoder, and nothing was queued.
    """

    aborts: list[int] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    ready: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    failed: dict[str, Failure] = field(default_factory=dict)
    placed: list[ImagePlacement] = field(default_factory=list)
    moved: int = 0
    full: bool = False


@dataclass(eq=False, slots=True)
class Job:
    """One image to be encoded once, for all requests that wait for it."""

    image: Image
    key: tuple[float, int]  # its place in any queue; unique
    queue: "EncoderQueue"
    movable: bool = True  # whether it may move to an encoder that finishes it earlier, as in mode auto
    waiters: dict[str, None] = field(default_factory=dict)  # request ids, in order of arrival
    run: int | None = None  # None while it waits
    tried: set[str] = field(default_factory=set)  # encoders that failed or stalled on it
    attempts: int = 0


KEY = attrgetter("key")


class HeldEmbeddings:
    """Model of one encoder's cache, bounded in number and bytes, least recently used out first.

    Engines publish nothing about it (docs/engine-facts/vllm.md#encoder-disaggregation), so the encoder may have evicted
    an embedding that is in it.
    """

    def __init__(self, entries: int, size: int) -> None:
        self._max_entries, self._limit = entries, size
        self.entries: OrderedDict[bytes, tuple[int, Any]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self.entries

    def use(self, key: bytes) -> Any:
        """Return the encoder's answer and mark the embedding as used. Raises ``KeyError`` if it is not held."""
        self.entries.move_to_end(key)
        return self.entries[key][1]

    def add(self, key: bytes, size: int, value: Any) -> None:
        """Add an embedding of ``size`` bytes, unless it exceeds the bound alone."""
        self.forget(key)
        if size > self._limit or not self._max_entries:
            return
        self.entries[key] = (size, value)
        self.bytes += size
        while self.bytes > self._limit or len(self.entries) > self._max_entries:
            _, (freed, _) = self.entries.popitem(last=False)
            self.bytes -= freed

    def forget(self, key: bytes) -> None:
        if key in self.entries:
            self.bytes -= self.entries.pop(key)[0]


class EncoderQueue:
    """One encoder. Waiting jobs are ordered by their keys; token sums are kept incrementally."""

    def __init__(self, encoder: Encoder, first: Line) -> None:
        self.encoder = encoder
        self.rate = Rate(first)
        self.held = HeldEmbeddings(encoder.cache_entries, encoder.cache_bytes)
        self.waiting: list[Job] = []
        self.running: dict[int, Job] = {}
        self.leaving = False
        self.failures = 0  # stalls and failures since it last encoded
        self.backoff_until = -math.inf
        self.tokens_waiting = 0
        self.tokens_running = 0
        self._since = 0.0  # start of the running jobs
        self.busy_seconds = 0.0  # of all jobs that ended
        self.images = self.tokens = 0  # of the jobs that ended with success

    @property
    def id(self) -> str:
        return self.encoder.id

    @property
    def has_slot(self) -> bool:
        return len(self.running) < self.encoder.slots

    @property
    def free(self) -> int:
        """Free slots and queue places. Below 0 after work was moved here."""
        return self.encoder.slots - len(self.running) + self.encoder.queue - len(self.waiting)

    def backing_off(self, now: float) -> bool:
        """Whether it gets no work: it backs off, or is on probation after that and has its one image already."""
        return now < self.backoff_until or (self.failures > 0 and bool(self.running or self.waiting))

    def slowdown(self, now: float) -> float:
        """Return the factor on its estimates: doubled by each failure, halved by each ``BACKOFF`` seconds since.

        It lets a failed encoder be tried again, sooner the more the others are loaded.
        """
        if not self.failures:
            return 1.0
        return math.exp2(min(6.0, max(0.0, self.failures - (now - self.backoff_until) / BACKOFF)))

    def seconds(self, tokens: int, now: float, images: int = 1) -> float:
        return self.rate.line.seconds(tokens, images) * self.slowdown(now)

    def remaining(self, now: float) -> float:
        if not self.running:
            return 0.0
        elapsed = now - self._since
        left = self.rate.line.seconds(self.tokens_running, len(self.running)) - elapsed
        # Not only without any left: a second image would make an overdue encoder look free.
        return max(left, elapsed * OVERRUN)

    def free_at(self, now: float) -> float:
        return now + self.remaining(now) + self.seconds(self.tokens_waiting, now, len(self.waiting))

    def finish(self, tokens: int, key: tuple[float, int], now: float) -> float:
        """Return the estimated finish of an image that would be queued here with ``key``."""
        behind = self.waiting[bisect_right(self.waiting, key, key=KEY) :]
        after = self.seconds(sum(job.image.tokens for job in behind), now, len(behind)) if behind else 0.0
        return self.free_at(now) - after + self.seconds(tokens, now)

    def stalls_at(self) -> float:
        """Return when the running jobs count as stalled; infinity without any."""
        if not self.running:
            return math.inf
        estimate = self.rate.line.seconds(self.tokens_running, len(self.running))
        bound = max(STALL_LEAST, STALL_FACTOR * estimate)
        return self._since + (bound if self.rate.measured else max(STALL_COLD, bound))

    def put(self, job: Job) -> None:
        job.queue, job.run = self, None
        insort(self.waiting, job, key=KEY)
        self.tokens_waiting += job.image.tokens

    def take(self, job: Job) -> None:
        """Remove a waiting job. Raises ``ValueError`` if it does not wait here."""
        self.waiting.remove(job)
        self.tokens_waiting -= job.image.tokens

    def start(self, run: int, now: float) -> Job:
        """Start the first waiting job. Raises ``IndexError`` without one."""
        job = self.waiting[0]
        self.take(job)
        if not self.running:
            self._since = now
        job.run = run
        self.running[run] = job
        self.tokens_running += job.image.tokens
        return job

    def end(self, job: Job, now: float) -> float:
        """Remove a running job; returns the seconds that the encoder spent on it alone."""
        assert job.run is not None
        del self.running[job.run]
        self.tokens_running -= job.image.tokens
        job.run = None
        elapsed, self._since = max(0.0, now - self._since), now
        self.busy_seconds += elapsed
        return elapsed

    def encoded(self, job: Job, now: float, value: object, size: int = 0) -> None:
        """End a job with success: measure its time and record its embedding of ``size`` bytes (0: as estimated)."""
        elapsed = self.end(job, now)
        self.rate.observe(job.image.tokens, elapsed, self.encoder.slots)
        self.held.add(job.image.key, size or job.image.size, value)
        self.images += 1
        self.tokens += job.image.tokens
        self.failures, self.backoff_until = 0, -math.inf

    def back_off(self, now: float) -> None:
        """Give it no work for a while after a stall or failure, then one image; earlier measurements are dropped."""
        self.rate.forget()
        self.backoff_until = now + min(BACKOFF_MOST, BACKOFF * math.exp2(min(self.failures, 6)))
        self.failures += 1
