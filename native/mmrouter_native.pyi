from collections.abc import Mapping

from typing_extensions import Buffer

REVISION: int
__version__: str

def chain(ids: Buffer, block_size: int, blocks: int, extras: Mapping[int, bytes], parent: int, /) -> bytes | None: ...
def pack_token_ids(payload: bytes, width: int, /) -> bytes | None: ...
