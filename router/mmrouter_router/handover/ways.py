"""Ways by which an image reaches an engine, and values that describe one hand-over."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from mmrouter_lib.engines.vllm.handover import Way as Processed

Way = Literal["nixl", "shm", "inline", "file", "bytes"]
"""How an image reaches an engine.

``nixl``, ``shm`` and ``inline``: processed by a renderer; read over the network, from a slot on the node's shared
tmpfs, or in the requests. ``file``: unprocessed, as a file there. ``bytes``: unprocessed, in the body.
"""
WAYS: Final[tuple[Way, ...]] = get_args(Way)
LADDERS: Final[Mapping[str, tuple[Processed, ...]]] = {
    "none": (),
    "shm": ("shm", "inline"),
    "nixl": ("nixl", "shm", "inline"),
}
"""``routing.transfer`` -> the ways of a processed image, in the order in which they are tried."""


@dataclass(frozen=True, slots=True)
class WayEligibility:
    """Which ways lead to one engine: the reason why not, or an empty text.

    ``file``: of a file. ``processed``: of each way that ``routing.transfer`` has; empty without renderers.
    """

    file: str = ""
    processed: Mapping[Processed, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ImageLoad:
    """One image to hand over: encoded bytes, and visual tokens, 0 where they are unknown."""

    uuid: str
    size: int
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Fallback:
    """A way that was skipped or failed, and why."""

    how: Way
    reason: str


@dataclass(frozen=True, slots=True)
class HandoverPlan:
    """How the images of one request are to reach one engine.

    ``processed``: the ways to request from a renderer, empty without one. ``files``: identities to hand over as
    files where they are not processed. ``fallbacks``: identity -> skipped ways.
    """

    processed: tuple[Processed, ...] = ()
    files: frozenset[str] = frozenset()
    fallbacks: Mapping[str, tuple[Fallback, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class ImageTransfer:
    """How one image reached one engine. ``seconds``: until it was processed there, in a file, or in the body."""

    uuid: str
    engine: str
    size: int
    how: Way = "bytes"
    seconds: float = 0.0
    fallbacks: list[Fallback] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "identity": self.uuid,
            "engine": self.engine,
            "how": self.how,
            "bytes": self.size,
            "seconds": round(self.seconds, 6),
            "instead_of": [{"how": fallback.how, "reason": fallback.reason} for fallback in self.fallbacks],
        }
