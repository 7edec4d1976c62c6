"""Choose an encoder for an image: pure functions of the encoders' queues, which come in the order of their ids."""

from collections.abc import Iterable, Mapping, Sequence

from mmrouter_router.encoding.encoder_queue import EncoderQueue, Image, Job, Mode

WORTH_MOVING = 0.5  # an image moves if that gains this share of the time it takes: estimates are no better than that
Finishes = tuple[tuple[str, float], ...]  # (encoder, estimated finish) of all that were compared


def usable(queues: Iterable[EncoderQueue], now: float) -> list[EncoderQueue]:
    """Return the encoders that stay and are not backing off; where all back off, all that stay."""
    staying = [queue for queue in queues if not queue.leaving]
    return [queue for queue in staying if not queue.backing_off(now)] or staying


def eligible(queues: Iterable[EncoderQueue], mode: Mode, now: float) -> list[EncoderQueue]:
    """Return the encoders for a new request's images. By weight, one of weight 0 is only a last resort."""
    candidates = usable(queues, now)
    if mode == "auto":
        return candidates
    return [queue for queue in candidates if queue.encoder.weight] or candidates


def has_room(queues: Sequence[EncoderQueue], mode: Mode, images: int) -> bool:
    """Whether the queues have space for the images; ``perRequest`` needs the space in one queue."""
    fold = max if mode == "perRequest" else sum
    return fold([max(0, queue.free) for queue in queues] or [0]) >= images


def shared_seconds(queues: Sequence[EncoderQueue], images: Iterable[Image], now: float) -> float:
    """Return the seconds that images take if all encoders share each of them: the measure of a request's size."""
    return sum(1 / sum(1 / max(queue.seconds(image.tokens, now), 1e-9) for queue in queues) for image in images)


def earliest(job: Job, queues: Sequence[EncoderQueue], now: float) -> tuple[EncoderQueue, Finishes]:
    """Return the encoder with the earliest finish, and all finishes. Ties go to the smallest id."""
    finishes = [(queue.finish(job.image.tokens, job.key, now), queue) for queue in queues]
    best = min(finishes, key=lambda pair: (pair[0], pair[1].id))[1]
    return best, tuple((queue.id, finish) for finish, queue in finishes)


def within(job: Job, queues: Sequence[EncoderQueue], end: float, now: float) -> tuple[EncoderQueue, Finishes]:
    """Return the slowest encoder that finishes by ``end``, else the one with the earliest finish; and all finishes.

    The request is not done before ``end`` in any case, so the fast encoders stay free for others.
    """
    first, finishes = earliest(job, queues, now)
    by_id = {queue.id: queue for queue in queues}
    in_time = [by_id[encoder] for encoder, finish in finishes if finish <= end]
    return min(in_time, key=lambda queue: (-queue.seconds(job.image.tokens, now), queue.id), default=first), finishes


def another(job: Job, queues: Iterable[EncoderQueue], now: float) -> EncoderQueue | None:
    """Return the next encoder for a job that lost its own, preferably one that has space and was not tried."""
    candidates = usable(queues, now)
    untried = [queue for queue in candidates if queue.id not in job.tried]
    for preferred in ([queue for queue in untried if queue.free > 0], untried, candidates):
        if preferred:
            return earliest(job, preferred, now)[0]
    return None


def best_move(queue: EncoderQueue, queues: Iterable[EncoderQueue], now: float) -> tuple[Job, EncoderQueue] | None:
    """Return the move of a last waiting job, to or from ``queue``, that gains most; ``None`` if none is worth it.

    The last waiting job finishes last at its encoder, and moving it delays no other job there.
    """
    best: tuple[float, Job, EncoderQueue] | None = None
    everyone = list(queues)
    open_ = [other for other in everyone if not other.leaving and not other.backing_off(now) and other.free > 0]
    pairs = [(other, queue) for other in everyone if queue in open_] + [(queue, other) for other in open_]
    for source, target in pairs:
        if source is target or not source.waiting:
            continue
        job = source.waiting[-1]
        if target.id in job.tried or not job.movable:
            continue
        gain = source.free_at(now) - target.finish(job.image.tokens, job.key, now)
        if gain > WORTH_MOVING * target.seconds(job.image.tokens, now) and (best is None or gain > best[0]):
            best = (gain, job, target)
    return best and best[1:]


class WeightedRoundRobin:
    """Smooth weighted round robin: of 9 turns by 8:1 the second encoder's is in the middle and not at the end."""

    def __init__(self) -> None:
        self._credit: dict[str, int] = {}

    def take(self, weights: Mapping[str, int]) -> str:
        """Return the next id of ``weights`` (id -> weight); if all weights are 0, they count as equal.

        Equal credit goes to the smallest id, so routers with equal histories agree. Raises ``ValueError`` without ids.
        """
        shares = dict(weights) if any(weights.values()) else dict.fromkeys(weights, 1)
        for encoder, share in shares.items():
            self._credit[encoder] = self._credit.get(encoder, 0) + share
        chosen = min((e for e in shares if shares[e]), key=lambda e: (-self._credit[e], e))
        self._credit[chosen] -= sum(shares.values())
        return chosen

    def forget(self, encoder: str) -> None:
        self._credit.pop(encoder, None)
