"""Transport processed images across nodes with NIXL: the engine reads from the renderer's registered memory.

One memory region is registered once and leased in parts, so remote reads need no key per image. A failed read returns
all its resources. A read that timed out may still write to its buffer, even after NIXL has released its handle
(observed with UCX over tcp and a stopped peer: all bytes arrived later). Such a buffer is therefore set aside until
NIXL reports the end of the read, and nothing more is read from that peer: a hanging peer ties up at most the buffers of
its concurrent reads.
"""

import bisect
import contextlib
import ctypes
import math
import mmap
import os
import secrets
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

from mmrouter_handover.plugin.wire import Nixl, PackedItem
from mmrouter_handover.shm import HandOverError
from mmrouter_handover.shm.slot_format import checksum

HEAD_BYTES = 64
"""Bytes before each payload: its generation in eight bytes, the rest unused, so that payloads stay aligned."""
GENERATION = struct.Struct("<Q")
T = TypeVar("T")
READ_SECONDS = 3.0
POLL_SECONDS = 0.0005
MAX_PEERS = 64
UNTIL_ENDED = math.inf
"""Lease of a read's buffer: no elapsed time proves that nothing writes to it any more."""
FIRST_BACKOFF_SECONDS = 1.0
MAX_BACKOFF_SECONDS = 3600.0
MAX_FAILED_PEERS = 1024


class ArenaLease(msgspec.Struct, frozen=True):
    """A leased part of the arena: ``offset`` of its head, ``size`` including the head, and its ``deadline``."""

    offset: int
    size: int
    generation: int
    deadline: float


class Arena:
    """First-fit allocator of ``limit_bytes``, usable from several threads. ``now``: monotonic seconds.

    Pages take memory only once they are written.
    """

    def __init__(self, limit_bytes: int, now: Callable[[], float]) -> None:
        self.memory = memoryview(mmap.mmap(-1, limit_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._limit, self._now = limit_bytes, now
        self._leases: list[ArenaLease] = []  # by offset
        self._generation = 0
        self._mutex = threading.RLock()

    def lease(self, length: int, seconds: float) -> ArenaLease:
        """Lease ``length`` bytes. Raises :class:`HandOverError`: ``full``, or ``large`` if it never fits."""
        size = HEAD_BYTES + -(-length // HEAD_BYTES) * HEAD_BYTES
        if size > self._limit:
            raise HandOverError("large", f"{length} bytes, the arena has {self._limit}")
        with self._mutex:
            self.expire()
            offset = 0
            taken = [(lease.offset, lease.size) for lease in self._leases]
            for begin, length_taken in [*taken, (self._limit, 0)]:
                if begin - offset >= size:
                    break  # the first gap that fits
                offset = begin + length_taken
            else:
                raise HandOverError("full", f"{self.leased_bytes} of {self._limit} bytes are leased")
            self._generation += 1
            lease = ArenaLease(offset, size, self._generation, self._now() + seconds)
            GENERATION.pack_into(self.memory, offset, lease.generation)
            bisect.insort(self._leases, lease, key=attrgetter("offset"))
            return lease

    def payload(self, lease: ArenaLease, length: int) -> memoryview:
        return self.memory[lease.offset + HEAD_BYTES :][:length]

    def release(self, lease: ArenaLease) -> bool:
        with self._mutex:
            leased = lease in self._leases
            if leased:
                # Before the memory is reused: a reader that finds its generation unchanged has read the leased item.
                GENERATION.pack_into(self.memory, lease.offset, 0)
                self._leases.remove(lease)
            return leased

    def expire(self) -> None:
        with self._mutex:
            now = self._now()
            for lease in [lease for lease in self._leases if lease.deadline <= now]:
                self.release(lease)

    @property
    def leased_bytes(self) -> int:
        return sum(lease.size for lease in self._leases)


class PeerBackoff:
    """When failed peers may be tried again: the pause doubles with each failure in a row.

    Each attempt to connect to an unreachable peer leaks a descriptor in NIXL. ``now``: monotonic seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._failed: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def failed(self, name: str) -> None:
        times, _ = self._failed.pop(name, (0, 0.0))
        seconds = min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2 ** min(times, 20))
        self._failed[name] = (times + 1, self._now() + seconds)
        while len(self._failed) > MAX_FAILED_PEERS:
            self._failed.popitem(last=False)

    def worked(self, name: str) -> None:
        self._failed.pop(name, None)

    def is_paused(self, name: str) -> bool:
        return self._now() < self._failed.get(name, (0, 0.0))[1]


class NixlTransport:
    """One NIXL agent and its arena: a renderer offers items from it, an engine reads items into it."""

    def __init__(self, agent: Any, arena: Arena, now: Callable[[], float] = time.monotonic) -> None:
        """``agent`` is a ``nixl_agent``. Registers the arena. Raises what NIXL raises."""
        self._agent, self.arena, self._now = agent, arena, now
        # The arena is mapped until the process ends, so its address does not change.
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(arena.memory))
        self._registered = agent.register_memory([(self._base, arena.memory.nbytes, 0, "")], "DRAM")
        self._metadata: bytes = agent.get_agent_metadata()
        self._peers: OrderedDict[str, bytes] = OrderedDict()
        self._backoff = PeerBackoff(now)
        self._stuck: list[tuple[Any, ArenaLease, str]] = []
        self._mutex = threading.Lock()  # an agent serves one thread at a time

    def offer(self, item: PackedItem, seconds: float) -> tuple[Nixl, Callable[[], bool]]:
        """Write an item; return its offer and a function that ends its lease. Raises :class:`HandOverError`."""
        lease = self.arena.lease(item.length, seconds)
        try:
            payload = self.arena.payload(lease, item.length)
            item.write(payload)
            address, crc = self._base + lease.offset, checksum(payload)
            offered = Nixl(item.length, self._agent.name, self._metadata, address, lease.generation, crc)
        except BaseException:  # the caller gets no function to end the lease
            self.arena.release(lease)
            raise
        return offered, lambda: self.arena.release(lease)

    def read(self, offer: Nixl, use: Callable[[memoryview], T]) -> T:
        """Read an item and return the result of ``use`` on its buffer. Raises :class:`HandOverError`."""
        self.stuck()
        lease = self.arena.lease(HEAD_BYTES + offer.length, UNTIL_ENDED)
        try:
            return self._read(offer, lease, use)
        finally:
            with self._mutex:
                if all(stuck is not lease for _, stuck, _ in self._stuck):
                    self.arena.release(lease)

    def stuck(self) -> int:
        """Return how many timed-out reads have not ended, and release the buffers of those that have."""
        with self._mutex:
            running = []
            for handle, lease, agent in self._stuck:
                try:
                    state = self._agent.check_xfer_state(handle)
                except Exception as error:  # NIXL also reports a failed read by an exception
                    state = str(error)
                if state == "PROC":
                    running.append((handle, lease, agent))
                else:
                    self._end(handle, agent, worked=state == "DONE")
                    self.arena.release(lease)
            self._stuck = running
            return len(running)

    def _read(self, offer: Nixl, lease: ArenaLease, use: Callable[[memoryview], T]) -> T:
        with self._mutex:
            self._connect(offer)
        local = self._base + lease.offset + HEAD_BYTES
        deadline = self._now() + READ_SECONDS
        self._transfer(offer, lease, local, offer.address, HEAD_BYTES + offer.length, deadline)
        # The lease may have ended during the read, and its memory been reused. The generation is zeroed before any
        # reuse, so if it is unchanged after the read, it was unchanged all the time.
        self._transfer(offer, lease, local, offer.address, GENERATION.size, deadline)
        got = self.arena.payload(lease, HEAD_BYTES + offer.length)
        if GENERATION.unpack_from(got)[0] != offer.generation:
            raise HandOverError("stale", "the lease ended")
        payload = got[HEAD_BYTES:]
        if checksum(payload) != offer.checksum:
            raise HandOverError("corrupt", "the item's checksum differs")
        return use(payload)

    def _connect(self, offer: Nixl) -> None:
        if any(agent == offer.agent for _, _, agent in self._stuck):
            raise HandOverError("failed", "an earlier read from this renderer timed out and has not ended")
        if self._backoff.is_paused(offer.agent):
            raise HandOverError("failed", "the renderer's agent was unreachable, and its pause is not over")
        if self._peers.get(offer.agent) == offer.metadata:
            self._peers.move_to_end(offer.agent)
            return
        self._disconnect(offer.agent)
        try:
            name = self._agent.add_remote_agent(offer.metadata)
        except Exception as error:  # NIXL's errors have no common base class
            self._backoff.failed(offer.agent)
            raise HandOverError("failed", f"cannot connect to the renderer's agent: {error}") from error
        agent = name.decode() if isinstance(name, bytes) else name
        self._peers[offer.agent] = offer.metadata
        if agent != offer.agent:
            self._disconnect(offer.agent)
            raise HandOverError("refused", "the offer names another agent than its metadata")
        while len(self._peers) > MAX_PEERS:
            self._disconnect(next(iter(self._peers)))

    def _disconnect(self, name: str) -> None:
        if self._peers.pop(name, None) is not None:
            with contextlib.suppress(Exception):  # it may be gone already
                self._agent.remove_remote_agent(name)

    def _transfer(self, offer: Nixl, lease: ArenaLease, local: int, remote: int, length: int, deadline: float) -> None:
        handle, begun, state = None, False, "not begun"
        try:
            with self._mutex:
                here = self._agent.get_xfer_descs([(local, length, 0)], "DRAM")
                there = self._agent.get_xfer_descs([(remote, length, 0)], "DRAM")
                handle = self._agent.initialize_xfer("READ", here, there, offer.agent)
                begun = True  # a failure before this is not the peer's
                state = self._agent.transfer(handle)
            while state == "PROC" and self._now() < deadline:
                time.sleep(POLL_SECONDS)
                with self._mutex:
                    state = self._agent.check_xfer_state(handle)
        except Exception as error:  # NIXL's errors have no common base class
            state = str(error)[:200]
        finally:
            with self._mutex:
                if state == "PROC":
                    self._stuck.append((handle, lease, offer.agent))
                else:
                    self._end(handle, offer.agent, worked=state == "DONE" or not begun)
        if state == "PROC":
            raise HandOverError("failed", f"no data within {READ_SECONDS:g} s")
        if state != "DONE":
            raise HandOverError("failed", f"the read ended as {state}")

    def _end(self, handle: Any, agent: str, *, worked: bool) -> None:
        """Release an ended read; after a failure, disconnect from the agent until its pause is over."""
        if handle is not None:
            with contextlib.suppress(Exception):  # NIXL frees it with the agent
                self._agent.release_xfer_handle(handle)
        if worked:
            self._backoff.worked(agent)
        else:
            self._backoff.failed(agent)
            self._disconnect(agent)


def open_nixl(role: str, limit_bytes: int) -> tuple[NixlTransport | None, str]:
    """Return the transport, or ``None`` and the reason why this image or machine has none."""
    try:
        from nixl._api import nixl_agent, nixl_agent_config  # noqa: PLC0415
    except Exception as error:  # the package may be installed without its libraries
        return None, f"absent: NIXL cannot be loaded: {str(error)[:200]}"
    try:
        # Without RDMA the peer has to take part in a read: its progress thread does.
        config = nixl_agent_config(enable_prog_thread=True, backends=["UCX"])
        agent = nixl_agent(f"mmrouter-{role}-{os.getpid()}-{secrets.token_hex(8)}", config)
        return NixlTransport(agent, Arena(limit_bytes, time.monotonic)), ""
    except Exception as error:  # the other transports still work
        return None, f"absent: NIXL cannot start: {str(error)[:200]}"
