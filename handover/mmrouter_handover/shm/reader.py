"""The reader's side: a payload where it lies, for as long as it is held."""

import contextlib
import mmap
import os
import threading
from collections import OrderedDict
from pathlib import Path

from mmrouter_handover.shm import files
from mmrouter_handover.shm.checksum import checksum
from mmrouter_handover.shm.handles import Handle, HandOverError
from mmrouter_handover.shm.slot import ACKED_AT, GENERATION, Page, decode_page
from mmrouter_handover.shm.slot_sizes import HEADER_BYTES, PAGE_BYTES, slot_bytes

MAPPED_BYTES = 4 << 30
MADV_POPULATE_READ = 22


class View:
    """A payload that is being read: ``data`` is flat, of bytes and read-only, and lies in the slot itself.

    The slot stays as it is until :meth:`release`. What keeps the buffer of ``data`` (a numpy array, a slice) must be
    gone by then; ``torch.frombuffer`` keeps no hold that could be seen, so a tensor made by it is to be cloned before.
    """

    def __init__(self, reader: "Reader", slot: "_Slot", handle: Handle) -> None:
        self.handle = handle
        self.data = slot.payload(handle.length)
        self._reader = reader
        self._slot: _Slot | None = slot

    def release(self, *, acknowledge: bool = True) -> None:
        """Let the slot go; ``acknowledge`` says that nobody will read it again, so the writer may use it at once.

        Raises ``BufferError``, and holds on to the slot, while something still uses ``data``. Again, it does nothing.
        """
        if self._slot is not None:
            self.data.release()
            self._reader._done(self._slot, self.handle.generation if acknowledge else 0)
            self._slot = None

    def __enter__(self) -> "View":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class _Slot:
    """An open file with its mapping, and how many views of it there are: the shared lock is theirs together."""

    def __init__(self, number: int, length: int) -> None:
        """Map the file of a slot for ``length`` bytes. Raises :class:`HandOverError` and ``OSError``."""
        self.number = number
        self.size = slot_bytes(length)
        self.views = 0
        try:
            require_size(os.fstat(number).st_size, length)
            self.map = mmap.mmap(number, self.size, access=mmap.ACCESS_READ)
            with contextlib.suppress(OSError):  # before Linux 5.14: then the pages are looked up at the first reading
                self.map.madvise(MADV_POPULATE_READ)
        except BaseException:  # whatever it is, nobody else has the descriptor
            os.close(number)
            raise

    def payload(self, length: int) -> memoryview:
        return memoryview(self.map)[PAGE_BYTES : PAGE_BYTES + length]

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # it goes with the last that uses it
            self.map.close()
        os.close(self.number)


class Reader:
    """Opens handles below ``root``. Mappings are kept, up to ``mapped_bytes``. Usable from several threads."""

    def __init__(self, root: str | Path, *, mapped_bytes: int = MAPPED_BYTES) -> None:
        """Open the root. Raises ``OSError``."""
        self._root = os.open(root, files.FOLDER)
        self._mapped_bytes = mapped_bytes
        self._slots: OrderedDict[str, _Slot] = OrderedDict()
        self._mutex = threading.Lock()

    def open(self, handle: Handle) -> View:
        """Return the payload of a handle, locked and compared with it. Raises :class:`HandOverError`."""
        with self._mutex:
            slot = self._slots.get(handle.path) or self._add(handle)
            if not slot.views and not files.lock(slot.number, exclusive=False):
                raise HandOverError("stale", "the slot is being written or removed")
            slot.views += 1
            try:
                self._require(slot, handle)
                view = View(self, slot, handle)
            except BaseException:  # whatever it is, nobody else would drop the lock
                self._leave(slot)
                raise
            self._slots.move_to_end(handle.path)
            return view

    def sweep(self) -> None:
        """Forget mappings of slots that are no more, and the oldest above the bound."""
        with self._mutex:
            self._sweep()

    def close(self) -> None:
        """Forget all mappings and end all views: to be called when none is in use."""
        with self._mutex:
            for slot in self._slots.values():
                slot.close()
            self._slots.clear()
            if self._root >= 0:
                os.close(self._root)
                self._root = -1

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def _require(slot: _Slot, handle: Handle) -> None:
        """Raise unless the slot, which is locked, holds what the handle says."""
        require_size(slot.map.size(), handle.length)
        page = decode_page(slot.map[:HEADER_BYTES])
        require_same(page, handle)
        with slot.payload(handle.length) as payload:
            if checksum(payload, handle.check) != handle.checksum:
                raise HandOverError("corrupt", "the payload's checksum differs")

    def _done(self, slot: _Slot, generation: int) -> None:
        with self._mutex:
            if slot.views == 1 and files.is_exported(slot.map):
                raise BufferError("something still uses the data of this view, or of another one of its slot")
            if generation:
                # Before the lock goes: nobody can have begun to use the slot for something else.
                os.pwrite(slot.number, GENERATION.pack(generation), ACKED_AT)
            self._leave(slot)

    @staticmethod
    def _leave(slot: _Slot) -> None:
        slot.views -= 1
        if not slot.views:
            files.unlock(slot.number)

    def _add(self, handle: Handle) -> _Slot:
        self._sweep()
        try:
            slot = _Slot(files.open_slot(self._root, handle.path), handle.length)
        except OSError as error:
            raise HandOverError("refused", f"{handle.path} cannot be mapped: {error.strerror}") from error
        self._slots[handle.path] = slot
        return slot

    def _sweep(self) -> None:
        total = sum(slot.size for slot in self._slots.values())
        for path, slot in list(self._slots.items()):
            if not slot.views and (total > self._mapped_bytes or not slot.map.size()):
                total -= slot.size
                slot.close()
                del self._slots[path]


def require_size(size: int, length: int) -> None:
    """Raise :class:`HandOverError` unless a file has the size of a slot for ``length`` bytes; 0 is a removed one."""
    if not size:
        raise HandOverError("gone", "the slot was removed")
    if size < slot_bytes(length):
        raise HandOverError("truncated", f"a slot of {size} bytes for a payload of {length}")
    if size > slot_bytes(length):
        raise HandOverError("refused", f"a slot of {size} bytes is none for a payload of {length}")


def require_same(page: Page, handle: Handle) -> None:
    """Raise :class:`HandOverError` unless a page is the one that a handle names."""
    header = page.header
    if (
        handle.generation != header.generation
        or page.written != header.generation
        or page.released == header.generation
    ):
        raise HandOverError("stale", f"generation {handle.generation} is over, the slot is at {header.generation}")
    said = (f"{header.pool}/{header.name}", header.length, header.check, header.checksum, header.dtype, header.shape)
    if said != (handle.path, handle.length, handle.check, handle.checksum, handle.dtype, handle.shape):
        raise HandOverError("corrupt", "the slot's header is not what the handle says")
