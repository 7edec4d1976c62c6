"""Inputs and outputs of the encoder scheduler."""

from dataclasses import dataclass
from typing import Any, Literal

Mode = Literal["auto", "perImage", "perRequest"]
How = Literal["held", "joined", "queued"]


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

    def __post_init__(self) -> None:
        if self.weight < 0 or self.queue < 0 or self.slots < 1 or self.cache_entries < 0 or self.cache_bytes < 0:
            raise ValueError(f"encoder {self.id}: a bound or a weight is negative, or it has no slot")


@dataclass(frozen=True, slots=True)
class Answer:
    """The encoder that holds an image's embedding, and its answer, which is opaque here."""

    encoder: str
    value: Any


@dataclass(frozen=True, slots=True)
class ImagePlacement:
    """Decision for one image of a request, in the request's order. Times are on the caller's clock.

    ``weighed``: (encoder, estimated finish) of all candidates, empty where nothing was compared.
    """

    how: How
    encoder: str
    finish: float
    weighed: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Start:
    """Send this image to this encoder now; report ``finished`` or ``failed`` for this ``run``.

    An image that is sent again, elsewhere, is another run.
    """

    run: int
    encoder: str
    image: Image


@dataclass(frozen=True, slots=True)
class Abort:
    """Cancel a started run: no request needs it there. A late result is ignored."""

    run: int
    encoder: str


@dataclass(frozen=True, slots=True)
class Ready:
    """All images of a request are encoded: its answers, in the order of its images."""

    request: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class EncodingFailed:
    """The images of a request cannot be encoded by the encoders."""

    request: str
    reason: Literal["no_encoder", "image_refused", "attempts"]


@dataclass(frozen=True, slots=True)
class QueuesFull:
    """The queues lack space for all images of the request, and nothing was queued.

    ``retry_after``: estimated seconds until there may be space; ``None``: never (too many images, or no encoder).
    """

    retry_after: float | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Actions to carry out after a call, in this order. ``placed`` and ``full`` are set by ``place`` only."""

    aborts: tuple[Abort, ...] = ()
    starts: tuple[Start, ...] = ()
    ready: tuple[Ready, ...] = ()
    failed: tuple[EncodingFailed, ...] = ()
    placed: tuple[ImagePlacement, ...] = ()
    moved: int = 0
    """Images that wait or run elsewhere than before."""
    full: QueuesFull | None = None


@dataclass(frozen=True, slots=True)
class EncoderStatus:
    """One encoder's state."""

    id: str
    waiting: int
    running: int
    backlog: float  # seconds until all its work is done
    rate: float  # visual tokens per second
    overhead: float  # seconds per image, whatever its size
    measured: int  # images behind the two figures; 0: a guess
    held: int
    held_bytes: int
    backoff_until: float | None  # gets no work until then, after a stall or failure
