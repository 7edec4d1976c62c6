"""The encoder scheduler: requests with images in, images to send to encoders out.

Mode ``auto`` minimises the estimated finish of each request. Its largest image goes where it is done first; each
further one to the slowest encoder that does not delay the request, else where it is done first. Images wait here and
not in the encoders, so an image can move until an encoder has begun with it: whenever an encoder is done sooner or
later than estimated, the last waiting image moves to where it is done earlier. Waiting images are ordered by arrival
plus ``PATIENCE`` times the request's own work, so a small request passes a large one for a bounded time only.

Modes ``perImage`` and ``perRequest`` distribute by smooth weighted round robin, without moves.

In every mode a held embedding is used, an image that is being encoded is joined, queues are bounded, and the work of an
encoder that left, failed or stalled goes to the others. Every tie is broken by encoder id.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from mmrouter_router.core.linear_cost import Line, guess
from mmrouter_router.encoding import encoder_choice
from mmrouter_router.encoding.encoder_queue import (
    Encoder,
    EncoderQueue,
    Failure,
    How,
    Image,
    ImagePlacement,
    Job,
    Mode,
    Outcome,
    Start,
)

PATIENCE = 2.0  # multiple of its own work (seconds on the whole fleet) for which later requests may pass a request
ATTEMPTS: Final = 3  # failures of an image after which its requests fail
MOVES: Final = 8  # images that one event moves at most; the next event moves more
LOOK_AGAIN: Final = 1.0  # seconds until a stalled encoder is checked again while no other can take its work


@dataclass(eq=False, slots=True)
class _Request:
    images: tuple[Image, ...]
    answers: dict[bytes, Any]


class EncoderScheduler:
    """Encoders with their queues and caches. Not thread-safe; ``now`` never runs backwards."""

    def __init__(self, mode: Mode = "auto", first: Callable[[str], Line] = guess) -> None:
        self.mode = mode
        self._first = first
        self.queues: dict[str, EncoderQueue] = {}  # in the order of their ids
        self._round_robin = encoder_choice.WeightedRoundRobin()
        self.requests: dict[str, _Request] = {}
        self.jobs: dict[bytes, Job] = {}  # all waiting and running images
        self.runs: dict[int, Job] = {}
        self._count = 0

    def join(self, encoder: Encoder, now: float) -> Outcome:
        """Add an encoder. Its first estimate is that of measured encoders of its kind.

        Raises ``ValueError`` for an id that is there or still leaving: another cache needs another id.
        """
        if encoder.id in self.queues:
            raise ValueError(f"encoder {encoder.id} is there: one that comes back needs another id")
        like = [other for other in self.queues.values() if other.encoder.kind == encoder.kind and other.rate.measured]
        best = max(like, key=lambda other: (other.rate.measured, other.id), default=None)
        queue = EncoderQueue(encoder, self._first(encoder.kind) if best is None else best.rate.line)
        self.queues = dict(sorted([*self.queues.items(), (encoder.id, queue)]))
        return self._settle([queue], now, Outcome())

    def set_weight(self, encoder: str, weight: int) -> None:
        """Change an encoder's share of the work in the weighted modes. Unknown ids are ignored."""
        if (queue := self.queues.get(encoder)) is not None:
            queue.encoder = replace(queue.encoder, weight=weight)

    def leave(self, encoder: str, now: float) -> Outcome:
        """Drain an encoder: waiting images go to the others, running ones may end. Unknown ids are ignored.

        Its embeddings are no longer used.
        """
        actions = Outcome()
        queue = self.queues.get(encoder)
        if queue is not None and not queue.leaving:
            queue.leaving = True
            self._round_robin.forget(encoder)
            self._rehome(list(queue.waiting), now, actions)
        return self._settle([], now, actions)

    def place(self, request: str, images: Sequence[Image], now: float, mode: Mode | None = None) -> Outcome:
        """Queue a request's images, by ``mode`` or else by the scheduler's own.

        ``ready`` may hold it already; ``full`` says that nothing was queued.

        Raises ``ValueError`` for a request that is being encoded, or for images of one key that differ.
        """
        if request in self.requests:
            raise ValueError(f"request {request} is being encoded")
        wanted = {image.key: image for image in images}
        if any(wanted[image.key] != image for image in images):
            raise ValueError("images of one key differ")
        holders = {key: queue for key in wanted if (queue := self._holder(key)) is not None}
        fresh = [image for key, image in wanted.items() if key not in holders and key not in self.jobs]
        mode = mode or self.mode
        queues = encoder_choice.eligible(self.queues.values(), mode, now)
        if fresh and not encoder_choice.has_room(queues, mode, len(fresh)):
            return Outcome(full=True)
        answers = {key: queue.held.use(key) for key, queue in holders.items()}
        self.requests[request] = _Request(tuple(images), answers)
        weighed = self._book(fresh, queues, now, mode)
        placed: dict[bytes, ImagePlacement] = {}
        for key in wanted:
            if key in holders:
                placed[key] = ImagePlacement("held", holders[key].id)
                continue
            job = self.jobs[key]
            job.waiters[request] = None
            how: How = "queued" if key in weighed else "joined"
            placed[key] = ImagePlacement(how, job.queue.id, weighed.get(key, ()))
        actions = Outcome(placed=[placed[image.key] for image in images])
        self._complete(request, actions)
        return self._settle([], now, actions)

    def cancel(self, request: str, now: float) -> Outcome:
        """Cancel a request and the images that no other request needs. Unknown ids are ignored."""
        actions = Outcome()
        return self._settle(self._withdraw(request, now, actions), now, actions)

    def finished(self, run: int, now: float, value: object = None, size: int = 0) -> Outcome:
        """Complete a run. ``value`` is returned in answers, now and while the embedding is held.

        ``size``: bytes of the embedding, 0 where the encoder does not report it.
        """
        actions = Outcome()
        if (job := self.runs.pop(run, None)) is None:
            return actions
        job.queue.encoded(job, now, value, size)
        del self.jobs[job.image.key]
        for request in job.waiters:
            self.requests[request].answers[job.image.key] = value
            self._complete(request, actions)
        return self._settle([job.queue], now, actions)

    def failed(self, run: int, now: float, *, refused: bool = False) -> Outcome:
        """Fail a run: the image goes to another encoder, and this one backs off.

        ``refused``: the image is at fault, so every request with it fails and the encoder does not back off.
        """
        actions = Outcome()
        if (job := self.runs.pop(run, None)) is None:
            return actions
        queue = job.queue
        queue.end(job, now)
        if refused:
            return self._settle([queue, *self._give_up(job, "image_refused", now, actions)], now, actions)
        queue.back_off(now)
        job.tried.add(queue.id)
        job.attempts += 1
        freed: list[EncoderQueue] = []
        if job.attempts >= ATTEMPTS:
            freed = self._give_up(job, "attempts", now, actions)
        else:
            self._rehome([job], now, actions)
        self._rehome([other for other in queue.waiting if other is not job], now, actions)
        return self._settle(freed, now, actions)

    def tick(self, now: float) -> Outcome:
        """Move work away from stalled encoders; call it at ``next_tick``. The last encoder keeps its work."""
        actions = Outcome()
        for queue in list(self.queues.values()):
            others = [other for other in self.queues.values() if other is not queue and not other.leaving]
            if queue.stalls_at() > now or all(other.backing_off(now) for other in others):
                continue
            stuck = list(queue.running.values())
            for job in stuck:
                self._abort(job, now, actions)
                job.tried.add(queue.id)
            queue.back_off(now)
            self._rehome([*stuck, *queue.waiting], now, actions)
        return self._settle([], now, actions)

    def next_tick(self, now: float) -> float:
        """Return when to call ``tick``, later than ``now``; infinity while nothing runs."""
        at = min((queue.stalls_at() for queue in self.queues.values()), default=math.inf)
        return at if at > now else now + LOOK_AGAIN

    def _book(
        self, fresh: Sequence[Image], queues: Sequence[EncoderQueue], now: float, mode: Mode
    ) -> dict[bytes, encoder_choice.Finishes]:
        """Queue every image; there is space. Returns the compared finishes of each."""
        weighed: dict[bytes, encoder_choice.Finishes] = {}
        due, end = now, 0.0
        only: EncoderQueue | None = None
        if mode == "auto":
            # Largest first: small images fit beside it.
            fresh = sorted(fresh, key=lambda image: (-image.tokens, image.key))
            due += PATIENCE * encoder_choice.shared_seconds(queues, fresh, now)
        elif mode == "perRequest" and fresh:
            only = self._turn([queue for queue in queues if queue.free >= len(fresh)])
        for image in fresh:
            self._count += 1
            with_room = [queue for queue in queues if queue.free > 0]
            open_ = [queue for queue in with_room if not queue.backing_off(now)] or with_room
            job = Job(image, (due, self._count), open_[0], movable=mode == "auto")
            if mode == "auto":
                queue, weighed[image.key] = encoder_choice.within(job, open_, end, now)
                end = max(end, dict(weighed[image.key])[queue.id])
            else:
                queue, weighed[image.key] = only or self._turn(open_), ()
            queue.put(job)
            self.jobs[image.key] = job
        return weighed

    def _turn(self, queues: Iterable[EncoderQueue]) -> EncoderQueue:
        return self.queues[self._round_robin.take({queue.id: queue.encoder.weight for queue in queues})]

    def knows(self, key: bytes) -> bool:
        """Whether an image's embedding is held, waited for or being computed."""
        return key in self.jobs or self._holder(key) is not None

    def learn(self, encoder: str, key: bytes, size: int, value: object) -> None:
        """Record an embedding that another router requested. ``encoder``: an id without its suffix."""
        for queue in self.queues.values():
            if queue.id.partition("~")[0] == encoder and not queue.leaving:
                queue.held.add(key, size, value)

    def _holder(self, key: bytes) -> EncoderQueue | None:
        return next((queue for queue in self.queues.values() if key in queue.held and not queue.leaving), None)

    def _complete(self, request: str, actions: Outcome) -> None:
        waiting = self.requests[request]
        if all(image.key in waiting.answers for image in waiting.images):
            del self.requests[request]
            actions.ready[request] = tuple(waiting.answers[image.key] for image in waiting.images)

    def _withdraw(self, request: str, now: float, actions: Outcome) -> list[EncoderQueue]:
        """Remove a request and the images that only it needs. Returns the queues that got shorter."""
        removed = self.requests.pop(request, None)
        freed: list[EncoderQueue] = []
        for key in dict.fromkeys(image.key for image in removed.images) if removed else ():
            job = self.jobs.get(key)
            if job is None or request not in job.waiters:
                continue  # encoded already, perhaps requested again by another request
            del job.waiters[request]
            if job.waiters:
                continue
            del self.jobs[key]
            if job.run is None:
                job.queue.take(job)
            else:
                self._abort(job, now, actions)
            freed.append(job.queue)
        return freed

    def _abort(self, job: Job, now: float, actions: Outcome) -> None:
        assert job.run is not None
        actions.aborts.append(job.run)
        del self.runs[job.run]
        job.queue.end(job, now)

    def _give_up(self, job: Job, reason: Failure, now: float, actions: Outcome) -> list[EncoderQueue]:
        """Fail an image that is in no queue any more, and all requests with it."""
        del self.jobs[job.image.key]
        freed: list[EncoderQueue] = []
        for request in job.waiters:
            actions.failed[request] = reason
            freed += self._withdraw(request, now, actions)
        return freed

    def _rehome(self, jobs: Sequence[Job], now: float, actions: Outcome) -> None:
        """Queue jobs at another encoder: theirs left, failed or stalled."""
        for job in sorted(jobs, key=lambda job: job.key):
            if self.jobs.get(job.image.key) is not job:
                continue  # its requests failed with another of their images
            before = job.queue
            target = encoder_choice.another(job, self.queues.values(), now)
            if job in before.waiting:
                before.take(job)
            if target is None:
                self._give_up(job, "no_encoder", now, actions)
                continue
            target.put(job)
            actions.moved += target is not before

    def _settle(self, queues: Iterable[EncoderQueue], now: float, actions: Outcome) -> Outcome:
        """Start waiting images and move work to or from the queues whose load changed."""
        self._start(now, actions)
        for queue in queues:
            for _ in range(MOVES):
                move = encoder_choice.best_move(queue, self.queues.values(), now)
                if move is None:
                    break
                job, target = move
                job.queue.take(job)
                target.put(job)
                actions.moved += 1
                self._start(now, actions)
        for queue in [queue for queue in self.queues.values() if queue.leaving and not queue.running]:
            del self.queues[queue.id]
        return actions

    def _start(self, now: float, actions: Outcome) -> None:
        for queue in self.queues.values():
            while queue.waiting and queue.has_slot and not queue.leaving:
                self._count += 1
                job = queue.start(self._count, now)
                self.runs[self._count] = job
                actions.starts.append(Start(self._count, queue.id, job.image))
