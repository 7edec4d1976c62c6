"""Checksums that do not cost a pass over the payload."""

import zlib

from mmrouter_handover.shm.handles import Check

SMALL_BYTES = 1 << 16
STRIDE_WORDS = 8191
"""8-byte words from one sample to the next: a little less than sixteen pages, so the place in the page wanders."""
EDGE_BYTES = 64


def checksum(payload: memoryview, check: Check) -> int:
    """Return CRC-32 over every byte (``full``, and always up to 64 KiB), or over one word in 64 KiB and the last bytes.

    ``payload`` is flat and of bytes. The full sum finds any change of up to four adjacent bytes, and others with a
    probability of 1 - 2**-32. The sampled one finds another payload, one that is half overwritten, any 64 KiB that were
    exchanged, and a length that is not the writer's. A few changed bytes it mostly does not find. It is the second
    proof: the first ones that a slot still holds what its handle names are its generation and the lock of its reader.
    """
    if check == "full" or len(payload) <= SMALL_BYTES:
        return zlib.crc32(payload)
    whole = len(payload) & ~7
    sampled = zlib.crc32(payload[:whole].cast("Q")[::STRIDE_WORDS].tobytes(), len(payload) & 0xFFFFFFFF)
    return zlib.crc32(payload[-EDGE_BYTES:], sampled)
