"""The reader's side of leased slots: map a slot, lock it, check it against its handle, and read it in place."""

import contextlib
import mmap
import os
import threading
from collections import OrderedDict
from pathlib import Path

from mmrouter_handover.shm import files, slot_format
from mmrouter_handover.shm.slot_format import PAGE_BYTES, Handle, HandOverError

MAPPED_BYTES = 4 << 30
MADV_POPULATE_READ = 22


class View(contextlib.AbstractContextManager["View"]):
    """A payload that is being read: ``data`` is a flat, read-only view of bytes in the slot itself.

    The slot does not change until :meth:`release`. Arrays and slices of ``data`` must be gone by then.
    ``torch.frombuffer`` exports no visible buffer, so clone a tensor made by it before.
    """

    def __init__(self, reader: "Reader", slot: "_Slot", handle: Handle) -> None:
        self.handle = handle
        self.data = slot.payload(handle.length)
        self._reader = reader
        self._slot: _Slot | None = slot

    def release(self, *, acknowledge: bool = True) -> None:
        """Unlock the slot; ``acknowledge`` ends its lease, so that the writer may reuse it at once.

        Raises ``BufferError``, and keeps the slot, while something still uses ``data``. Repeated calls do nothing.
        """
        if self._slot is not None:
            self.data.release()
            self._reader._done(self._slot, self.handle.generation if acknowledge else 0)
            self._slot = None

    def __exit__(self, *_: object) -> None:
        self.release()


class _Slot:
    """An open, mapped slot file, and the number of its views, which share one lock."""

    def __init__(self, number: int, length: int) -> None:
        self.number = number
        self.size = slot_format.slot_bytes(length)
        self.views = 0
        try:
            require_size(os.fstat(number).st_size, length)
            self.map = mmap.mmap(number, self.size, access=mmap.ACCESS_READ)
            with contextlib.suppress(OSError):  # before Linux 5.14: pages are then mapped at the first read
                self.map.madvise(MADV_POPULATE_READ)
        except BaseException:  # also KeyboardInterrupt: the descriptor has no other owner
            os.close(number)
            raise

    def payload(self, length: int) -> memoryview:
        return memoryview(self.map)[PAGE_BYTES : PAGE_BYTES + length]

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # the mapping goes with its last user
            self.map.close()
        os.close(self.number)


class Reader(contextlib.AbstractContextManager["Reader"]):
    """Opens handles below ``root``. Caches mappings up to ``mapped_bytes``. Usable from several threads."""

    def __init__(self, root: str | Path, *, mapped_bytes: int = MAPPED_BYTES) -> None:
        self._root = os.open(root, files.FOLDER)
        self._mapped_bytes = mapped_bytes
        self._slots: OrderedDict[str, _Slot] = OrderedDict()
        self._mutex = threading.Lock()

    def open(self, handle: Handle) -> View:
        """Return the payload of a handle, locked and verified. Raises :class:`HandOverError`."""
        with self._mutex:
            slot = self._slots.get(handle.path) or self._add(handle)
            if not slot.views and not files.lock(slot.number, exclusive=False):
                raise HandOverError("stale", "the slot is being written or removed")
            slot.views += 1
            try:
                self._require(slot, handle)
                view = View(self, slot, handle)
            except BaseException:  # also KeyboardInterrupt: no other code would drop the lock
                self._leave(slot)
                raise
            self._slots.move_to_end(handle.path)
            return view

    def close(self) -> None:
        """Close all mappings. Call it when no view is in use."""
        with self._mutex:
            for slot in self._slots.values():
                slot.close()
            self._slots.clear()
            if self._root >= 0:
                os.close(self._root)
                self._root = -1

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def _require(slot: _Slot, handle: Handle) -> None:
        require_size(slot.map.size(), handle.length)
        page = slot_format.decode_page(slot.map[: slot_format.HEADER_BYTES])
        header, generation = page.header, page.header.generation
        if handle.generation != generation or page.written != generation or page.released == generation:
            raise HandOverError("stale", f"generation {handle.generation} is over, the slot is at {generation}")
        path = f"{header.pool}/{header.name}"
        if (path, header.length, header.checksum) != (handle.path, handle.length, handle.checksum):
            raise HandOverError("corrupt", "the slot's header does not match the handle")
        with slot.payload(handle.length) as payload:
            if slot_format.checksum(payload) != handle.checksum:
                raise HandOverError("corrupt", "the payload's checksum differs")

    def _done(self, slot: _Slot, generation: int) -> None:
        with self._mutex:
            if slot.views == 1 and files.is_exported(slot.map):
                raise BufferError("something still uses the data of this view, or of another one of its slot")
            if generation:
                # Before unlocking: the writer cannot have reused the slot yet.
                os.pwrite(slot.number, slot_format.GENERATION.pack(generation), slot_format.ACKED_AT)
            self._leave(slot)

    @staticmethod
    def _leave(slot: _Slot) -> None:
        slot.views -= 1
        if not slot.views:
            files.unlock(slot.number)

    def _add(self, handle: Handle) -> _Slot:
        total = sum(slot.size for slot in self._slots.values())
        for path, slot in list(self._slots.items()):  # those of removed slots, and the oldest ones above the bound
            if not slot.views and (total > self._mapped_bytes or not slot.map.size()):
                total -= slot.size
                slot.close()
                del self._slots[path]
        try:
            slot = _Slot(files.open_slot(self._root, handle.path), handle.length)
        except OSError as error:
            raise HandOverError("refused", f"{handle.path} cannot be mapped: {error.strerror}") from error
        self._slots[handle.path] = slot
        return slot


def require_size(size: int, length: int) -> None:
    """Raise :class:`HandOverError` unless a file has the size of a slot for ``length`` bytes; 0 means removed."""
    if not size:
        raise HandOverError("gone", "the slot was removed")
    if size < slot_format.slot_bytes(length):
        raise HandOverError("truncated", f"a slot of {size} bytes for a payload of {length}")
    if size > slot_format.slot_bytes(length):
        raise HandOverError("refused", f"a slot of {size} bytes is none for a payload of {length}")
