"""Hand over large payloads between processes of one node, through leased files on a shared tmpfs (docs/transfer.md).

A writer has a :class:`Pool`, a reader a :class:`Reader`; a :class:`Handle`, a few values that fit into JSON, is sent
from one to the other. For readers without this package, a writer has :class:`PlainFiles`. Every failure is a
:class:`HandOverError` with a reason, and the caller falls back to the handle's ``refetch``. A janitor calls
:func:`reclaim` and :func:`ledger`.

The package needs only Python 3.10, Linux and msgspec, because it also runs inside the images of engines.
"""

from mmrouter_handover.shm.janitor import Entry, Ledger, Reclaimed, ledger, reclaim
from mmrouter_handover.shm.pool import Lease, Pool
from mmrouter_handover.shm.reader import Reader, View
from mmrouter_handover.shm.slot_format import DTYPES, Handle, HandOverError, Reason, read_handle
from mmrouter_handover.shm.writer_folder import PlainFile, PlainFiles

__all__ = [
    "DTYPES",
    "Entry",
    "HandOverError",
    "Handle",
    "Lease",
    "Ledger",
    "PlainFile",
    "PlainFiles",
    "Pool",
    "Reader",
    "Reason",
    "Reclaimed",
    "View",
    "ledger",
    "read_handle",
    "reclaim",
]
