"""Write sentinels into a prompt's token ids, and read them back from blocks that an engine published. Pure."""

import secrets
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mmrouter_lib.block_keys import Span
from mmrouter_lib.engines.base.events import Stored
from mmrouter_lib.engines.sglang.identity import SENTINEL_BASE, WIDE_SENTINELS, run_ids
from mmrouter_router.sentinels.table import Values

_UNUSED = 1 << 63
"""No engine writes an id from here on: sentinels end at 2^62 + 10^6."""


class FilledPrompt(NamedTuple):
    """A prompt as the engine has it: u64 ids; ``unknown`` is the number of the first span without known sentinels."""

    ids: "array[int]"
    unknown: int | None


def fill_sentinels(
    ids: Sequence[int], spans: Sequence[Span], values_of: Callable[[bytes], Values | None]
) -> FilledPrompt:
    """Write each image's sentinels over its span, up to the first image whose sentinels are unknown.

    That image gets random values, so that the blocks from there on match no block of any cache. ``spans`` are in prompt
    order.
    """
    filled = array("Q", ids)
    for number, span in enumerate(spans):
        values = values_of(span.identity)
        if not values:
            for at in range(span.offset, span.end):
                filled[at] = _UNUSED | secrets.randbits(63)
            return FilledPrompt(filled, number)
        filled[span.offset : span.end] = run_ids(values, span.length)
    return FilledPrompt(filled, None)


def observe_sentinels(ids: Sequence[int], span: Span, block_size: int, published: Sequence[Stored]) -> Values | None:
    """Return the sentinels at an image's place in a published prompt, ``None`` where they were not published.

    ``ids`` is the prompt with plain placeholders. The block before the image is text that is unique to this request, so
    what follows it in the events is this request's image, whatever other requests the engine serves.
    """
    enough = min(WIDE_SENTINELS, span.length)
    before = array("Q", ids[max(0, span.offset - 2 * block_size) : span.offset])
    for run in _joined(published):
        for at in range(len(run) - enough + 1):
            size = min(at, len(before))
            if size < block_size or run[at] < SENTINEL_BASE or run[at - size : at] != before[len(before) - size :]:
                continue
            values = tuple(run[at : at + enough])
            if min(values) < SENTINEL_BASE:
                return None  # the engine gives the image fewer tokens than predicted
            return values[:1] if len(set(values)) == 1 else values
    return None


def _joined(published: Sequence[Stored]) -> list["array[int]"]:
    """Return each event's ids, preceded by those of its parent blocks where they were published, too."""
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
