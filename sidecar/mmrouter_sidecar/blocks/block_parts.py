"""Keys of a window's blocks that are parts of full attention's blocks.

Where full attention has larger blocks than a window, some of the window's blocks end within one of them. Full attention
has no hash for these, so they get their keys (:func:`mmrouter_lib.block_keys.part_key`) from the block that they are
parts of: its last part has its hash, and the parts before that precede it in the window's events. A window keeps whole
runs of such blocks, so what precedes is adjacent (docs/engine-facts/vllm.md#cache-groups). Pure; no I/O.
"""

from typing import NamedTuple

from mmrouter_lib.block_keys import Key, part_key
from mmrouter_lib.engines.base.events import Ragged, Stored
from mmrouter_sidecar.blocks.ledger_ops import Place

MAX_BEGUN = 4_096
"""Blocks of which the first parts are remembered until the next ones come, as many as sequences run at once."""


class Located(NamedTuple):
    """Hash -> key of an event's blocks, and of blocks that earlier events named; ``waiting``: parts of a block whose
    last one has not come yet.
    """

    keys: dict[int, Key]
    earlier: dict[int, Key]
    waiting: tuple[int, ...]


class BlockParts:
    """The first parts of blocks whose last part no event has named yet, by place and hash of the last one known."""

    def __init__(self) -> None:
        self._begun: dict[tuple[Place, int], tuple[int, ...]] = {}

    def clear(self) -> None:
        self._begun.clear()

    def locate(self, event: Stored | Ragged, place: Place, ends: dict[int, Key], parts: int) -> Located:
        """Return the keys of an event's blocks. ``ends``: those of blocks that end a block of full attention's,
        ``parts``: how many make one.
        """
        before = self._begun.pop((place, event.parent), ()) if event.parent is not None else ()
        keys: dict[int, Key] = {}
        earlier: dict[int, Key] = {}
        open_parts = list(before)
        for number in event.hashes:
            end = ends.get(number)
            if end is None:
                open_parts.append(number)
                continue
            siblings = open_parts[max(0, len(open_parts) - parts + 1) :]
            for part, sibling in enumerate(siblings, start=parts - len(siblings)):
                (earlier if sibling in before else keys)[sibling] = part_key(end, part)
            keys[number] = end
            open_parts = []
        rest = tuple(open_parts[max(0, len(open_parts) - parts + 1) :])
        if rest:
            while len(self._begun) >= MAX_BEGUN:
                del self._begun[next(iter(self._begun))]
            self._begun[place, rest[-1]] = rest
        return Located(keys, earlier, tuple([number for number in rest if number not in before]))
