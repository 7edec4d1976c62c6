"""Which images of a request go to an engine by which way, and why not by another. Pure."""

from collections.abc import Sequence

from mmrouter_lib.engines.vllm.handover import Way as Processed
from mmrouter_router.handover.cost import Costs
from mmrouter_router.handover.types import Fall, Load, Plan, Reach


def plan(loads: Sequence[Load], reach: Reach, costs: Costs) -> Plan:
    """Return how these images, each once, are to reach an engine.

    A renderer processes a whole prompt, so it is asked for all of them or for none. What does not come of it goes as it
    came, and for that each image has a way of its own.
    """
    processed, passed = _processed(loads, reach, costs)
    files = set()
    falls = {}
    for load in loads:
        why = reach.file or costs.why_no_file(load.size)
        if not why:
            files.add(load.uuid)
        falls[load.uuid] = (*passed, Fall("file", why)) if why else passed
    return Plan(processed, frozenset(files), falls)


def _processed(loads: Sequence[Load], reach: Reach, costs: Costs) -> tuple[tuple[Processed, ...], tuple[Fall, ...]]:
    """Return the ways to ask a renderer for, and those that are not asked for with the reasons."""
    open_ways = tuple(way for way, why in reach.processed.items() if not why)
    passed = [Fall(way, why) for way, why in reach.processed.items() if why]
    if open_ways and (why := costs.why_unprocessed(sum(load.tokens for load in loads))):
        passed += [Fall(way, why) for way in open_ways]
        open_ways = ()
    return open_ways, tuple(passed)
