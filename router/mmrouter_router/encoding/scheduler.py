"""The encoder scheduler: requests with images in, what to send to which encoder out.

Mode ``auto`` wants the earliest estimated finish of each request. Its largest image goes to where it is done first;
each further one to the slowest encoder that does not make the request later, else to where it is done first. Images
wait here and not in the encoders, so an image goes elsewhere as long as nobody has begun with it: whenever an encoder
is done sooner or later than estimated, what waits last moves to where it will be done earlier. What waits is ordered
by arrival plus ``PATIENCE`` times the request's own work, so a small request passes a large one, and none is passed
for longer than its own size is worth.

Modes ``perImage`` and ``perRequest`` take turns by weight (smooth weighted round robin), and what was placed stays.

In every mode an embedding that an encoder holds is used, an image that is being encoded is waited for, queues are
bounded, and what an encoder that left, failed or stalled had goes to the others. Every tie is broken by encoder id.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from mmrouter_router.core.linear_cost import Line, guess
from mmrouter_router.encoding import choice as choose
from mmrouter_router.encoding.lane import Job, Lane
from mmrouter_router.encoding.types import (
    Abort,
    Answer,
    Encoder,
    Image,
    Lost,
    Mode,
    Outcome,
    Placed,
    Ready,
    Start,
    View,
)
from mmrouter_router.encoding.weighted_turns import Turns

PATIENCE: Final = 2.0
"""Times its own work (seconds on the whole fleet) that a request may be passed by later ones."""
ATTEMPTS: Final = 3
"""Failures of an image after which its requests are given up."""
MOVES: Final = 8
"""Images that one event moves at most: what is left moves with the next."""
LOOK_AGAIN: Final = 1.0
"""Seconds until an encoder that stalled is looked at again while no other could take its work."""


@dataclass(eq=False, slots=True)
class _Request:
    """A request that waits, and the answers that are there, by key."""

    images: tuple[Image, ...]
    answers: dict[bytes, Answer]


@dataclass(slots=True)
class _Doing:
    """An outcome that is being collected."""

    aborts: list[Abort] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    ready: list[Ready] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    moved: int = 0

    def outcome(self, placed: Iterable[Placed] = ()) -> Outcome:
        """Return it as a value."""
        return Outcome(
            tuple(self.aborts), tuple(self.starts), tuple(self.ready), tuple(self.lost), tuple(placed), self.moved
        )


class Encoders:
    """Encoders, what waits for them, and what they hold. Not thread-safe; ``now`` never runs backwards."""

    def __init__(self, mode: Mode = "auto", first: Callable[[str], Line] = guess) -> None:
        self.mode = mode
        self._first = first
        self._lanes: dict[str, Lane] = {}  # in the order of their ids
        self._turns = Turns()
        self._requests: dict[str, _Request] = {}
        self._flights: dict[bytes, Job] = {}  # every image that waits or runs
        self._runs: dict[int, Job] = {}
        self._count = 0

    # -- encoders come and go

    def join(self, encoder: Encoder, now: float) -> Outcome:
        """An encoder is there, or has other bounds than before. It begins with what its like have been measured to do.

        Raises ``ValueError`` for one that is leaving: what comes back has an empty cache, so it needs another id.
        """
        doing = _Doing()
        lane = self._lanes.get(encoder.id)
        if lane is None:
            lane = Lane(encoder, self._line_of(encoder.kind))
            self._lanes = dict(sorted([*self._lanes.items(), (encoder.id, lane)]))
        elif lane.leaving:
            raise ValueError(f"encoder {encoder.id} is leaving: one that comes back needs another id")
        else:
            lane.rebound(encoder)
        return self._settled([lane], now, doing)

    def leave(self, encoder: str, now: float) -> Outcome:
        """It takes nothing more: what waits for it goes to the others, what it runs may end. Unknown ids are ignored.

        Its embeddings count as gone.
        """
        doing = _Doing()
        lane = self._lanes.get(encoder)
        if lane is not None and not lane.leaving:
            lane.leaving = True
            self._turns.forget(encoder)
            self._rehome(list(lane.waiting), now, doing)
        return self._settled([], now, doing)

    # -- requests

    def place(self, request: str, images: Sequence[Image], now: float) -> Outcome:
        """Book a request's images. ``ready`` may hold it already; ``full`` says that nothing was booked.

        Raises ``ValueError`` for a request that is being encoded, or for images of one key that differ.
        """
        if request in self._requests:
            raise ValueError(f"request {request} is being encoded")
        wanted = {image.key: image for image in images}
        if any(wanted[image.key] != image for image in images):
            raise ValueError("images of one key differ")
        holders = {key: lane for key in wanted if (lane := self._holder(key)) is not None}
        fresh = [image for key, image in wanted.items() if key not in holders and key not in self._flights]
        lanes = choose.eligible(self._lanes.values(), self.mode, now)
        if fresh and (full := choose.full(lanes, self.mode, len(fresh), now)) is not None:
            return Outcome(full=full)
        answers = {key: Answer(lane.id, lane.held.use(key)) for key, lane in holders.items()}
        self._requests[request] = _Request(tuple(images), answers)
        weighed = self._book(fresh, lanes, now)
        placed: dict[bytes, Placed] = {}
        for key in wanted:
            if key in holders:
                placed[key] = Placed("held", holders[key].id, now)
                continue
            job = self._flights[key]
            job.waiters[request] = None
            finish = job.lane.expected(job, now)
            placed[key] = Placed("queued" if key in weighed else "joined", job.lane.id, finish, weighed.get(key, ()))
        doing = _Doing()
        self._tell_if_ready(request, doing)
        return self._settled([], now, doing, [placed[image.key] for image in images])

    def cancel(self, request: str, now: float) -> Outcome:
        """Nobody waits for the request any more: take back what only it wanted. Unknown ids are ignored."""
        doing = _Doing()
        return self._settled(self._withdraw(request, now, doing), now, doing)

    # -- what encoders did

    def finished(self, run: int, now: float, value: object = None, size: int = 0) -> Outcome:
        """An encoder answered. ``value`` comes back in answers, now and while the embedding is held.

        ``size``: bytes of the embedding, if the encoder said so.
        """
        doing = _Doing()
        job = self._runs.pop(run, None)
        if job is None:
            return Outcome()
        job.lane.encoded(job, now, value, size)
        del self._flights[job.image.key]
        for request in job.waiters:
            self._requests[request].answers[job.image.key] = Answer(job.lane.id, value)
            self._tell_if_ready(request, doing)
        return self._settled([job.lane], now, doing)

    def failed(self, run: int, now: float, *, refused: bool = False) -> Outcome:
        """An encoder failed on an image; it goes to another one, and the encoder rests.

        ``refused``: it is the image's fault, so every request that shows it is lost and the encoder is not to blame.
        """
        doing = _Doing()
        job = self._runs.pop(run, None)
        if job is None:
            return Outcome()
        lane = job.lane
        lane.end(job, now)
        if refused:
            return self._settled([lane, *self._give_up(job, "image_refused", now, doing)], now, doing)
        lane.rest(now)
        job.tried.add(lane.id)
        job.attempts += 1
        freed: list[Lane] = []
        if job.attempts >= ATTEMPTS:
            freed = self._give_up(job, "attempts", now, doing)
        else:
            self._rehome([job], now, doing)
        self._rehome([other for other in lane.waiting if other is not job], now, doing)
        return self._settled(freed, now, doing)

    def forget(self, encoder: str, key: bytes) -> None:
        """Somebody found that the encoder does not hold this embedding."""
        if encoder in self._lanes:
            self._lanes[encoder].held.forget(key)

    def tick(self, now: float) -> Outcome:
        """Move work away from encoders that stalled; to be called at ``next_tick``. The last encoder keeps its work."""
        doing = _Doing()
        for lane in list(self._lanes.values()):
            others = [other for other in self._lanes.values() if other is not lane and not other.leaving]
            if lane.stalls_at() > now or all(other.rests(now) for other in others):
                continue
            stuck = list(lane.running.values())
            for job in stuck:
                self._abort(job, now, doing)
                job.tried.add(lane.id)
            lane.rest(now)
            self._rehome([*stuck, *lane.waiting], now, doing)
        return self._settled([], now, doing)

    def next_tick(self, now: float) -> float:
        """Return when ``tick`` has something to look at, later than ``now``; infinity while nothing runs."""
        at = min((lane.stalls_at() for lane in self._lanes.values()), default=math.inf)
        return at if at > now else now + LOOK_AGAIN

    def views(self, now: float) -> tuple[View, ...]:
        """Return every encoder's state, by id."""
        return tuple(lane.view(now) for lane in self._lanes.values())

    # -- below: one step each

    def _book(self, fresh: Sequence[Image], lanes: Sequence[Lane], now: float) -> dict[bytes, choose.Finishes]:
        """Let every image wait somewhere; there is room. Returns what was weighed for each."""
        weighed: dict[bytes, choose.Finishes] = {}
        due, end = now, 0.0
        only: Lane | None = None
        if self.mode == "auto":
            # Largest first: what is small fits beside it.
            fresh = sorted(fresh, key=lambda image: (-image.tokens, image.key))
            due += PATIENCE * choose.alone(lanes, fresh, now)
        elif self.mode == "perRequest" and fresh:
            only = self._turn([lane for lane in lanes if lane.room >= len(fresh)])
        for image in fresh:
            self._count += 1
            with_room = [lane for lane in lanes if lane.room > 0]
            open_ = [lane for lane in with_room if not lane.rests(now)] or with_room
            job = Job(image, (due, self._count), open_[0])
            if self.mode == "auto":
                lane, weighed[image.key] = choose.within(job, open_, end, now)
                end = max(end, dict(weighed[image.key])[lane.id])
            else:
                lane, weighed[image.key] = only or self._turn(open_), ()
            lane.put(job)
            self._flights[image.key] = job
        return weighed

    def _turn(self, lanes: Iterable[Lane]) -> Lane:
        return self._lanes[self._turns.take({lane.id: lane.encoder.weight for lane in lanes})]

    def _holder(self, key: bytes) -> Lane | None:
        return next((lane for lane in self._lanes.values() if key in lane.held and not lane.leaving), None)

    def _line_of(self, kind: str) -> Line:
        like = [lane for lane in self._lanes.values() if lane.encoder.kind == kind and lane.rate.measured]
        if not like:
            return self._first(kind)
        return max(like, key=lambda lane: (lane.rate.measured, lane.id)).rate.line

    def _tell_if_ready(self, request: str, doing: _Doing) -> None:
        waiting = self._requests[request]
        if all(image.key in waiting.answers for image in waiting.images):
            del self._requests[request]
            doing.ready.append(Ready(request, tuple(waiting.answers[image.key] for image in waiting.images)))

    def _withdraw(self, request: str, now: float, doing: _Doing) -> list[Lane]:
        """Take back a request. Returns the encoders that have less to do for it."""
        gone = self._requests.pop(request, None)
        freed: list[Lane] = []
        for key in dict.fromkeys(image.key for image in gone.images) if gone else ():
            job = self._flights.get(key)
            if job is None or request not in job.waiters:
                continue  # encoded already; or so, and another request has it encoded again
            del job.waiters[request]
            if job.waiters:
                continue
            del self._flights[key]
            if job.run is None:
                job.lane.take(job)
            else:
                self._abort(job, now, doing)
            freed.append(job.lane)
        return freed

    def _abort(self, job: Job, now: float, doing: _Doing) -> None:
        assert job.run is not None
        doing.aborts.append(Abort(job.run, job.lane.id))
        del self._runs[job.run]
        job.lane.end(job, now)

    def _give_up(
        self, job: Job, reason: Literal["no_encoder", "image_refused", "attempts"], now: float, doing: _Doing
    ) -> list[Lane]:
        """An image that waits and runs nowhere any more has failed; so have all requests that show it."""
        del self._flights[job.image.key]
        freed: list[Lane] = []
        for request in job.waiters:
            doing.lost.append(Lost(request, reason))
            freed += self._withdraw(request, now, doing)
        return freed

    def _rehome(self, jobs: Sequence[Job], now: float, doing: _Doing) -> None:
        """Find another encoder for jobs that wait with one that lost them, or run nowhere any more."""
        for job in sorted(jobs, key=lambda job: job.key):
            if self._flights.get(job.image.key) is not job:
                continue  # its requests were given up with another image of theirs
            before = job.lane
            target = choose.another(job, self._lanes.values(), now)
            if job in before.waiting:
                before.take(job)
            if target is None:
                self._give_up(job, "no_encoder", now, doing)
                continue
            target.put(job)
            doing.moved += target is not before

    def _settled(self, lanes: Iterable[Lane], now: float, doing: _Doing, placed: Iterable[Placed] = ()) -> Outcome:
        """Send what can be sent, and let work move to or from encoders whose load is other than was thought."""
        self._start(now, doing)
        for lane in lanes if self.mode == "auto" else ():
            for _ in range(MOVES):
                move = choose.best_move(lane, self._lanes.values(), now)
                if move is None:
                    break
                job, target = move
                job.lane.take(job)
                target.put(job)
                doing.moved += 1
                self._start(now, doing)
        for lane in [lane for lane in self._lanes.values() if lane.leaving and not lane.running]:
            del self._lanes[lane.id]
        return doing.outcome(placed)

    def _start(self, now: float, doing: _Doing) -> None:
        for lane in self._lanes.values():
            while lane.waiting and lane.has_slot and not lane.leaving:
                self._count += 1
                job = lane.start(self._count, now)
                self._runs[self._count] = job
                doing.starts.append(Start(self._count, lane.id, job.image))
