"""The router's copy of a prompt with an engine's sentinels in the image runs. Pure."""

import secrets
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mmrouter_lib.block_keys import Span
from mmrouter_lib.engines.sglang.identity import run_ids
from mmrouter_router.sentinels.table import Values

_NOBODYS = 1 << 63
"""No engine writes an id from here on: sentinels end at 2^62 + 10^6."""


class Filled(NamedTuple):
    """A prompt as the engine has it: u64 ids; ``unknown`` is the number of the first span without known sentinels."""

    ids: "array[int]"
    unknown: int | None


def fill(ids: Sequence[int], spans: Sequence[Span], values_of: Callable[[bytes], Values | None]) -> Filled:
    """Write every image's sentinels over its span, up to the first image of which they are not known.

    That one gets values that nothing else has, so the blocks from there on equal nothing, not even themselves when they
    are made anew. ``spans`` are in prompt order.
    """
    filled = array("Q", ids)
    for number, span in enumerate(spans):
        values = values_of(span.identity)
        if not values:
            for at in range(span.offset, span.end):
                filled[at] = _NOBODYS | secrets.randbits(63)
            return Filled(filled, number)
        filled[span.offset : span.end] = run_ids(values, span.length)
    return Filled(filled, None)
