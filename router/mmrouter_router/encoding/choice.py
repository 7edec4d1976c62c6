"""Which of the encoders: functions of what they have now. Lists of lanes are in the order of their ids."""

from collections.abc import Iterable, Sequence
from typing import Final

from mmrouter_router.encoding.lane import Job, Lane
from mmrouter_router.encoding.types import Full, Image, Mode

WORTH_MOVING: Final = 0.5
"""An image moves if that gains this share of the time it takes: estimates are not better than that, and moves cost."""
Finishes = tuple[tuple[str, float], ...]
"""(encoder, estimated finish) of all that were weighed."""


def usable(lanes: Iterable[Lane], now: float) -> list[Lane]:
    """Return who may be given work: all that stay and do not rest; where all rest, all that stay."""
    staying = [lane for lane in lanes if not lane.leaving]
    return [lane for lane in staying if not lane.rests(now)] or staying


def eligible(lanes: Iterable[Lane], mode: Mode, now: float) -> list[Lane]:
    """Return who may be given a new request's images: by weight 0 is nobody, unless nobody else is left."""
    found = usable(lanes, now)
    if mode == "auto":
        return found
    return [lane for lane in found if lane.encoder.weight] or found


def full(lanes: Sequence[Lane], mode: Mode, images: int, now: float) -> Full | None:
    """Return the refusal if so many images have no room now. ``perRequest`` needs the room in one place."""
    fold = max if mode == "perRequest" else sum
    if fold([max(0, lane.room) for lane in lanes] or [0]) >= images:
        return None
    if fold([lane.encoder.slots + lane.encoder.queue for lane in lanes] or [0]) < images:
        return Full(None)
    return Full(min(lane.remaining(now) for lane in lanes if lane.running or lane.waiting))


def alone(lanes: Sequence[Lane], images: Iterable[Image], now: float) -> float:
    """Return the seconds that images take if all encoders share each of them: the measure of a request's size."""
    return sum(1 / sum(1 / max(lane.seconds(image.tokens, now), 1e-9) for lane in lanes) for image in images)


def earliest(job: Job, lanes: Sequence[Lane], now: float) -> tuple[Lane, Finishes]:
    """Return where a job is done first, and what was weighed. Equal finishes go to the smallest id."""
    finishes = [(lane.finish(job.image.tokens, job.key, now), lane) for lane in lanes]
    best = min(finishes, key=lambda pair: (pair[0], pair[1].id))[1]
    return best, tuple((lane.id, finish) for finish, lane in finishes)


def within(job: Job, lanes: Sequence[Lane], end: float, now: float) -> tuple[Lane, Finishes]:
    """Return the slowest encoder that has a job done by ``end``, when its request is not done before anyway; where none
    has, where it is done first. What is fast stays free for others so. Second: what was weighed.
    """
    first, finishes = earliest(job, lanes, now)
    by_id = {lane.id: lane for lane in lanes}
    early = [by_id[encoder] for encoder, finish in finishes if finish <= end]
    return min(early, key=lambda lane: (-lane.seconds(job.image.tokens, now), lane.id), default=first), finishes


def another(job: Job, lanes: Iterable[Lane], now: float) -> Lane | None:
    """Return where a job goes that has lost its encoder: first to who has not failed on it, and has room."""
    found = usable(lanes, now)
    for wanted in (
        [lane for lane in found if lane.id not in job.tried and lane.room > 0],
        [lane for lane in found if lane.id not in job.tried],
        found,
    ):
        if wanted:
            return earliest(job, wanted, now)[0]
    return None


def best_move(lane: Lane, lanes: Iterable[Lane], now: float) -> tuple[Job, Lane] | None:
    """Return the move to or from ``lane`` by which a job that waits last gains most; ``None`` if none is worth it.

    What waits last has the latest finish of its encoder, and nobody behind it that its going would change.
    """
    best: tuple[float, Job, Lane] | None = None
    everyone = list(lanes)
    open_ = [other for other in everyone if not other.leaving and not other.rests(now) and other.room > 0]
    pairs = [(other, lane) for other in everyone if lane in open_] + [(lane, other) for other in open_]
    for source, target in pairs:
        if source is target or not source.waiting:
            continue
        job = source.waiting[-1]
        if target.id in job.tried:
            continue
        gain = source.free_at(now) - target.finish(job.image.tokens, job.key, now)
        if gain > WORTH_MOVING * target.seconds(job.image.tokens, now) and (best is None or gain > best[0]):
            best = (gain, job, target)
    return best and best[1:]
