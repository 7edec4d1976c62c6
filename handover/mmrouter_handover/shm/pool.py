"""The writer's side of leased slots: a bounded pool of memory-mapped files that are lent and reused."""

import itertools
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from mmrouter_handover.shm import files
from mmrouter_handover.shm.handles import Check, Handle, HandOverError
from mmrouter_handover.shm.mapped_slot import MappedSlot
from mmrouter_handover.shm.slot_format import LEASE_SECONDS, MAX_LEASE_SECONDS, PAGE_BYTES, Header, checksum, slot_bytes
from mmrouter_handover.shm.writer_folder import WriterFolder, flat_bytes

TRIM_SECONDS = 30.0


class Lease:
    """The right to one slot. Until :meth:`publish` it is written through ``buffer``; :meth:`release` ends it.

    As a context manager it is released if the block raises or publishes nothing. A published lease outlives the block:
    it ends when a reader acknowledges, at its deadline, or by :meth:`release`, whichever is first.
    """

    def __init__(self, pool: "Pool", slot: MappedSlot, length: int, since: float, deadline: float) -> None:
        self.buffer = slot.payload(length)
        self.handle: Handle | None = None
        self.slot = slot
        self.generation = slot.generation
        self.since = since
        self.deadline = deadline
        self._pool = pool

    def publish(
        self, refetch: str, *, dtype: str = "uint8", shape: tuple[int, ...] | None = None, check: Check = "sampled"
    ) -> Handle:
        """Make the payload readable and return its handle; ``buffer`` cannot be used after that.

        ``shape`` is in elements of ``dtype``, by default flat bytes. Raises ``ValueError`` if it is not the length, and
        ``BufferError`` while an array or a slice still uses ``buffer``; nothing is published then.
        """
        if self.handle is None:
            length = len(self.buffer)
            crc = checksum(self.buffer, check)
            shape = (length,) if shape is None else shape
            handle = Handle(self.slot.path, self.generation, length, check, crc, dtype, shape, refetch)
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
        return not self.slot.is_used

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
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
        TRIMMER.watch(self)

    def lease(self, length: int, *, seconds: float = LEASE_SECONDS) -> Lease:
        """Lend a slot for ``length`` bytes. A reader must begin within ``seconds``, at most an hour.

        Raises :class:`HandOverError` ``full`` if there is no room: the caller sends bytes instead.
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
        """Lease a slot, copy ``payload`` (any contiguous buffer) into it and publish it. Raises as these do."""
        flat = flat_bytes(payload)
        with self.lease(len(flat), seconds=seconds) as lease:
            lease.buffer[:] = flat
            lease.publish(refetch, dtype=dtype, shape=shape, check=check)
        return lease

    def put_all(self, items: Iterable[tuple[Any, str]], *, seconds: float = LEASE_SECONDS) -> list[Lease]:
        """Hand over all payloads, each with its re-fetch handle, or none: after a failure all leases are released."""
        leases: list[Lease] = []
        try:
            for payload, refetch in items:
                leases.append(self.put(payload, refetch, seconds=seconds))
        except BaseException:  # also KeyboardInterrupt: a lease without a reader would stay until its deadline
            for lease in leases:
                lease.release()
            raise
        return leases

    def collect(self) -> None:
        """Take back every slot whose lease and readers are done. :meth:`lease` does so when it needs a slot."""
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

    def trim_unused(self) -> None:
        """Remove slots that were idle since the last call. Idle slots count against the limit of all writers.

        A thread of the process calls it every 30 seconds.
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
            self._lent, self._idle = {}, {}
            self.lent_bytes = 0
            super().abandon()

    def _collect(self, now: float, enough: int | None) -> MappedSlot | None:
        """Take slots back, oldest lease first, until one of class ``enough`` is idle, and return that one."""
        abandoned, self._abandoned = self._abandoned, []
        for lease in abandoned:
            self._release(lease)
        for slot in list(self._lent.values()):
            if not slot.published:
                continue
            if not slot.is_whole:
                self._forget(slot)
            elif slot.is_over(now) and self._take_back(slot) and slot.class_bytes == enough:
                return slot
        return None

    def _slot_for(self, length: int, now: float) -> MappedSlot:
        """Return an idle slot of the class of ``length``, or a new one, for which other idle slots may be evicted."""
        if self._closed:
            raise HandOverError("full", "the pool is closed")
        wanted = slot_bytes(length)
        class_bytes, collected = wanted - PAGE_BYTES, None
        if not self._idle.get(class_bytes):
            collected = self._collect(now, class_bytes)
        if self.lent_bytes + wanted > self.mark_bytes:
            self._collect(now, None)
        if self.lent_bytes + wanted > self.mark_bytes:
            raise HandOverError("full", f"{self.lent_bytes} of {self.limit_bytes} bytes are lent, {wanted} are wanted")
        while idle := self._idle.get(class_bytes):
            slot = idle.pop()  # the last one used: its pages are the likeliest to be in a CPU cache
            if slot is collected or slot.is_whole:
                return slot
            self._forget(slot)
        return self._create(wanted)

    def _create(self, wanted: int) -> MappedSlot:
        idle = self._idle_slots()
        places = evictions([slot.size for slot in idle], self.limit_bytes - self.bytes, wanted)
        if places is None:
            raise HandOverError("full", f"{self.bytes} of {self.limit_bytes} bytes are in use, {wanted} are wanted")
        for place in places:
            self._remove(idle[place])
        self._budget.take(wanted)
        try:
            slot = MappedSlot(self._folder, self.name, f"{files.SLOT_PREFIX}{next(self._names):x}", wanted)
        except OSError as error:
            self._budget.give(wanted)
            raise HandOverError("full", f"no slot of {wanted} bytes: {error.strerror}") from error
        self.bytes += slot.size
        return slot

    def _publish(self, lease: Lease, handle: Handle) -> None:
        slot = lease.slot
        with self._mutex:
            if self._closed or slot.generation != lease.generation:
                raise HandOverError("gone", "the lease ended while it was written")
            if not lease.drop_buffer():
                raise BufferError("something still uses the buffer of this lease")
            slot.publish(
                Header(
                    pool=self.name,
                    name=slot.name,
                    generation=handle.generation,
                    since=lease.since,
                    deadline=lease.deadline,
                    length=handle.length,
                    check=handle.check,
                    checksum=handle.checksum,
                    dtype=handle.dtype,
                    shape=handle.shape,
                )
            )

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
        if not slot.try_lock():
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
        self._budget.give(slot.size)
        self.bytes -= slot.size
        slot.remove()

    def _forget(self, slot: MappedSlot) -> None:
        """Close a slot that another process has truncated or removed."""
        self.bytes -= slot.size
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


class Trimmer:
    """A thread that trims every pool of the process, because an idle pool gets no calls in which it could do so."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._pools: weakref.WeakSet[Pool] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    def watch(self, pool: Pool) -> None:
        """Trim ``pool`` for as long as it is referenced elsewhere."""
        with self._mutex:
            self._pools.add(pool)
            if self._thread is None or not self._thread.is_alive():  # the first pool, or a forked child
                self._thread = threading.Thread(target=self._run, name="mmrouter-pool-trimmer", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(TRIM_SECONDS)
            self._trim_all()

    def _trim_all(self) -> None:
        with self._mutex:
            pools = list(self._pools)
        for pool in pools:
            pool.trim_unused()


TRIMMER = Trimmer()
