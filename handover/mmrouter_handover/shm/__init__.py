"""Hand over large payloads between processes of one node, through leased files on a shared tmpfs (docs/transfer.md).

A writer has a :class:`Pool`, a reader a :class:`Reader`; a :class:`Handle`, a few values that fit into JSON, is sent
from one to the other. For readers without this package, a writer has :class:`PlainFiles`. Every failure is a
:class:`HandOverError` with a reason, and the caller falls back to the handle's ``refetch``. A janitor calls
:func:`reclaim` and :func:`ledger`.

The package needs only Python 3.10, Linux and msgspec, because it also runs inside the images of engines.
"""

from mmrouter_handover.shm.janitor import Entry as Entry
from mmrouter_handover.shm.janitor import Ledger as Ledger
from mmrouter_handover.shm.janitor import Reclaimed as Reclaimed
from mmrouter_handover.shm.janitor import ledger as ledger
from mmrouter_handover.shm.janitor import reclaim as reclaim
from mmrouter_handover.shm.pool import Lease as Lease
from mmrouter_handover.shm.pool import Pool as Pool
from mmrouter_handover.shm.reader import Reader as Reader
from mmrouter_handover.shm.reader import View as View
from mmrouter_handover.shm.slot_format import Handle as Handle
from mmrouter_handover.shm.slot_format import HandOverError as HandOverError
from mmrouter_handover.shm.slot_format import Reason as Reason
from mmrouter_handover.shm.slot_format import read_handle as read_handle
from mmrouter_handover.shm.writer_folder import PlainFile as PlainFile
from mmrouter_handover.shm.writer_folder import PlainFiles as PlainFiles
