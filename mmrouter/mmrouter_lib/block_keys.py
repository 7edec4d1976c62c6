"""Block keys: token ids and image spans -> the chained 64-bit keys of complete blocks.

    key[i] = XXH3_64(ids of block i, little-endian || extras of block i, seed = key[i-1])
    key[-1] = namespace seed (model, revision, LoRA, salt; keyed per deployment)
    extras  = identity (32 bytes) || span start - block start (i64, little-endian), per overlapping span in prompt order
              || ids of the *lookahead*: as many tokens after the block as the engine's hashes cover, mostly none

The ids of a block have a fixed length, so ids and extras cannot be mistaken for each other. The relative start is
negative in the blocks that a span continues into: the same image one token further right is another block, as for the
engine (docs/engine-facts/vllm.md#image-keys-in-events). Incomplete tails are not blocks. With a lookahead a span that
starts within it belongs to the block too, and a block without its whole lookahead has no key
(docs/engine-facts/vllm.md#lookahead-hashes).

Token ids are u32 (``array('I')``) or, where an engine puts 62-bit sentinels into the ids, u64 (``array('Q')``) buffers.
"""

import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from blake3 import blake3
from xxhash import xxh3_64_intdigest

from mmrouter_lib import native

Key = int  # a block key: unsigned 64 bit


@dataclass(frozen=True, slots=True)
class Span:
    """Position of one image's placeholder tokens in the expanded prompt: offset and length in tokens.

    ``row``: the tokens of a row where these are rows with one other token behind each, else 0.
    """

    offset: int
    length: int
    identity: bytes
    row: int = 0

    @property
    def end(self) -> int:
        return self.offset + self.length

    @property
    def run(self) -> int:
        """Placeholders of the image that stand side by side."""
        return self.row or self.length

    @property
    def starts(self) -> range:
        """Where each of its runs begins."""
        return range(self.offset, self.end, self.row + 1 if self.row else max(1, self.length))


def namespace_seed(
    key: bytes, *, model: str, revision: str = "", lora: str | None = None, salt: str | None = None
) -> Key:
    """Return the seed of a chain: a 64-bit keyed BLAKE3 of the namespace that applies to the whole request.

    An absent LoRA or salt equals an empty one. Fields are length-prefixed, so a LoRA never equals a salt of the same
    text.
    """
    hasher = blake3(key=key)
    for field in ("namespace", model, revision, lora or "", salt or ""):
        raw = field.encode()
        hasher.update(len(raw).to_bytes(8, "little") + raw)
    return int.from_bytes(hasher.digest(8), "little")


def span_extra(identity: bytes, relative_start: int) -> bytes:
    """Return the extras of one overlapping span: identity, then span start - block start."""
    return identity + relative_start.to_bytes(8, "little", signed=True)


def block_extras(spans: Sequence[Span], block_size: int, blocks: int, lookahead: int = 0) -> dict[int, bytes]:
    """Return block number -> extras of the spans that overlap it or its ``lookahead``, for the first ``blocks``."""
    extras: dict[int, bytes] = {}
    for span in sorted(spans, key=lambda s: s.offset):
        if span.length <= 0:
            raise ValueError(f"span at {span.offset} has length {span.length}: a span holds at least one token")
        first, last = max(0, span.offset - lookahead) // block_size, (span.end - 1) // block_size
        for number in range(first, min(last + 1, blocks)):
            extra = span_extra(span.identity, span.offset - number * block_size)
            extras[number] = extras.get(number, b"") + extra
    return extras


def block_keys(
    ids: "array[int]", block_size: int, spans: Sequence[Span], seed: Key, lookahead: int = 0
) -> "array[int]":
    """Return the keys of a prompt's complete blocks, each with the ``lookahead`` tokens after it.

    Raises ``ValueError`` for a block size or span below 1.
    """
    if block_size < 1:
        raise ValueError(f"block size must be at least 1, not {block_size}")
    blocks = max(0, len(ids) - lookahead) // block_size
    extras = block_extras(spans, block_size, blocks, lookahead)
    if lookahead:
        ends = range(block_size, (blocks + 1) * block_size, block_size)
        extras = with_lookahead(extras, [ids[end : end + lookahead] for end in ends])
    return chain(ids, block_size, blocks, extras, seed)


def with_lookahead(extras: Mapping[int, bytes], ahead: Iterable["array[int]"]) -> dict[int, bytes]:
    """Return extras of successive blocks with the ids of the tokens after each."""
    return {number: extras.get(number, b"") + ids.tobytes() for number, ids in enumerate(ahead)}


def chain(ids: "array[int]", block_size: int, blocks: int, extras: dict[int, bytes], parent: Key) -> "array[int]":
    """Continue a chain over ``blocks`` blocks of ``ids``, beginning after the block whose key is ``parent``.

    ``extras`` maps a block number (counted from this buffer's first block) to its extras. Both the router's prediction
    from a whole prompt and the sidecar's keys of an engine event are computed here.
    Raises ``ValueError`` when ``ids`` is shorter than its blocks.
    """
    if blocks * block_size > len(ids):
        raise ValueError(f"{len(ids)} ids do not hold {blocks} blocks of {block_size}")
    if native.chain is not None and (keys := native.chain(ids, block_size, blocks, extras, parent)) is not None:
        return array("Q", keys)
    return python_chain(ids, block_size, blocks, extras, parent)


def python_chain(
    ids: "array[int]", block_size: int, blocks: int, extras: dict[int, bytes], parent: Key
) -> "array[int]":
    """The reference implementation, used where :mod:`mmrouter_lib.native` has none."""
    if blocks == 1 and not extras:  # the usual event while an engine decodes
        return array("Q", (xxh3_64_intdigest(ids if len(ids) == block_size else ids[:block_size], parent),))
    # One call cuts the buffer into all its blocks: a slice per block costs as much as its hash. The Struct bypasses the
    # module's cache of formats, which would keep one for every prompt length.
    cut: Sequence[bytes] = struct.Struct(f"{block_size * ids.itemsize}s" * blocks).unpack_from(ids)
    if extras:
        plain = cut
        cut = list(plain)
        for number, extra in extras.items():
            cut[number] = plain[number] + extra
    digest = xxh3_64_intdigest
    key = parent
    return array("Q", [key := digest(block, key) for block in cut])


def pack_keys(keys: Iterable[Key]) -> bytes:
    """Return keys as 8 little-endian bytes each, as in feed frames."""
    packed = keys if isinstance(keys, array) and keys.typecode == "Q" else array("Q", keys)
    if sys.byteorder == "big":
        packed = array("Q", packed)
        packed.byteswap()
    return packed.tobytes()


def unpack_keys(raw: bytes) -> "array[int]":
    """Return the keys of :func:`pack_keys`. Raises ``ValueError`` when the length is no multiple of 8."""
    keys = array("Q", raw)
    if sys.byteorder == "big":
        keys.byteswap()
    return keys
