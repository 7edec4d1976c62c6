"""One encoder's share of the work: what waits for it, what it does now, and when that will be done."""

import math
from bisect import bisect_right, insort
from dataclasses import dataclass, field
from typing import Final

from mmrouter_router.core.linear_cost import Line, Rate
from mmrouter_router.encoding.held_images import Held
from mmrouter_router.encoding.types import Encoder, Image, View

OVERRUN: Final = 0.25
"""What runs longer than estimated is believed to need this share of its time again: it is not done by wishing."""
STALL_FACTOR: Final = 8.0
STALL_LEAST: Final = 2.0
"""An encoder stalls when what it runs takes so many times its estimate, and at least so many seconds."""
STALL_COLD: Final = 120.0
"""The bound of an encoder that has not encoded yet: its estimate is a guess, and first images compile kernels."""
REST: Final = 1.0
REST_MOST: Final = 60.0
"""Seconds that an encoder gets nothing after a stall or a failure; doubled each time until it encodes again."""


@dataclass(eq=False, slots=True)
class Job:
    """One image that is to be encoded once, for everybody who waits for it."""

    image: Image
    key: tuple[float, int]  # its place in any queue; unique
    lane: "Lane"
    waiters: dict[str, None] = field(default_factory=dict)  # request ids, in their order
    run: int | None = None  # None: it waits
    tried: set[str] = field(default_factory=set)  # encoders that failed or stalled on it
    attempts: int = 0


class Lane:
    """One encoder. Waiting jobs are in the order of their keys; sums of them are kept, not counted anew."""

    def __init__(self, encoder: Encoder, first: Line) -> None:
        self.encoder = encoder
        self.rate = Rate(first)
        self.held = Held(encoder.cache_entries, encoder.cache_bytes)
        self.waiting: list[Job] = []
        self.running: dict[int, Job] = {}
        self.leaving = False
        self.troubles = 0  # stalls and failures since it last encoded
        self.rests_until = -math.inf
        self._tokens_waiting = 0
        self._tokens_running = 0
        self._since = 0.0  # when it began with what it does now

    @property
    def id(self) -> str:
        """The encoder's id."""
        return self.encoder.id

    @property
    def has_slot(self) -> bool:
        """Whether it can be sent another image now."""
        return len(self.running) < self.encoder.slots

    @property
    def room(self) -> int:
        """Images that it can be given: free slots, and free places in its queue. Below 0 after work was moved here."""
        return self.encoder.slots - len(self.running) + self.encoder.queue - len(self.waiting)

    def rests(self, now: float) -> bool:
        """Whether it gets nothing: it rests, or it is on probation after that and has its one image already."""
        return now < self.rests_until or (self.troubles > 0 and bool(self.running or self.waiting))

    # -- times

    def markdown(self, now: float) -> float:
        """Return how many times as slow it is taken to be: doubled by each trouble, halved by each ``REST`` after.

        So one that nobody needs is tried again some day, and one that everybody needs is tried soon.
        """
        if not self.troubles:
            return 1.0
        return math.exp2(min(6.0, max(0.0, self.troubles - (now - self.rests_until) / REST)))

    def seconds(self, tokens: int, now: float, images: int = 1) -> float:
        """Return the estimated time for images here."""
        return self.rate.line.seconds(tokens, images) * self.markdown(now)

    def remaining(self, now: float) -> float:
        """Return the estimated seconds until what it runs is done."""
        if not self.running:
            return 0.0
        spent = now - self._since
        left = self.rate.line.seconds(self._tokens_running, len(self.running)) - spent
        return left if left > 0 else spent * OVERRUN

    def free_at(self, now: float) -> float:
        """Return the estimated time when it has done all that it has."""
        return now + self.remaining(now) + self.seconds(self._tokens_waiting, now, len(self.waiting))

    def finish(self, tokens: int, key: tuple[float, int], now: float) -> float:
        """Return the estimated finish of an image that would be put here with ``key``."""
        behind = self.waiting[bisect_right(self.waiting, key, key=_key) :]
        after = self.seconds(sum(job.image.tokens for job in behind), now, len(behind)) if behind else 0.0
        return self.free_at(now) - after + self.seconds(tokens, now)

    def expected(self, job: Job, now: float) -> float:
        """Return the estimated finish of a job that is here."""
        if job.run is not None:
            return now + self.remaining(now)
        return self.finish(0, job.key, now) - self.seconds(0, now)

    def stalls_at(self) -> float:
        """Return when what it runs counts as stalled; infinity while it runs nothing."""
        if not self.running:
            return math.inf
        estimate = self.rate.line.seconds(self._tokens_running, len(self.running))
        bound = max(STALL_LEAST, STALL_FACTOR * estimate)
        return self._since + (bound if self.rate.measured else max(STALL_COLD, bound))

    # -- work

    def put(self, job: Job) -> None:
        """Let a job wait here."""
        job.lane, job.run = self, None
        insort(self.waiting, job, key=_key)
        self._tokens_waiting += job.image.tokens

    def take(self, job: Job) -> None:
        """Take a waiting job away. Raises ``ValueError`` if it does not wait here."""
        self.waiting.remove(job)
        self._tokens_waiting -= job.image.tokens

    def start(self, run: int, now: float) -> Job:
        """Begin with the job that has waited longest. Raises ``IndexError`` without one."""
        job = self.waiting[0]
        self.take(job)
        if not self.running:
            self._since = now
        job.run = run
        self.running[run] = job
        self._tokens_running += job.image.tokens
        return job

    def end(self, job: Job, now: float) -> float:
        """It no longer runs the job. Returns the seconds that the encoder had for it alone."""
        assert job.run is not None
        del self.running[job.run]
        self._tokens_running -= job.image.tokens
        job.run = None
        spent, self._since = now - self._since, now
        return max(0.0, spent)

    def encoded(self, job: Job, now: float, value: object, size: int = 0) -> None:
        """The job is done: learn from it, and note what the encoder holds now, ``size`` bytes where it says so."""
        spent = self.end(job, now)
        self.rate.observe(job.image.tokens, spent, self.encoder.slots)
        self.held.add(job.image.key, size or job.image.size, value)
        self.troubles, self.rests_until = 0, -math.inf

    def rest(self, now: float) -> None:
        """It stalled or failed: nothing for a while, then one image to see; what it did before says little."""
        self.rate.forget()
        self.rests_until = now + min(REST_MOST, REST * math.exp2(min(self.troubles, 6)))
        self.troubles += 1

    def rebound(self, encoder: Encoder) -> None:
        """It has other bounds or another weight than before; what it has stays."""
        self.encoder = encoder
        self.held.rebound(encoder.cache_entries, encoder.cache_bytes)

    def view(self, now: float) -> View:
        """Return its state."""
        line = self.rate.line
        return View(
            id=self.id,
            waiting=len(self.waiting),
            running=len(self.running),
            backlog=self.free_at(now) - now,
            rate=1.0 / line.per_token if line.per_token > 0 else math.inf,
            overhead=line.overhead,
            measured=self.rate.measured,
            held=len(self.held),
            held_bytes=self.held.bytes,
            resting_until=self.rests_until if now < self.rests_until else None,
        )


def _key(job: Job) -> tuple[float, int]:
    return job.key
