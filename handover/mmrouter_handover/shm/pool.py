"""The writer's side of leased slots: a bounded pool of memory-mapped files that are lent and reused."""

import itertools
import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from mmrouter_handover.shm import files, slot_format
from mmrouter_handover.shm.files import MappedSlot
from mmrouter_handover.shm.slot_format import Handle, HandOverError
from mmrouter_handover.shm.writer_folder import WriterFolder, flat_bytes

TRIM_SECONDS = 30.0


class Lease(AbstractContextManager["Lease"]):
    """The right to one slot. Until :meth:`publish` it is written through ``buffer``; :meth:`release` ends it.

    As a context manager it is released if the block raises or publishes nothing. A published lease outlives the block:
    it ends when a reader acknowledges, at its deadline, or by :meth:`release`, whichever is first.
    """

    def __init__(self, pool: "Pool", slot: MappedSlot, length: int, since: float, deadline: float) -> None:
        self.buffer = slot.payload(length)
        self.handle: Handle | None = None
        self.slot, self.generation, self._pool = slot, slot.generation, pool
        self.since, self.deadline = since, deadline

    def publish(self, refetch: str) -> Handle:
        """Make the payload readable and return its handle; ``buffer`` cannot be used after that.

        Raises ``BufferError`` while an array or a slice still uses ``buffer``; nothing is published then.
        """
        if self.handle is None:
            crc = slot_format.checksum(self.buffer)
            handle = Handle(self.slot.path, self.generation, len(self.buffer), crc, refetch)
            self._pool._publish(self, handle)
            self.handle = handle
        return self.handle

    def release(self) -> None:
        """End the lease; the slot is free once all its readers are done. Repeated calls do nothing."""
        self._pool._release(self)

    def drop_buffer(self) -> bool:
        """Release ``buffer``; return false while the caller still has arrays or slices of it."""
        try:
            self.buffer.release()
        except BufferError:
            return False
        return not files.is_exported(self.slot.map)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None or self.handle is None:
            self.release()


class Pool(WriterFolder):
    """The slots of one writer process, in a folder of their own below ``root``. Usable from several threads.

    A slot is *idle* (this process holds its exclusive lock), or *lent*: being written, leased, or over but still read.
    """

    def _open(self) -> None:
        self._names = itertools.count(1)
        self._generations = itertools.count(1)
        self._idle: dict[int, list[MappedSlot]] = {}
        self._lent: dict[str, MappedSlot] = {}
        self._abandoned: list[Lease] = []
        self._round = 0
        self.lent_bytes = 0
        """Bytes of the slots that were lent at the last collection."""
        self._closing = threading.Event()
        ends = weakref.ref(self), self._closing
        threading.Thread(target=_trim, args=ends, name="mmrouter-pool-trimmer", daemon=True).start()

    def lease(self, length: int, *, seconds: float = slot_format.LEASE_SECONDS) -> Lease:
        """Lend a slot for ``length`` bytes. A reader must begin within ``seconds``, at most an hour.

        Raises :class:`HandOverError` ``full`` if there is no room: the caller sends bytes instead.
        """
        if length < 0 or not 0 < seconds <= slot_format.MAX_LEASE_SECONDS:
            raise ValueError(f"no lease of {length} bytes for {seconds} s")
        with self._mutex:
            now = self._now()
            slot = self._slot_for(length, now)
            slot.begin(next(self._generations))
            self._lent[slot.name] = slot
            self.lent_bytes += slot.size
            return Lease(self, slot, length, now, now + seconds)

    def put(self, payload: Any, refetch: str, *, seconds: float = slot_format.LEASE_SECONDS) -> Lease:
        """Lease a slot, copy ``payload`` (any contiguous buffer) into it and publish it. Raises as these do."""
        flat = flat_bytes(payload)
        with self.lease(len(flat), seconds=seconds) as lease:
            lease.buffer[:] = flat
            lease.publish(refetch)
        return lease

    def collect(self) -> None:
        """Take back every slot whose lease and readers are done. :meth:`lease` does so when it needs a slot."""
        with self._mutex:
            self._collect(self._now(), None)

    def trim_unused(self) -> None:
        """Remove slots that were idle since the last call. Idle slots count against the limit of all writers.

        A thread calls it every 30 seconds.
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
        with self._mutex:
            if not self._closed:
                self.collect()
            super().close()

    def abandon(self) -> None:
        with self._mutex:
            for slot in (*self._lent.values(), *self._idle_slots()):
                slot.close()
            self._closing.set()
            self._lent, self._idle = {}, {}
            self.lent_bytes = 0
            super().abandon()

    def _collect(self, now: float, enough: int | None) -> MappedSlot | None:
        """Take slots back, oldest lease first, until one of size ``enough`` is idle, and return that one."""
        abandoned, self._abandoned = self._abandoned, []
        for lease in abandoned:
            self._release(lease)
        for slot in list(self._lent.values()):
            if not slot.published:
                continue
            if not slot.is_whole:
                self._forget(slot)
            elif slot.is_over(now) and self._take_back(slot) and slot.size == enough:
                return slot
        return None

    def _slot_for(self, length: int, now: float) -> MappedSlot:
        """Return an idle slot of the class of ``length``, or a new one, for which other idle slots may be evicted."""
        if self._closed:
            raise HandOverError("full", "the pool is closed")
        wanted, collected = slot_format.slot_bytes(length), None
        if not self._idle.get(wanted):
            collected = self._collect(now, wanted)
        if self.lent_bytes + wanted > self.mark_bytes:
            self._collect(now, None)
        if self.lent_bytes + wanted > self.mark_bytes:
            raise HandOverError("full", f"{self.lent_bytes} of {self.limit_bytes} bytes are lent, {wanted} are wanted")
        while idle := self._idle.get(wanted):
            slot = idle.pop()  # the last one used: its pages are the likeliest to be in a CPU cache
            if slot is collected or slot.is_whole:
                return slot
            self._forget(slot)
        others = self._idle_slots()
        places = evictions([slot.size for slot in others], self.limit_bytes - self.bytes, wanted)
        if places is None:
            raise HandOverError("full", f"{self.bytes} of {self.limit_bytes} bytes are in use, {wanted} are wanted")
        for place in places:
            self._remove(others[place])
        self._take(wanted)
        try:
            return MappedSlot(self._folder, self.name, f"{files.SLOT_PREFIX}{next(self._names):x}", wanted)
        except OSError as error:
            self._give(wanted)
            raise HandOverError("full", f"no slot of {wanted} bytes: {error.strerror}") from error

    def _publish(self, lease: Lease, handle: Handle) -> None:
        slot = lease.slot
        with self._mutex:
            if self._closed or slot.generation != lease.generation:
                raise HandOverError("gone", "the lease ended while it was written")
            if not lease.drop_buffer():
                raise BufferError("something still uses the buffer of this lease")
            times, payload = (lease.since, lease.deadline), (handle.length, handle.checksum)
            slot.publish(slot_format.Header(self.name, slot.name, handle.generation, *times, *payload))

    def _release(self, lease: Lease) -> None:
        slot = lease.slot
        with self._mutex:
            # The lease may be over already, and the slot lent again.
            if self._closed or slot.generation != lease.generation or self._lent.get(slot.name) is not slot:
                return
            if not slot.is_whole:
                self._forget(slot)
            elif not lease.drop_buffer():
                self._abandoned.append(lease)  # an exception on its way up may still hold an array
            else:
                slot.release()
                self._take_back(slot)

    def _take_back(self, slot: MappedSlot) -> bool:
        """Make a lent slot idle. Returns false while a reader has it: the next collection tries again."""
        if not files.lock(slot.number, exclusive=True):
            return False
        del self._lent[slot.name]
        self.lent_bytes -= slot.size
        slot.round = self._round
        self._idle.setdefault(slot.size, []).append(slot)
        return True

    def _idle_slots(self) -> list[MappedSlot]:
        return [slot for slots in self._idle.values() for slot in slots]

    def _remove(self, slot: MappedSlot) -> None:
        self._idle[slot.size].remove(slot)
        self._give(slot.size)
        slot.remove()

    def _forget(self, slot: MappedSlot) -> None:
        """Close a slot that another process has truncated or removed."""
        self._give(slot.size)
        if self._lent.pop(slot.name, None) is not None:
            self.lent_bytes -= slot.size
        slot.close()


def evictions(idle: Sequence[int], free: int, wanted: int) -> list[int] | None:
    """Return which idle slots (indices into ``idle``, a list of file sizes) to remove to have ``wanted`` bytes free.

    ``free``: bytes that are free already. The largest go first, so that few go. ``None``: all of them are too few.
    """
    chosen: list[int] = []
    for place in sorted(range(len(idle)), key=lambda place: (-idle[place], place)):
        if free >= wanted:
            break
        chosen.append(place)
        free += idle[place]
    return chosen if free >= wanted else None


def _trim(pool: "weakref.ref[Pool]", closing: threading.Event) -> None:
    """Trim a pool until it is closed or collected, because an idle one gets no calls in which it could do so."""
    while not closing.wait(TRIM_SECONDS) and (idle := pool()) is not None:
        idle.trim_unused()
        del idle
