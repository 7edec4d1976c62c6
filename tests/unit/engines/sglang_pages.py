"""SGLang's chain of page hashes, recomputed (docs/engine-facts/sglang.md#block-hash-chain).

Pages are chained over whole SHA-256 digests, of which 64 bits are published.
"""

import hashlib
import sys
from array import array
from collections.abc import Sequence

_SALT_TAG = b"sglang-cache-salt-v1\0"
_U32 = (1 << 32) - 1


def salt_root(cache_salt: str | None) -> bytes:
    """Return the root of a prompt's chain: nothing, or the digest of the cache salt."""
    return b"" if cache_salt is None else hashlib.sha256(_SALT_TAG + cache_salt.encode()).digest()


def page_digest(page: Sequence[int], prior: bytes) -> bytes:
    """Return a page's whole digest. ``prior`` is the digest of the page before, or the root of the chain.

    A page with any id above 32 bits is hashed as a mark and 64-bit words, every other as 32-bit words.
    """
    wide = any(token > _U32 for token in page)
    words = array("Q" if wide else "I", page)
    if sys.byteorder == "big":
        words.byteswap()
    return hashlib.sha256(prior + (b"\xff" if wide else b"") + words.tobytes()).digest()


def page_hashes(ids: Sequence[int], page_size: int, *, cache_salt: str | None = None) -> "array[int]":
    """Return the published hashes of a prompt's complete pages, as unsigned 64-bit numbers.

    The engine sends the same 64 bits as a signed number (default event format).
    Raises ``ValueError`` for a page size below 1.
    """
    if page_size < 1:
        raise ValueError(f"page size must be at least 1, not {page_size}")
    hashes = array("Q")
    prior = salt_root(cache_salt)
    for start in range(0, len(ids) - page_size + 1, page_size):
        prior = page_digest(ids[start : start + page_size], prior)
        hashes.append(int.from_bytes(prior[:8], "big"))
    return hashes
