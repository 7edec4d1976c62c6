"""The writer's side: a bounded pool of slots, lent by lease."""

import itertools
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from mmrouter_handover.shm import files
from mmrouter_handover.shm import pool_owner as owner
from mmrouter_handover.shm.checksum import checksum
from mmrouter_handover.shm.handles import Check, Handle, HandOverError
from mmrouter_handover.shm.idle_release import TIDIER
from mmrouter_handover.shm.mapped_slot import MappedSlot
from mmrouter_handover.shm.reclaim import reclaim
from mmrouter_handover.shm.shared_budget import HIGH_WATER, Room
from mmrouter_handover.shm.slot import LEASE_SECONDS, MAX_LEASE_SECONDS, Header
from mmrouter_handover.shm.slot_sizes import PAGE_BYTES, evictions, slot_bytes


class Lease:
    """The right to one slot. Until :meth:`publish` it is written through ``buffer``; :meth:`release` ends it.

    As a context manager it is released when the block raises or has published nothing. A published lease goes on after
    the block: it ends when a reader acknowledges, at its deadline, or by :meth:`release`, whichever is first.
    """

    def __init__(self, pool: "Pool", slot: MappedSlot, length: int, since: float, deadline: float) -> None:
        self.buffer = slot.payload(length)
        self.handle: Handle | None = None
        self._pool = pool
        self._slot = slot
        self._generation = slot.generation
        self._since = since
        self._deadline = deadline

    def publish(
        self, refetch: str, *, dtype: str = "uint8", shape: tuple[int, ...] | None = None, check: Check = "sampled"
    ) -> Handle:
        """Make the payload readable and return its handle; ``buffer`` cannot be used after that.

        ``shape`` is in elements of ``dtype``, by default flat bytes. Raises ``ValueError`` where it is not the length,
        and ``BufferError`` while an array or a slice still uses ``buffer``; nothing is published then.
        """
        if self.handle is None:
            length = len(self.buffer)
            found = checksum(self.buffer, check)
            shape = (length,) if shape is None else shape
            handle = Handle(self._slot.path, self._generation, length, check, found, dtype, shape, refetch)
            self._pool._publish(self, handle)
            self.handle = handle
        return self.handle

    def release(self) -> None:
        """End the lease; the slot is free as soon as nobody uses it. Again, or after its end, it does nothing."""
        self._pool._release(self)

    @property
    def _unused(self) -> bool:
        """Whether nothing of the caller's points into ``buffer`` any more. The slot is whole."""
        try:
            self.buffer.release()
        except BufferError:
            return False
        return not self._slot.used

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is not None or self.handle is None:
            self.release()


class Pool:
    """The slots of one writer process, in a folder of their own below ``root``. Usable from several threads.

    A slot is *idle* (ours alone, we hold its exclusive lock), or *lent*: being written, leased, or over but still read.
    """

    def __init__(
        self,
        root: str | Path,
        writer: str,
        *,
        limit_bytes: int,
        total_bytes: int | None = None,
        high_water: float = HIGH_WATER,
        now: Callable[[], float] = files.clock,
    ) -> None:
        """Make the pool's folder. ``writer`` says whose it is, for people; ``limit_bytes`` bounds its files.

        ``total_bytes``: bound of all that lies below ``root``, of whomever. ``high_water``: share of either, and of the
        whole file system, above which nothing more is lent. Raises ``OSError``.
        """
        self.name = owner.folder_name(writer)
        self.limit_bytes = limit_bytes
        self._high_water = high_water
        self._root = Path(root)
        self._now = now
        self._room = Room(root, total_bytes, high_water, now)
        self._mutex = threading.RLock()
        self._names = itertools.count(1)
        self._generations = itertools.count(1)
        self._idle: dict[int, list[MappedSlot]] = {}
        self._lent: dict[str, MappedSlot] = {}
        self._abandoned: list[Lease] = []
        self._closed = False
        self._round = 0
        self.bytes = 0
        """Bytes of all its slot files."""
        self.lent_bytes = 0
        """Bytes of those that were lent when it was last looked."""
        with files.folder(root) as number:
            limits = owner.Owner(writer, os.getpid(), now(), limit_bytes)
            self._folder, self._owner = owner.create(number, self.name, limits)
        TIDIER.watch(self)

    def lease(self, length: int, *, seconds: float = LEASE_SECONDS) -> Lease:
        """Lend a slot for ``length`` bytes; the time for a reader to begin is ``seconds``, at most an hour.

        Raises :class:`HandOverError` ``full`` where there is no room: the caller sends bytes instead.
        """
        if length < 0 or not 0 < seconds <= MAX_LEASE_SECONDS:
            raise ValueError(f"no lease of {length} bytes for {seconds} s")
        with self._mutex:
            now = self._now()
            slot = self._slot_for(length, now)
            slot.begin(next(self._generations))
            self._lent[slot.name] = slot
            self.lent_bytes += slot.size
            return Lease(self, slot, length, now, now + seconds)

    def put(
        self,
        payload: Any,
        refetch: str,
        *,
        dtype: str = "uint8",
        shape: tuple[int, ...] | None = None,
        check: Check = "sampled",
        seconds: float = LEASE_SECONDS,
    ) -> Lease:
        """Lease, copy ``payload`` (any contiguous buffer) and publish. Raises what these raise."""
        flat = memoryview(payload)
        flat = flat.cast("B") if flat.nbytes else memoryview(b"")
        with self.lease(len(flat), seconds=seconds) as lease:
            lease.buffer[:] = flat
            lease.publish(refetch, dtype=dtype, shape=shape, check=check)
        return lease

    def put_all(self, items: Iterable[tuple[Any, str]], *, seconds: float = LEASE_SECONDS) -> list[Lease]:
        """Hand over all payloads, each with its re-fetch handle, or none: what one failure leaves is released."""
        leases: list[Lease] = []
        try:
            for payload, refetch in items:
                leases.append(self.put(payload, refetch, seconds=seconds))
        except BaseException:  # ctrl-C, too: what is leased and not told of would stay until its deadline
            for lease in leases:
                lease.release()
            raise
        return leases

    def collect(self) -> None:
        """Take back every slot whose lease is over and which nobody reads. :meth:`lease` does so when it needs one."""
        with self._mutex:
            self._collect(self._now(), None)

    def trim(self, keep_bytes: int = 0) -> int:
        """Remove idle slots until at most ``keep_bytes`` are idle; return the bytes removed."""
        with self._mutex:
            self.collect()
            before = self.bytes
            idle = self._idle_slots()
            surplus = max(0, sum(slot.size for slot in idle) - keep_bytes)
            for place in evictions([slot.size for slot in idle], 0, surplus) or ():
                self._remove(idle[place])
            return before - self.bytes

    def tidy(self) -> None:
        """Remove slots that nobody used since the call before: idle ones count as taken for all writers of the node.

        A thread of the process does so every half minute.
        """
        with self._mutex:
            if self._closed:
                return
            self._collect(self._now(), None)
            for slot in self._idle_slots():
                if slot.round < self._round:
                    self._remove(slot)
            self._round += 1

    def close(self) -> None:
        """Remove what is not leased. What is stays readable until its end, and then belongs to the janitor."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            self.collect()
            for slot in (*self._lent.values(), *self._idle_slots()):
                slot.close()
            os.close(self._owner)
            os.close(self._folder)
            self._lent, self._idle = {}, {}
            self.bytes = self.lent_bytes = 0
            reclaim(self._root, self._now(), only=self.name)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collect(self, now: float, enough: int | None) -> MappedSlot | None:
        """Take slots back, the ones lent first first, until one of class ``enough`` is idle, and return that."""
        abandoned, self._abandoned = self._abandoned, []
        for lease in abandoned:
            self._release(lease)
        for slot in list(self._lent.values()):
            if not slot.published:
                continue
            if not slot.whole:
                self._forget(slot)
            elif slot.over(now) and self._take_back(slot) and slot.class_bytes == enough:
                return slot
        return None

    def _slot_for(self, length: int, now: float) -> MappedSlot:
        """Return a slot that is ours alone: an idle one of the class, or a new one, for which others may have to go."""
        if self._closed:
            raise HandOverError("full", "the pool is closed")
        wanted = slot_bytes(length)
        of_class, found = wanted - PAGE_BYTES, None
        if not self._idle.get(of_class):
            found = self._collect(now, of_class)
        if self.lent_bytes + wanted > self._mark:
            self._collect(now, None)
        if self.lent_bytes + wanted > self._mark:
            raise HandOverError("full", f"{self.lent_bytes} of {self.limit_bytes} bytes are lent, {wanted} are wanted")
        while idle := self._idle.get(of_class):
            slot = idle.pop()  # the last one used: its pages are the likeliest to be in a cache
            if slot is found or slot.whole:
                return slot
            self._forget(slot)
        return self._create(wanted)

    @property
    def _mark(self) -> float:
        return self._high_water * self.limit_bytes

    def _create(self, wanted: int) -> MappedSlot:
        idle = self._idle_slots()
        places = evictions([slot.size for slot in idle], self.limit_bytes - self.bytes, wanted)
        if places is None:
            raise HandOverError("full", f"{self.bytes} of {self.limit_bytes} bytes are in use, {wanted} are wanted")
        for place in places:
            self._remove(idle[place])
        self._room.take(wanted)
        try:
            slot = MappedSlot(self._folder, self.name, f"{files.SLOT_PREFIX}{next(self._names):x}", wanted)
        except OSError as error:
            self._room.give(wanted)
            raise HandOverError("full", f"no slot of {wanted} bytes: {error.strerror}") from error
        self.bytes += slot.size
        return slot

    def _publish(self, lease: Lease, handle: Handle) -> None:
        slot = lease._slot
        with self._mutex:
            if self._closed or slot.generation != lease._generation:
                raise HandOverError("gone", "the lease ended while it was written")
            if not lease._unused:
                raise BufferError("something still uses the buffer of this lease")
            slot.publish(
                Header(
                    self.name,
                    slot.name,
                    handle.generation,
                    lease._since,
                    lease._deadline,
                    handle.length,
                    handle.check,
                    handle.checksum,
                    handle.dtype,
                    handle.shape,
                )
            )

    def _release(self, lease: Lease) -> None:
        slot = lease._slot
        with self._mutex:
            # A lease that is over may have been followed by another one of the same slot.
            if self._closed or slot.generation != lease._generation or self._lent.get(slot.name) is not slot:
                return
            if not slot.whole:
                self._forget(slot)
            elif not lease._unused:
                self._abandoned.append(lease)  # an exception on its way up may still hold an array
            else:
                slot.give_up()
                self._take_back(slot)

    def _take_back(self, slot: MappedSlot) -> bool:
        """Make a lent slot idle, unless somebody reads it: then it stays where it is until it is looked at again."""
        if not slot.take():
            return False
        del self._lent[slot.name]
        self.lent_bytes -= slot.size
        slot.round = self._round
        self._idle.setdefault(slot.class_bytes, []).append(slot)
        return True

    def _idle_slots(self) -> list[MappedSlot]:
        return [slot for slots in self._idle.values() for slot in slots]

    def _remove(self, slot: MappedSlot) -> None:
        self._idle[slot.class_bytes].remove(slot)
        self._room.give(slot.size)
        self.bytes -= slot.size
        slot.remove()

    def _forget(self, slot: MappedSlot) -> None:
        """Let go of a slot that somebody else has cut or removed."""
        self.bytes -= slot.size
        if self._lent.pop(slot.name, None) is not None:
            self.lent_bytes -= slot.size
        slot.close()
