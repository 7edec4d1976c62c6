"""What round robin would have found in the engines' caches, for the live page (docs/ui.md). Pure."""

from collections import OrderedDict
from collections.abc import Sequence

MAX_KEYS = 500_000  # of about 150 bytes each; beyond it the first ones are forgotten


class RoundRobinCaches:
    """Caches of as many engines as there are, to which the same prompts are sent in turn and which evict nothing.

    A real round robin, whose engines evict, would find no more blocks of prompts. Blocks of answers count once they are
    part of a prompt.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._holders: OrderedDict[int, int] = OrderedDict()  # block key -> one bit per engine
        self._max_keys = max_keys
        self._turn = 0

    def serve(self, keys: Sequence[int], engines: int) -> int:
        """Send a prompt to the next engine; return how many of its leading blocks that one held.

        ``keys``: of the prompt's complete blocks.
        """
        bit = 1 << self._turn % engines
        self._turn += 1
        holders, hits, leading = self._holders, 0, True
        for key in keys:
            have = holders.get(key, 0)
            leading = leading and bool(have & bit)
            hits += leading
            holders[key] = have | bit
        while len(holders) > self._max_keys:
            holders.popitem(last=False)
        return hits
