"""What our plugin does inside an engine or a renderer, without vLLM: the real ways, and images that are made up.

The bytes of a processed image follow from its name, so that whoever reads other bytes notices. Slots, leases, offers
and what waits for its chat are the plugin's own (docs/transfer.md).
"""

import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence

from blake3 import blake3

from mmrouter_handover.plugin.packed_item import Field, PackedItem, Packer, read_header, unpack_node
from mmrouter_handover.plugin.processor_cache import PendingItems
from mmrouter_handover.plugin.transports import Release, Settings, Transports
from mmrouter_handover.plugin.wire import HandOverFailed, Offer, Status, Way
from mmrouter_sim.media import BYTES_PER_TOKEN, ProcessorCache

VARIABLE = "VLLM_PLUGINS"
NAME = "mmrouter"


def is_loaded(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment names the plugin, without which vLLM loads none of its kind."""
    return NAME in environ.get(VARIABLE, "").split(",")


class Plugin:
    """One process's side. Usable from several threads."""

    def __init__(self, ways: Settings, role: str, processing: str, images: ProcessorCache, version: str) -> None:
        """``role``: renderer or engine. ``processing``: equal where two servers process alike."""
        self.role, self._node, self._version = role, ways.node, version
        self._ways, self._processing, self._images = Transports(ways, role), processing, images
        self._kept: PendingItems[int] = PendingItems(ways.limit_bytes, time.monotonic)
        self._leases: dict[str, list[Release]] = {}
        self._mutex = threading.Lock()

    def status(self) -> Status:
        """What it says of itself."""
        counts = {"kept": len(self._kept), "leases": len(self._leases)}
        missing = dict(self._ways.missing)
        return Status(self.role, True, "", self._version, self._processing, self._node, missing, counts)

    def claim(self, name: str) -> int | None:
        """Return the token count of an image that was handed over; from here on it is the processor cache's."""
        tokens = self._kept.get(name)
        if tokens is not None:
            self._images.put(name, tokens)
            self._kept.drop(name)
        return tokens

    def offer(
        self, names: Sequence[str], ways: Sequence[Way], seconds: float, inline_bytes: int
    ) -> tuple[str, dict[str, Offer], dict[str, str], list[tuple[str, str]]]:
        """Return a lease, offers by name, why an image is withheld, and the ways that were tried in vain."""
        offers: dict[str, Offer] = {}
        withheld: dict[str, str] = {}
        fell: list[tuple[str, str]] = []
        releases: list[Release] = []
        for name in names:
            tokens = self._images.get(name)
            if tokens is None:
                withheld[name] = "uncached"
                continue
            plan = _packed(self._processing, name, tokens)
            for way in ways:
                try:
                    offers[name], release = self._ways.offer(plan, name, way, seconds, inline_bytes)
                except HandOverFailed as failed:
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
        """End what an answer offered; return how many offers stood."""
        with self._mutex:
            releases = self._leases.pop(lease, [])
        for release in releases:
            release()
        return len(releases)

    def take(self, items: Mapping[str, Offer], seconds: float) -> tuple[list[str], dict[str, str]]:
        """Return the images that are here now, and why the others are not."""
        held: list[str] = []
        refused: dict[str, str] = {}
        for name, offer in items.items():
            if self._images.holds(name) or self._kept.extend(name, seconds):
                held.append(name)
                continue
            try:
                tokens = self._ways.read(offer, lambda packed, name=name: self._unpacked(packed, name))  # type: ignore[misc]
                self._kept.put(name, tokens, offer.length, seconds)
            except HandOverFailed as failed:
                refused[name] = failed.reason
            else:
                held.append(name)
        return held, refused

    def close(self) -> None:
        """Give back what is lent."""
        self._ways.close()

    def _unpacked(self, packed: memoryview, name: str) -> int:
        header, tensors = read_header(packed, name=name, settings=self._processing)
        with tensors:
            spot = next(unpack_node(field.node, lambda tensor: tensor) for field in header.fields)
            tokens = int(spot.shape[0])
            if bytes(tensors[spot.offset : spot.offset + spot.length]) != _pixels(name, tokens):
                raise HandOverFailed("corrupt", "these are not the bytes of that image")
            return tokens


def _packed(processing: str, name: str, tokens: int) -> PackedItem:
    packer = Packer()
    node = packer.tensor("uint8", (tokens, BYTES_PER_TOKEN), memoryview(_pixels(name, tokens)))
    return packer.pack(processing, name, "image", [Field("pixel_values", "batched", node)], [])


def _pixels(name: str, tokens: int) -> bytes:
    return blake3(name.encode()).digest(BYTES_PER_TOKEN) * tokens
