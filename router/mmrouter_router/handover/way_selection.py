"""Select the way of each image to an engine: which ways are open, which back off, which is cheapest. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from mmrouter_lib.engines.vllm.handover import Status
from mmrouter_lib.engines.vllm.handover import Way as Processed
from mmrouter_router.handover.cost import WayCosts
from mmrouter_router.handover.ways import LADDERS, Fallback, HandoverPlan, ImageLoad, Way, WayEligibility

NO_FOLDER, OTHER_NODE, FULL = "no_folder", "other_node", "full"
NO_RENDERER, NO_PLUGIN, DISABLED, ABSENT, SETTINGS = "no_renderer", "no_plugin", "disabled", "absent", "settings"
FAILURES: Final = 3
"""Failures in a row of one way to one engine before it backs off."""
FIRST_SECONDS: Final = 1.0
LAST_SECONDS: Final = 60.0


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


class _Failures(NamedTuple):
    in_a_row: int = 0
    until: float = 0.0


class WayBackoff:
    """Ways that failed repeatedly and are skipped for a while, per engine start."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock``: seconds that only grow."""
        self._clock = clock
        self._failures: dict[tuple[str, Way], _Failures] = {}

    def skips(self, engine: str, way: Way) -> bool:
        """Whether a way is skipped now. After the back-off one attempt is made; its failure doubles the back-off."""
        return self._failures.get((engine, way), _Failures()).until > self._clock()

    def failed(self, engine: str, way: Way) -> None:
        """Count a failure."""
        count = self._failures.get((engine, way), _Failures()).in_a_row + 1
        seconds = min(FIRST_SECONDS * 2.0 ** min(count - FAILURES, 30), LAST_SECONDS) if count >= FAILURES else 0.0
        self._failures[engine, way] = _Failures(count, self._clock() + seconds if seconds else 0.0)

    def succeeded(self, engine: str, way: Way) -> None:
        """Reset the failures."""
        self._failures.pop((engine, way), None)

    def retain(self, engines: set[str]) -> None:
        """Drop the state of all other engines."""
        self._failures = {key: failures for key, failures in self._failures.items() if key[0] in engines}


def plan_handover(loads: Sequence[ImageLoad], eligibility: WayEligibility, costs: WayCosts) -> HandoverPlan:
    """Return how these images, each once, are to reach an engine.

    A renderer processes a whole prompt, so it receives all images or none. Every image also has a way of its
    own, for when the renderer fails.
    """
    processed, skipped = _plan_processed(loads, eligibility, costs)
    files = set()
    fallbacks = {}
    for load in loads:
        why = eligibility.file or costs.why_no_file(load.size)
        if not why:
            files.add(load.uuid)
        fallbacks[load.uuid] = (*skipped, Fallback("file", why)) if why else skipped
    return HandoverPlan(processed, frozenset(files), fallbacks)


def _plan_processed(
    loads: Sequence[ImageLoad], eligibility: WayEligibility, costs: WayCosts
) -> tuple[tuple[Processed, ...], tuple[Fallback, ...]]:
    """Return the ways to ask a renderer for, and the skipped ones."""
    open_ways = tuple(way for way, why in eligibility.processed.items() if not why)
    skipped = [Fallback(way, why) for way, why in eligibility.processed.items() if why]
    if open_ways and (why := costs.why_unprocessed(sum(load.tokens for load in loads))):
        skipped += [Fallback(way, why) for way in open_ways]
        open_ways = ()
    return open_ways, tuple(skipped)
