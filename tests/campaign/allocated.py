"""How many bytes this process has allocated: a leak is in it, and what the allocators keep of freed memory is not.

Resident memory of a process that reads bodies of 64 MiB differs by hundreds of MiB from one moment to another.
"""

import ctypes
import gc
import sys

import psutil

PYTHON_BLOCK = 64  # bytes of one of Python's own blocks, which have at most 512
_FIELDS = "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"


class _Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS)


def allocated() -> int:
    """Return the allocated bytes of all threads: glibc's, and an estimate of Python's small objects by their number.

    With another C library, and with glibc before 2.33, the resident bytes.
    """
    gc.collect()
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return int(psutil.Process().memory_info().rss)
    mallinfo.restype = _Mallinfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd + PYTHON_BLOCK * sys.getallocatedblocks())
