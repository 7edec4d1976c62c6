"""Hand-over of large payloads between processes of one node, through leased files on a shared tmpfs (docs/transfer.md).

A writer has a :class:`Pool`, a reader a :class:`Reader`; what travels between them is a :class:`Handle`, small values
that fit into JSON. For a reader that knows nothing of this package a writer has :class:`Plains`: ordinary files.
Whatever goes wrong is a :class:`HandOverError` with a reason, and the caller falls back to what the handle's
``refetch`` names. A janitor calls :func:`reclaim` and :func:`ledger`.

The package needs Python 3.10, Linux and msgspec, and nothing else: it also runs inside the images of engines.
"""

from mmrouter_handover.shm.handles import DTYPES, Handle, HandOverError, Reason, read_handle
from mmrouter_handover.shm.ledger import Entry, Ledger, ledger
from mmrouter_handover.shm.plain_files import PlainFile, Plains
from mmrouter_handover.shm.pool import Lease, Pool
from mmrouter_handover.shm.reader import Reader, View
from mmrouter_handover.shm.reclaim import Reclaimed, reclaim

__all__ = [
    "DTYPES",
    "Entry",
    "HandOverError",
    "Handle",
    "Lease",
    "Ledger",
    "PlainFile",
    "Plains",
    "Pool",
    "Reader",
    "Reason",
    "Reclaimed",
    "View",
    "ledger",
    "read_handle",
    "reclaim",
]
