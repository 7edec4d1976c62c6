"""Keys of blocks that events of lower tiers name by hash alone. Pure; no I/O.

A tier's copy is announced after the block itself, but maybe only when the device has dropped it, because the copy is
made in the background. So the keys of removed blocks are remembered for a while.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from mmrouter_lib.block_keys import Key
from mmrouter_sidecar.blocks.window_block_keys import LocatedBlocks

MAX_REMOVED = 65_536  # number of remembered blocks, about 100 bytes each; the oldest are dropped


class RemovedKeys:
    """Keys of blocks that were removed lately, by engine hash."""

    def __init__(self) -> None:
        self._keys: dict[int, Key] = {}

    def clear(self) -> None:
        self._keys.clear()

    def remember(self, hashes: Iterable[int], blocks: Mapping[int, Key]) -> None:
        """Remember the keys that ``blocks`` has for these hashes."""
        keys = self._keys
        for number in hashes:
            if (key := blocks.get(number)) is not None:
                keys.pop(number, None)
                keys[number] = key
        if len(keys) > MAX_REMOVED:
            for number in tuple(islice(keys, len(keys) - MAX_REMOVED)):
                del keys[number]

    def locate(self, hashes: Sequence[int], held: Iterable[Mapping[int, Key]]) -> LocatedBlocks:
        """Locate hashes among blocks that are held or were removed lately: the same hash has the same key."""
        keys: dict[int, Key] = {}
        for blocks in (self._keys, *held):
            keys |= {number: blocks[number] for number in hashes if number in blocks}
        located = [number for number in hashes if number in keys]
        rest = tuple([number for number in hashes if number not in keys])
        return LocatedBlocks(tuple(located), array("Q", [keys[number] for number in located]), rest)
