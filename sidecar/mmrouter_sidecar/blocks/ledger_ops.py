"""Operations on the ledger, from which the journal rebuilds it."""

from typing import NamedTuple

import msgspec
from msgspec import structs

from mmrouter_lib.cache_layout import CacheGroup


class Place(NamedTuple):
    """A data parallel rank, cache group and medium."""

    rank: int
    group: int
    medium: str


class LedgerOp(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One operation on the ledger; replaying all of them rebuilds it. Hashes and keys are packed 8-byte numbers.

    ``add``: add a copy of each hash with its key. ``aside``: add a copy of each without a key. ``join``: parts of
    one block, the last of which gets its key while all are held. ``drop``: remove a copy of each. ``clear``: clear the
    whole rank. ``resize``: set the block size of a place and put its blocks aside. ``group``: set a cache group.
    ``known``: keys and digests of followed blocks without full attention, held or not.
    """

    kind: str
    rank: int
    group: int = 0
    medium: str = ""
    hashes: bytes = b""
    keys: bytes = b""
    block_size: int = 0
    shareable: bool = False
    spec: str = ""  # the group's kind
    window: int = 0  # tokens
    digests: bytes = b""
    parts: bool = False  # of the group
    lookahead: int = 0  # of the group, in tokens


def group_op(group: CacheGroup) -> LedgerOp:
    number, kind, window, size, parts, lookahead = structs.astuple(group)
    return LedgerOp("group", 0, number, block_size=size, spec=kind, window=window, parts=parts, lookahead=lookahead)
