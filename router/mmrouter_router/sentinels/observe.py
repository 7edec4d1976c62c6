"""What an engine made of an image in a request of our own, read from the blocks that it stored for it. Pure."""

from array import array
from collections.abc import Sequence

from mmrouter_lib.block_keys import Span
from mmrouter_lib.engines.base.events import Stored
from mmrouter_lib.engines.sglang.identity import SENTINEL_BASE, WIDE_SENTINELS
from mmrouter_router.sentinels.table import Values


def observe(ids: Sequence[int], span: Span, block_size: int, published: Sequence[Stored]) -> Values | None:
    """Return the sentinels that stand at an image's place in a prompt, ``None`` where it was not published.

    ``ids`` is the prompt with plain placeholders. The block before the image is text that no other request has, so what
    follows it in the events is this request's image, whoever else uses the engine.
    """
    enough = min(WIDE_SENTINELS, span.length)
    before = array("Q", ids[max(0, span.offset - 2 * block_size) : span.offset])
    for run in _joined(published):
        for at in range(len(run) - enough + 1):
            known = min(at, len(before))
            if known < block_size or run[at] < SENTINEL_BASE or run[at - known : at] != before[len(before) - known :]:
                continue
            values = tuple(run[at : at + enough])
            if min(values) < SENTINEL_BASE:
                return None  # fewer tokens than we count
            return values[:1] if len(set(values)) == 1 else values
    return None


def _joined(published: Sequence[Stored]) -> list["array[int]"]:
    """Return every event's ids, after those of the blocks right before it where they were published, too."""
    runs: list[array[int]] = []
    upto: dict[int, array[int]] = {}
    for event in published:
        if not event.hashes:
            continue
        ids = array("Q", event.ids)
        if event.parent is not None and event.parent in upto:
            ids = upto[event.parent] + ids
        runs.append(ids)
        size, start = event.block_size, len(ids) - len(event.ids)
        for number, name in enumerate(event.hashes, 1):
            end = start + number * size
            upto[name] = ids[max(0, end - 3 * size) : end]
    return runs
