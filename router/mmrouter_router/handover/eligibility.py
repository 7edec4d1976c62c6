"""Which ways lead to an engine, and what stands in the way of the others. Pure."""

from dataclasses import dataclass

from mmrouter_lib.engines.vllm.handover import Status
from mmrouter_lib.engines.vllm.handover import Way as Processed
from mmrouter_router.handover.types import LADDERS

NO_FOLDER, OTHER_NODE, FULL = "no_folder", "other_node", "full"
NO_RENDERER, NO_PLUGIN, DISABLED, ABSENT, SETTINGS = "no_renderer", "no_plugin", "disabled", "absent", "settings"


@dataclass(frozen=True, slots=True)
class End:
    """One end of a hand-over. ``shares``: it has the folder that the pods of its node share. ``plugin``: what its
    plugin says of itself, ``None`` where none has answered. ``above``: its janitor says that the folder is too full."""

    node: str
    shares: bool = False
    plugin: Status | None = None
    above: bool = False


def why_no_file(router: End, engine: End) -> str:
    """Return why an engine cannot read a file of the router's, empty where it can."""
    if not router.shares or not engine.shares:
        return NO_FOLDER
    if not _together(router, engine):
        return OTHER_NODE
    return FULL if engine.above else ""


def why_not_processed(mode: str, renderer: End | None, engine: End) -> dict[Processed, str]:
    """Return the ways of ``routing.transfer`` from a renderer to an engine, each with why not, empty where it is open.

    ``renderer``: ``None`` where no renderer can be asked.
    """
    return {way: _why_not(way, renderer, engine) for way in LADDERS[mode]}


def _why_not(way: Processed, renderer: End | None, engine: End) -> str:
    if renderer is None:
        return NO_RENDERER
    if renderer.plugin is None or engine.plugin is None:
        return NO_PLUGIN
    if not renderer.plugin.enabled or not engine.plugin.enabled:
        return DISABLED
    if renderer.plugin.settings != engine.plugin.settings:
        return SETTINGS
    if way == "shm" and not _together(renderer, engine):
        return OTHER_NODE
    if way == "shm" and engine.above:
        return FULL
    return "" if renderer.plugin.offers(way) and engine.plugin.offers(way) else ABSENT


def _together(one: End, other: End) -> bool:
    return bool(one.node) and one.node == other.node
