"""Encoder of an encode-only engine: encode images one by one, and keep their embeddings for other engines."""

import asyncio
import random
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from mmrouter_sim.core.hashing import Media
from mmrouter_sim.core.step_cost import Cost
from mmrouter_sim.vllm.connectors import EcTransfer, write_embedding

DEFAULT_CAPACITY = 65_536
"""Visual tokens that are kept unless the connector's flags set another number."""


class StoredEmbeddings(Mapping[str, int]):
    """Visual tokens of each stored embedding, at most ``room`` in all; the least recently used are dropped."""

    def __init__(self, room: int) -> None:
        self._room, self._held = room, 0
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def __getitem__(self, identifier: str) -> int:
        return self._sizes[identifier]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def use(self, identifier: str) -> bool:
        """Mark an image as used; return whether it is stored."""
        if identifier not in self._sizes:
            return False
        self._sizes.move_to_end(identifier)
        return True

    def put(self, identifier: str, tokens: int) -> None:
        """Store an image and drop the oldest beyond the capacity, even itself if it is too large."""
        self._held += tokens - self._sizes.pop(identifier, 0)
        self._sizes[identifier] = tokens
        while self._held > self._room:
            self._held -= self._sizes.popitem(last=False)[1]


class ImageEncoder:
    """The encoder of one process."""

    def __init__(self, config: EcTransfer, cost: Cost, seed: int) -> None:
        self.stored = StoredEmbeddings(config.room or DEFAULT_CAPACITY)
        self.waiting = 0  # requests
        self.running = 0
        self.visual_tokens = 0  # encoded since the start
        self.images = self.hits = 0  # requested since the start, and found stored
        self._folder = config.folder
        self._cost, self._rng = cost, random.Random(seed)
        self._turn = asyncio.Lock()

    async def encode(self, media: Sequence[Media]) -> None:
        """Encode the images that are not stored. Raises ``OSError`` if a file cannot be written."""
        self.waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            for item in media:
                self.images += 1
                if self.stored.use(item.identifier):
                    self.hits += 1
                    continue
                seconds = self._cost.seconds(prefill=0, visual=item.length, decoding=False, rng=self._rng)
                await asyncio.sleep(seconds)
                self.visual_tokens += item.length
                if self._folder is not None:
                    write_embedding(self._folder, item.identifier, item.length)
                self.stored.put(item.identifier, item.length)
        finally:
            self.running -= 1
            self._turn.release()
