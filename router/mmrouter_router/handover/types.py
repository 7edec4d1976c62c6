"""What is known of the two ends of a hand-over, and what came of it. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from mmrouter_lib.engines.vllm.handover import Way as Processed

Way = Literal["nixl", "shm", "inline", "file", "bytes"]
"""How an image reaches an engine.

``nixl``, ``shm`` and ``inline``: processed by a renderer; read over the network, by a slot on the node's shared tmpfs,
or in the requests. ``file``: as it came, by a file there. ``bytes``: as it came, in the body.
"""
WAYS: Final[tuple[Way, ...]] = get_args(Way)
LADDERS: Final[Mapping[str, tuple[Processed, ...]]] = {
    "none": (),
    "shm": ("shm", "inline"),
    "nixl": ("nixl", "shm", "inline"),
}
"""``routing.transfer`` -> the ways of a processed image, in the order in which they are tried."""


@dataclass(frozen=True, slots=True)
class Reach:
    """What leads to one engine. Empty texts mean that nothing stands in the way; others are reasons.

    ``file``: why not by a file. ``processed``: way -> why not by it, of those that ``routing.transfer`` has; empty
    where the resource has no renderers.
    """

    file: str = ""
    processed: Mapping[Processed, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Load:
    """One image that an engine is to get: its encoded bytes, and its visual tokens, 0 where nobody has counted."""

    uuid: str
    size: int
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Fall:
    """A way that was not taken, or was and did not work, and why."""

    how: Way
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """How the images of one request are to reach one engine.

    ``processed``: the ways to ask a renderer for, empty where it is not asked. ``files``: identities to hand over as
    files where they are not processed. ``falls``: identity -> what else there was, and why not.
    """

    processed: tuple[Processed, ...] = ()
    files: frozenset[str] = frozenset()
    falls: Mapping[str, tuple[Fall, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class Travelled:
    """How one image reached one engine: for people, and for counting."""

    uuid: str
    engine: str
    size: int
    how: Way = "bytes"
    seconds: float = 0.0
    """That it took to have it there, or in a file, or as text."""
    falls: list[Fall] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "identity": self.uuid,
            "engine": self.engine,
            "how": self.how,
            "bytes": self.size,
            "seconds": round(self.seconds, 6),
            "instead_of": [{"how": fall.how, "reason": fall.reason} for fall in self.falls],
        }
