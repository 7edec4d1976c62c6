"""Blocks of a window that are parts of full attention's blocks, joined to the blocks that they are parts of.

Full attention has no hash for a window's block that ends within one of its blocks. The last part of a block has the
block's hash, and the parts before it precede it in the window's events: a window keeps whole runs of them
(docs/engine-facts/vllm.md#cache-groups). Pure; no I/O.
"""

from collections.abc import Container, Iterator

from mmrouter_lib.engines.base.events import Ragged, Stored
from mmrouter_sidecar.blocks.ledger_ops import Place

MAX_BEGUN = 4_096
"""Blocks whose last part has not come yet: as many as sequences that an engine runs at once."""


class BegunBlocks:
    """The first parts of blocks whose last part no event has named yet, by place and hash of the last one known."""

    def __init__(self) -> None:
        self._begun: dict[tuple[Place, int], tuple[int, ...]] = {}

    def clear(self) -> None:
        self._begun.clear()

    def join(self, event: Stored | Ragged, place: Place, ends: Container[int], parts: int) -> Iterator[tuple[int, ...]]:
        """Yield the hashes of the parts of each block that an event ends. ``ends``: hashes of full attention's blocks,
        ``parts``: how many make one.
        """
        begun = () if event.parent is None else self._begun.pop((place, event.parent), ())
        for number in event.hashes:
            begun = (*begun, number)[-parts:]
            if number in ends:
                if len(begun) == parts:
                    yield begun
                begun = ()
        if begun:
            while len(self._begun) >= MAX_BEGUN:
                del self._begun[next(iter(self._begun))]
            self._begun[place, begun[-1]] = begun
