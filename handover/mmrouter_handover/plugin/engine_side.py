"""The engine's side: fetch offered items and keep them until a chat names them."""

import logging
from collections import Counter
from collections.abc import Mapping

from mmrouter_handover.plugin import vllm_items
from mmrouter_handover.plugin.packed_item import read_header
from mmrouter_handover.plugin.processor_cache import HandedOverCache, PendingItems, Processed
from mmrouter_handover.plugin.transports import Transports
from mmrouter_handover.plugin.wire import HandOverFailed, Offer

log = logging.getLogger("mmrouter.plugin")


class ItemReceiver:
    """Fetches offered items. Usable from several threads."""

    def __init__(
        self, transports: Transports, settings: str, cache: HandedOverCache, pending: PendingItems[Processed]
    ) -> None:
        self._transports, self._settings, self._cache, self._pending = transports, settings, cache, pending
        self.counts: Counter[str] = Counter()

    def take(self, items: Mapping[str, Offer], seconds: float) -> tuple[list[str], dict[str, str]]:
        """Fetch the items; return the images that the engine has now, and the reasons for the others."""
        held: list[str] = []
        refused: dict[str, str] = {}
        for name, offer in items.items():
            if self._cache.holds(name, seconds):
                self.counts["held before"] += 1
                held.append(name)
                continue
            try:
                self._take(name, offer, seconds)
            except HandOverFailed as failed:
                log.info("image %s is not taken: %s", name, failed)
                self.counts[f"refused {failed.reason}"] += 1
                refused[name] = failed.reason
            else:
                self.counts[f"taken {offer.__struct_config__.tag}"] += 1
                held.append(name)
        return held, refused

    @property
    def used(self) -> int:
        """Number of handed-over items that chats used."""
        return self._cache.used

    def _take(self, name: str, offer: Offer, seconds: float) -> None:
        def unpack(packed: memoryview) -> Processed:
            if len(packed) != offer.length:
                raise HandOverFailed("truncated", f"{len(packed)} bytes, {offer.length} were offered")
            header, tensors = read_header(packed, name=name, settings=self._settings)
            with tensors:  # a slot can be released only when nothing points into it
                return vllm_items.unpack(header, tensors)

        self._pending.put(name, self._transports.read(offer, unpack), offer.length, seconds)
