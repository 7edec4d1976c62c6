"""Lend items from a renderer to an engine, by the transports (shared memory, NIXL, inline) that the environment names.

Environment variables and routes call a transport a *way*.
"""

import contextlib
import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from mmrouter_handover.plugin import vllm_items
from mmrouter_handover.plugin.nixl_transport import NixlTransport, open_nixl
from mmrouter_handover.plugin.processor_cache import HandedOverCache, PendingItems, Processed
from mmrouter_handover.plugin.wire import WAYS, Inline, Nixl, Offer, PackedItem, Shm, Way, read_header
from mmrouter_handover.shm import HandOverError, Pool, Reader, read_handle

SHARED_DIR_ENV = "MMROUTER_SHARED_DIR"
"""Root of the node's shared tmpfs."""
WAYS_ENV = "MMROUTER_HANDOVER_WAYS"
"""Ways to open, separated by commas. NIXL opens sockets, so it must be named explicitly."""
BYTES_ENV = "MMROUTER_HANDOVER_BYTES"
"""Most bytes of processed images that a server keeps in each of tmpfs, registered memory, and its own memory."""
NODE_ENV = "NODE_NAME"

DEFAULT_WAYS = "shm,inline"
DEFAULT_BYTES = 1 << 30
NIXL_BYTES = 256 << 20
"""Most bytes to register: a network card may pin all of them at once."""
T = TypeVar("T")
Release = Callable[[], object]
log = logging.getLogger("vllm.mmrouter_plugin")  # a child of vLLM's logger, the only one configured


class Settings(msgspec.Struct, frozen=True):
    shared_dir: str
    ways: tuple[Way, ...]
    limit_bytes: int
    node: str


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Return the settings from environment variables. Raises ``ValueError`` for invalid values."""
    named = {word.strip() for word in environ.get(WAYS_ENV, DEFAULT_WAYS).split(",")} - {""}
    if unknown := sorted(named - set(WAYS)):
        raise ValueError(f"{WAYS_ENV} names {unknown[0]!r}; ways are {', '.join(WAYS)}")
    limit = int(environ.get(BYTES_ENV) or DEFAULT_BYTES)
    if limit < 1 << 20:
        raise ValueError(f"{BYTES_ENV} is {limit}; less than 1 MiB holds no image")
    ways = tuple(way for way in WAYS if way in named)
    return Settings(environ.get(SHARED_DIR_ENV, ""), ways, limit, environ.get(NODE_ENV, ""))


class Transports:
    """The open transports of a server. ``missing``: way -> reason why it is not available, or empty."""

    def __init__(self, settings: Settings, role: str) -> None:
        unnamed = f"absent: {WAYS_ENV} does not name it"
        self.missing: dict[str, str] = {way: "" if way in settings.ways else unnamed for way in WAYS}
        self._pool: Pool | None = None
        self._reader: Reader | None = None
        self.nixl: NixlTransport | None = None
        if "shm" in settings.ways and not settings.shared_dir:
            self.missing["shm"] = f"absent: {SHARED_DIR_ENV} is not set"
        elif "shm" in settings.ways:
            try:
                if role == "renderer":
                    self._pool = Pool(settings.shared_dir, f"renderer-{os.getpid()}", limit_bytes=settings.limit_bytes)
                else:
                    self._reader = Reader(settings.shared_dir)
            except OSError as error:
                self.missing["shm"] = f"absent: {settings.shared_dir}: {error.strerror}"
        if "nixl" in settings.ways:
            self.nixl, self.missing["nixl"] = open_nixl(role, min(settings.limit_bytes, NIXL_BYTES))

    def offer(self, item: PackedItem, name: str, way: Way, seconds: float, inline_bytes: int) -> tuple[Offer, Release]:
        """Offer an item one way; return the offer and a function that ends it. Raises :class:`HandOverError`."""
        if why := self.missing[way]:
            raise HandOverError("absent", why)
        if way == "inline":
            if item.length > inline_bytes:
                raise HandOverError("large", f"{item.length} bytes, inline items have at most {inline_bytes}")
            payload = bytearray(item.length)
            item.write(memoryview(payload))
            return Inline(length=item.length, data=bytes(payload)), lambda: False
        if way == "nixl":
            assert self.nixl is not None
            return self.nixl.offer(item, seconds)
        assert self._pool is not None
        with self._pool.lease(item.length, seconds=seconds) as lease:
            item.write(lease.buffer)
            handle = lease.publish(name)
        return Shm(length=item.length, handle=handle.to_json()), lease.release

    def read(self, offer: Offer, use: Callable[[memoryview], T]) -> T:
        """Return the result of ``use`` on the bytes of an offered item. Raises :class:`HandOverError`."""
        if why := self.missing[str(offer.__struct_config__.tag)]:
            raise HandOverError("absent", why)
        if isinstance(offer, Inline):
            return use(memoryview(offer.data))
        if isinstance(offer, Nixl):
            assert self.nixl is not None
            return self.nixl.read(offer, use)
        assert self._reader is not None
        view = self._reader.open(read_handle(offer.handle))
        try:
            return use(view.data)
        finally:
            view.release()

    def close(self) -> None:
        for peer in (self._pool, self._reader):
            if peer is not None:
                with contextlib.suppress(OSError):
                    peer.close()


class ItemLender:
    """Leases by name; all offers of one answer end together. Usable from several threads."""

    def __init__(self, transports: Transports, settings: str) -> None:
        self._transports, self._settings = transports, settings
        self._leases: dict[str, tuple[list[Release], float]] = {}
        self._mutex = threading.Lock()
        self.counts: Counter[str] = Counter()

    def offer(
        self, items: Mapping[str, Processed | None], ways: Sequence[Way], seconds: float, inline_bytes: int
    ) -> tuple[str, dict[str, Offer], dict[str, str], list[tuple[str, str]]]:
        """Return the lease, the offers, the reasons of images without an offer, and the ways that failed.

        ``items``: processed images by name; ``None`` if the cache did not keep one.
        """
        offers: dict[str, Offer] = {}
        withheld: dict[str, str] = {}
        fell: list[tuple[str, str]] = []
        releases: list[Release] = []
        try:
            for name, processed in items.items():
                try:
                    if processed is None:
                        raise HandOverError("uncached", "the renderer's cache did not keep it")
                    item = vllm_items.pack(self._settings, name, processed)
                    offers[name], release = self._offer(item, name, ways, seconds, inline_bytes, fell)
                except HandOverError as failed:
                    withheld[name] = failed.reason
                    self.counts[f"withheld {failed.reason}"] += 1
                else:
                    releases.append(release)
        except BaseException:  # the caller gets no lease to end
            _end(releases)
            raise
        for way, reason in fell:
            self.counts[f"{way} fell {reason}"] += 1
        self.expire()
        lease = secrets.token_hex(16)
        with self._mutex:
            self._leases[lease] = (releases, time.monotonic() + seconds)
        return lease, offers, withheld, fell

    def release(self, lease: str) -> int:
        with self._mutex:
            releases, _ = self._leases.pop(lease, ([], 0.0))
        return _end(releases)

    def expire(self) -> None:
        """Drop leases whose time is over; their slots have ended already."""
        with self._mutex:
            now = time.monotonic()
            over = [name for name, (_, until) in self._leases.items() if until <= now]
            releases = [release for name in over for release in self._leases.pop(name)[0]]
        _end(releases)

    def __len__(self) -> int:
        return len(self._leases)

    def _offer(
        self, item: PackedItem, name: str, ways: Sequence[Way], seconds: float, inline: int, fell: list[tuple[str, str]]
    ) -> tuple[Offer, Release]:
        last = HandOverError("absent", "the request names no way")
        for way in ways:
            try:
                offered = self._transports.offer(item, name, way, seconds, inline)
            except HandOverError as failed:
                last = failed
                fell.append((way, failed.reason))
            else:
                self.counts[f"offered {way}"] += 1
                return offered
        raise last


def from_cache(cache: Any, names: Sequence[str]) -> dict[str, Processed | None]:
    """Return images from a renderer's cache. To be called in the thread that processes images."""
    return {name: cache.get_and_update_item(None, name) if cache.is_cached_item(name) else None for name in names}


def _end(releases: Sequence[Release]) -> int:
    for release in releases:
        release()
    return len(releases)


class ItemReceiver:
    """Fetches offered items. Usable from several threads."""

    def __init__(
        self, transports: Transports, settings: str, cache: HandedOverCache, pending: PendingItems[Processed]
    ) -> None:
        self._transports, self._settings, self.cache, self.pending = transports, settings, cache, pending
        self.counts: Counter[str] = Counter()

    def take(self, items: Mapping[str, Offer], seconds: float) -> tuple[list[str], dict[str, str]]:
        held: list[str] = []
        refused: dict[str, str] = {}
        for name, offer in items.items():
            if self.cache.holds(name, seconds):
                self.counts["held before"] += 1
                held.append(name)
                continue
            try:
                item = self._transports.read(offer, partial(self._unpack, name, offer.length))
                self.pending.put(name, item, offer.length, seconds)
            except HandOverError as failed:
                log.info("image %s is not taken: %s", name, failed)
                self.counts[f"refused {failed.reason}"] += 1
                refused[name] = failed.reason
            else:
                self.counts[f"taken {offer.__struct_config__.tag}"] += 1
                held.append(name)
        return held, refused

    def _unpack(self, name: str, length: int, packed: memoryview) -> Processed:
        if len(packed) != length:
            raise HandOverError("truncated", f"{len(packed)} bytes, {length} were offered")
        header, tensors = read_header(packed, name=name, settings=self._settings)
        with tensors:  # a slot can be released only when nothing points into it
            return vllm_items.unpack(header, tensors)
