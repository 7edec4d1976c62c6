"""What goes into the encoder scheduler and what comes out of it."""

from dataclasses import dataclass
from typing import Any, Literal

Mode = Literal["auto", "perImage", "perRequest"]
How = Literal["held", "joined", "queued"]


@dataclass(frozen=True, slots=True)
class Image:
    """One image of a request. ``key``: equal exactly where one embedding serves (identity, tenant's salt included)."""

    key: bytes
    tokens: int  # visual tokens, what encoding costs
    size: int = 0  # bytes of its embedding, what holding it costs


@dataclass(frozen=True, slots=True)
class Encoder:
    """One encoder, as the fleet knows it. ``id`` changes when it restarts, because its cache is empty then."""

    id: str
    kind: str  # accelerator kind: the first guess at its rate
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
    """Where an image's embedding is, and what that encoder answered: opaque here, passed through untouched."""

    encoder: str
    value: Any


@dataclass(frozen=True, slots=True)
class Placed:
    """What was decided for one image of a request, in the request's order. Times are on the caller's clock.

    ``weighed``: (encoder, estimated finish) of all that could have been chosen, empty where nothing was weighed.
    """

    how: How
    encoder: str
    finish: float
    weighed: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Start:
    """Send this image to this encoder now; answer with ``finished`` or ``failed`` for this ``run``.

    An image that is sent again, elsewhere, is another run.
    """

    run: int
    encoder: str
    image: Image


@dataclass(frozen=True, slots=True)
class Abort:
    """Close what was started: nobody waits for it there any more. Needs no answer; a late one is ignored."""

    run: int
    encoder: str


@dataclass(frozen=True, slots=True)
class Ready:
    """Every image of a request is encoded: its answers, in the order of its images."""

    request: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """A request cannot be encoded here; the caller degrades or says so."""

    request: str
    reason: Literal["no_encoder", "image_refused", "attempts"]


@dataclass(frozen=True, slots=True)
class Full:
    """Nothing was booked: there is no room for all images of the request.

    ``retry_after``: estimated seconds until there may be; ``None``: never, for so many images or without an encoder.
    """

    retry_after: float | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is to be done after a call, in this order: close, send, tell."""

    aborts: tuple[Abort, ...] = ()
    starts: tuple[Start, ...] = ()
    ready: tuple[Ready, ...] = ()
    lost: tuple[Lost, ...] = ()
    placed: tuple[Placed, ...] = ()
    """Of ``place`` only."""
    moved: int = 0
    """Images that wait or run elsewhere than before."""
    full: Full | None = None
    """Of ``place`` only: it was refused."""


@dataclass(frozen=True, slots=True)
class View:
    """One encoder's state, for metrics and explanations."""

    id: str
    waiting: int
    running: int
    backlog: float  # seconds until it has done all that it has
    rate: float  # visual tokens per second
    overhead: float  # seconds per image, whatever its size
    measured: int  # images that the two figures come from; 0: a guess
    held: int
    held_bytes: int
    resting_until: float | None  # it stalled or failed, and gets nothing until then
