"""Open the transports (shared memory, NIXL, inline) that the pod's environment names, and offer and read items.

Environment variables and routes call a transport a *way*.
"""

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from mmrouter_handover.plugin.nixl_transport import NixlTransport, open_nixl
from mmrouter_handover.plugin.packed_item import PackedItem
from mmrouter_handover.plugin.wire import WAYS, HandOverFailed, Inline, Nixl, Offer, Shm, Way
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


class Settings(msgspec.Struct, frozen=True):
    """Settings of the hand-over."""

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
        self.missing: dict[str, str] = {}
        self._pool: Pool | None = None
        self._reader: Reader | None = None
        self.nixl: NixlTransport | None = None
        self._inline = "inline" in settings.ways
        for way in WAYS:
            self.missing[way] = "" if way in settings.ways else f"absent: {WAYS_ENV} does not name it"
        if "shm" in settings.ways:
            self._open_shm(settings, role)
        if "nixl" in settings.ways:
            self.nixl, self.missing["nixl"] = open_nixl(role, min(settings.limit_bytes, NIXL_BYTES))

    def _open_shm(self, settings: Settings, role: str) -> None:
        if not settings.shared_dir:
            self.missing["shm"] = f"absent: {SHARED_DIR_ENV} is not set"
            return
        try:
            if role == "renderer":
                self._pool = Pool(settings.shared_dir, f"renderer-{os.getpid()}", limit_bytes=settings.limit_bytes)
            else:
                self._reader = Reader(settings.shared_dir)
        except OSError as error:
            self.missing["shm"] = f"absent: {settings.shared_dir}: {error.strerror}"

    def offer(self, item: PackedItem, name: str, way: Way, seconds: float, inline_bytes: int) -> tuple[Offer, Release]:
        """Offer an item one way; return the offer and a function that ends it. Raises :class:`HandOverFailed`."""
        if why := self.missing[way]:
            raise HandOverFailed("absent", why)
        if way == "inline":
            if item.length > inline_bytes:
                raise HandOverFailed("large", f"{item.length} bytes, inline items have at most {inline_bytes}")
            payload = bytearray(item.length)
            item.write(memoryview(payload))
            return Inline(length=item.length, data=bytes(payload)), lambda: False
        if way == "nixl":
            assert self.nixl is not None
            return self.nixl.offer(item, seconds)
        assert self._pool is not None
        try:
            with self._pool.lease(item.length, seconds=seconds) as lease:
                item.write(lease.buffer)
                handle = lease.publish(name)
        except HandOverError as error:
            raise HandOverFailed(error.reason, str(error)) from error
        return Shm(length=item.length, handle=handle.to_json()), lease.release

    def read(self, offer: Offer, use: Callable[[memoryview], T]) -> T:
        """Return the result of ``use`` on the bytes of an offered item. Raises :class:`HandOverFailed`."""
        if isinstance(offer, Inline):
            if not self._inline:
                raise HandOverFailed("absent", self.missing["inline"])
            return use(memoryview(offer.data))
        if isinstance(offer, Nixl):
            if self.nixl is None:
                raise HandOverFailed("absent", self.missing["nixl"])
            return self.nixl.read(offer, use)
        if self._reader is None:
            raise HandOverFailed("absent", self.missing["shm"])
        try:
            view = self._reader.open(read_handle(offer.handle))
        except HandOverError as error:
            raise HandOverFailed(error.reason, str(error)) from error
        try:
            return use(view.data)
        finally:
            view.release()

    def close(self) -> None:
        """Close the transports; slots that are still read stay until their readers are done."""
        for peer in (self._pool, self._reader):
            if peer is not None:
                with contextlib.suppress(OSError):
                    peer.close()
