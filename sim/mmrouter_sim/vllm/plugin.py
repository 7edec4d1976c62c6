"""The mmrouter plugin inside a simulated engine or renderer: the real transports, with made-up processed images.

The bytes of a processed image follow from its name, so that a wrong read is detected. Slots, leases, offers and pending
items are those of the real plugin (docs/transfer.md).
"""

import secrets
import threading
import time
from collections.abc import Mapping, Sequence

from blake3 import blake3

from mmrouter_handover.plugin.item_exchange import Release, Settings, Transports
from mmrouter_handover.plugin.processor_cache import PendingItems
from mmrouter_handover.plugin.wire import Field, Offer, PackedItem, Packer, Status, Way, read_header, unpack_node
from mmrouter_handover.shm import HandOverError
from mmrouter_sim.media import BYTES_PER_TOKEN, RecentImages


class Plugin:
    """The plugin of one process. Usable from several threads."""

    def __init__(self, settings: Settings, role: str, processing: str, images: RecentImages, version: str) -> None:
        """``role``: renderer or engine. ``processing``: equal for servers that process alike."""
        self.role, self._node, self._version = role, settings.node, version
        self._transports, self._processing, self._images = Transports(settings, role), processing, images
        self._pending: PendingItems[int] = PendingItems(settings.limit_bytes, time.monotonic)
        self._leases: dict[str, list[Release]] = {}
        self._mutex = threading.Lock()

    def status(self) -> Status:
        counts = {"kept": len(self._pending), "leases": len(self._leases)}
        missing = dict(self._transports.missing)
        return Status(self.role, True, "", self._version, self._processing, self._node, missing, counts)

    def claim(self, name: str) -> int | None:
        """Move a handed-over image to the processor cache; return its token count."""
        tokens = self._pending.get(name)
        if tokens is not None:
            self._images.put(name, tokens)
            self._pending.drop(name)
        return tokens

    def offer(
        self, names: Sequence[str], ways: Sequence[Way], seconds: float, inline_bytes: int
    ) -> tuple[str, dict[str, Offer], dict[str, str], list[tuple[str, str]]]:
        """Return a lease, offers by name, the reasons of images without an offer, and the ways that failed."""
        offers: dict[str, Offer] = {}
        withheld: dict[str, str] = {}
        fell: list[tuple[str, str]] = []
        releases: list[Release] = []
        for name in names:
            tokens = self._images.use(name)
            if tokens is None:
                withheld[name] = "uncached"
                continue
            packed = _packed(self._processing, name, tokens)
            for way in ways:
                try:
                    offers[name], release = self._transports.offer(packed, name, way, seconds, inline_bytes)
                except HandOverError as failed:
                    fell.append((way, failed.reason))
                    withheld[name] = failed.reason
                else:
                    releases.append(release)
                    withheld.pop(name, None)
                    break
        lease = secrets.token_hex(16)
        with self._mutex:
            self._leases[lease] = releases
        return lease, offers, withheld, fell

    def release(self, lease: str) -> int:
        """End the offers of an answer; return how many there were."""
        with self._mutex:
            releases = self._leases.pop(lease, [])
        for release in releases:
            release()
        return len(releases)

    def take(self, items: Mapping[str, Offer], seconds: float) -> tuple[list[str], dict[str, str]]:
        """Fetch offered images; return those that are present now, and the reasons for the others."""
        held: list[str] = []
        refused: dict[str, str] = {}
        for name, offer in items.items():
            if name in self._images or self._pending.extend(name, seconds):
                held.append(name)
                continue
            try:
                tokens = self._transports.read(offer, lambda packed, name=name: self._unpacked(packed, name))  # type: ignore[misc]
                self._pending.put(name, tokens, offer.length, seconds)
            except HandOverError as failed:
                refused[name] = failed.reason
            else:
                held.append(name)
        return held, refused

    def close(self) -> None:
        self._transports.close()

    def _unpacked(self, packed: memoryview, name: str) -> int:
        header, tensors = read_header(packed, name=name, settings=self._processing)
        with tensors:
            spot = next(unpack_node(field.node, lambda tensor: tensor) for field in header.fields)
            tokens = int(spot.shape[0])
            if bytes(tensors[spot.offset : spot.offset + spot.length]) != _pixels(name, tokens):
                raise HandOverError("corrupt", "the bytes are not those of the image")
            return tokens


def _packed(processing: str, name: str, tokens: int) -> PackedItem:
    packer = Packer()
    node = packer.tensor("uint8", (tokens, BYTES_PER_TOKEN), memoryview(_pixels(name, tokens)))
    return packer.pack(processing, name, "image", [Field("pixel_values", "batched", node)], [])


def _pixels(name: str, tokens: int) -> bytes:
    return blake3(name.encode()).digest(BYTES_PER_TOKEN) * tokens
