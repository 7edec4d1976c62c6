"""Ways by which an image reaches an engine: their costs, which are open, which back off, which is cheapest. Pure.

By file or in the body an image is the same to the engine, which processes it; the cost depends on its bytes. The
router's part of the time is measured with every image. The engine's part is a constant, measured by ``python -m bench
media``, because the router cannot observe it.

A processed image spares the engine its processing, which shows only in the answers: ``offload_comparison``.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from mmrouter_lib.engines.vllm.plugin_api import Status
from mmrouter_lib.engines.vllm.plugin_api import Way as Processed
from mmrouter_router.core.linear_cost import Line, Rate
from mmrouter_router.scheduling.offload_comparison import WayComparison

Way = Literal["nixl", "shm", "inline", "file", "bytes"]
"""How an image reaches an engine.

``nixl``, ``shm`` and ``inline``: processed by a renderer; read over the network, from a slot on the node's shared
tmpfs, or in the requests. ``file``: unprocessed, as a file there. ``bytes``: unprocessed, in the body.
"""
LADDERS: Final[Mapping[str, tuple[Processed, ...]]] = {
    "none": (),
    "shm": ("shm", "inline"),
    "nixl": ("nixl", "shm", "inline"),
}
"""``routing.transfer`` -> the ways of a processed image, in the order in which they are tried."""
Raw = Literal["file", "bytes"]
FIRST: Final[Mapping[Raw, Line]] = {"file": Line(250e-6, 0.5e-9), "bytes": Line(20e-6, 1.5e-9)}
"""The router's part, seconds and seconds per byte, before any measurement."""
ENGINE: Final[Mapping[Raw, Line]] = {"file": Line(200e-6, 1e-9), "bytes": Line(0.0, 8e-9)}
"""The engine's part: opening and reading a file; reading a body, its JSON and base64."""
AUTO_GAIN: Final = 0.9
"""With ``routing.transfer: auto`` a renderer processes images only while that costs less than this share."""
FEW_TOKENS: Final = 16  # below this number of visual tokens a renderer saves nothing
NO_FOLDER, OTHER_NODE, FULL = "no_folder", "other_node", "full"
NO_RENDERER, NO_PLUGIN, DISABLED, ABSENT, SETTINGS = "no_renderer", "no_plugin", "disabled", "absent", "settings"
FAILURES: Final = 3  # failures in a row of one way to one engine before it backs off
FIRST_SECONDS: Final = 1.0
LAST_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class WayEligibility:
    """Which ways lead to one engine: the reason why not, or an empty text.

    ``file``: of a file. ``processed``: of each way that ``routing.transfer`` has; empty without renderers.
    """

    file: str = ""
    processed: Mapping[Processed, str] = field(default_factory=dict)


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
    """How one image is to reach, or reached, one engine.

    ``size``: of its encoded bytes. ``tokens``: visual ones, 0 where they are unknown. ``seconds``: until it was
    processed there, in a file, or in the body.
    """

    uuid: str
    size: int
    tokens: int = 0
    engine: str = ""
    how: Way = "bytes"
    seconds: float = 0.0
    fallbacks: list[Fallback] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "identity": self.uuid,
            "engine": self.engine,
            "how": self.how,
            "bytes": self.size,
            "seconds": round(self.seconds, 6),
            "instead_of": [{"how": fallback.how, "reason": fallback.reason} for fallback in self.fallbacks],
        }


class WayCosts:
    """Costs of the ways to the engines of one pool. Those of bytes are medians, robust to a quarter of outliers."""

    def __init__(
        self,
        first: Mapping[Raw, Line] = FIRST,
        *,
        always: bool = False,
        gain: float = 1.0,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """``first``: the router's part before any image. ``always``: hand over regardless of cost.

        ``gain``: share of the engine's cost that processing by a renderer must stay below.
        """
        self._always = always
        self._raw = {way: Rate(line) for way, line in first.items()}
        self.processing = WayComparison(gain, wall_clock)

    def seconds(self, way: Raw, size: int) -> float:
        """Return the estimated seconds of an image of ``size`` encoded bytes by a way, without its processing."""
        return self._raw[way].line.seconds(size) + ENGINE[way].seconds(size)

    def why_no_file(self, size: int) -> str:
        """Return why an image of ``size`` encoded bytes is sent in the body, empty where a file is cheaper."""
        if self._always or self.seconds("file", size) < self.seconds("bytes", size):
            return ""
        return "bytes_cheaper"

    def why_unprocessed(self, tokens: int) -> str:
        """Return why the engine processes images of so many visual tokens itself, empty where a renderer does."""
        if self._always:
            return ""
        if tokens < FEW_TOKENS:
            return "small"
        return "" if self.processing.elsewhere(tokens) else "slower"

    def observe(self, way: Raw, size: int, seconds: float) -> None:
        if seconds >= 0:
            self._raw[way].observe(size, seconds)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One end of a hand-over. ``shares``: it mounts the node's shared folder. ``plugin``: its plugin's status, ``None``
    without an answer. ``above``: its janitor reports that the folder is too full."""

    node: str
    shares: bool = False
    plugin: Status | None = None
    above: bool = False


def why_no_file(router: Endpoint, engine: Endpoint) -> str:
    """Return why an engine cannot read a file of the router's, empty where it can."""
    if not router.shares or not engine.shares:
        return NO_FOLDER
    if not _same_node(router, engine):
        return OTHER_NODE
    return FULL if engine.above else ""


def why_not_processed(mode: str, renderer: Endpoint | None, engine: Endpoint) -> dict[Processed, str]:
    """Return the ways of ``routing.transfer`` from a renderer to an engine, each with why not, empty where it is open.

    ``renderer``: ``None`` where no renderer is available.
    """
    return {way: _why_not(way, renderer, engine) for way in LADDERS[mode]}


def _why_not(way: Processed, renderer: Endpoint | None, engine: Endpoint) -> str:
    if renderer is None:
        return NO_RENDERER
    if renderer.plugin is None or engine.plugin is None:
        return NO_PLUGIN
    if not renderer.plugin.enabled or not engine.plugin.enabled:
        return DISABLED
    if renderer.plugin.settings != engine.plugin.settings:
        return SETTINGS
    if way == "shm" and not _same_node(renderer, engine):
        return OTHER_NODE
    if way == "shm" and engine.above:
        return FULL
    return "" if renderer.plugin.offers(way) and engine.plugin.offers(way) else ABSENT


def _same_node(one: Endpoint, other: Endpoint) -> bool:
    return bool(one.node) and one.node == other.node


class WayBackoff:
    """Ways that failed repeatedly and are skipped for a while, per engine start."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures: dict[tuple[str, Way], tuple[int, float]] = {}  # in a row, and back-off until

    def skips(self, engine: str, way: Way) -> bool:
        """Whether a way is skipped now. After the back-off one attempt is made; its failure doubles the back-off."""
        return self._failures.get((engine, way), (0, 0.0))[1] > self._clock()

    def failed(self, engine: str, way: Way) -> None:
        count = self._failures.get((engine, way), (0, 0.0))[0] + 1
        seconds = min(FIRST_SECONDS * 2.0 ** min(count - FAILURES, 30), LAST_SECONDS) if count >= FAILURES else 0.0
        self._failures[engine, way] = (count, self._clock() + seconds if seconds else 0.0)

    def succeeded(self, engine: str, way: Way) -> None:
        self._failures.pop((engine, way), None)

    def retain(self, engines: set[str]) -> None:
        self._failures = {key: failures for key, failures in self._failures.items() if key[0] in engines}


def plan_handover(images: Sequence[ImageTransfer], eligibility: WayEligibility, costs: WayCosts) -> HandoverPlan:
    """Return how these images, each once, are to reach an engine.

    A renderer processes a whole prompt, so it receives all images or none. Every image also has a way of its
    own, for when the renderer fails.
    """
    processed = tuple(way for way, why in eligibility.processed.items() if not why)
    skipped = tuple(Fallback(way, why) for way, why in eligibility.processed.items() if why)
    if processed and (why := costs.why_unprocessed(sum(image.tokens for image in images))):
        skipped += tuple(Fallback(way, why) for way in processed)
        processed = ()
    why_no_file = {image.uuid: eligibility.file or costs.why_no_file(image.size) for image in images}
    files = frozenset(name for name, why in why_no_file.items() if not why)
    fallbacks = {name: (*skipped, Fallback("file", why)) if why else skipped for name, why in why_no_file.items()}
    return HandoverPlan(processed, files, fallbacks)
