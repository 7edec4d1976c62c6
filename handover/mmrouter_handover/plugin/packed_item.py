"""Pack a processed image into one run of bytes, without pickle or any reference to code.

::

    8 bytes   length of the header, little-endian
    header    msgpack of :class:`Header`
    padding   to a multiple of 64
    tensors   each at a multiple of 64

A tensor is its dtype, its shape and a buffer, so the module needs neither torch nor vLLM.
"""

import math
import struct
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from mmrouter_handover.plugin import WIRE_VERSION
from mmrouter_handover.plugin.wire import HandOverFailed
from mmrouter_handover.shm import DTYPES

ALIGNMENT = 64
MAX_HEADER_BYTES = 16 << 20
MAX_DEPTH = 4
_LENGTH = struct.Struct("<Q")

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 48))]


class Tensor(msgspec.Struct, frozen=True):
    """Place of a tensor; ``offset`` is from the begin of the tensors, ``shape`` in elements of ``dtype``."""

    dtype: str
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=16)]
    offset: Count

    @property
    def length(self) -> int:
        """Size in bytes. Raises :class:`HandOverFailed` for an unsupported dtype."""
        if self.dtype not in DTYPES:
            raise HandOverFailed("refused", f"dtype {self.dtype[:40]!r}")
        return math.prod(self.shape) * DTYPES[self.dtype]


class Node(msgspec.Struct, frozen=True):
    """Value of a field: one tensor, one number, nothing, or a list of these."""

    tensor: Tensor | None = None
    number: int | float | bool | None = None
    nodes: "list[Node] | None" = None


class Field(msgspec.Struct, frozen=True):
    """One keyword argument of the model, and how vLLM batches it across images."""

    name: str
    kind: Literal["batched", "flat", "shared"]
    node: Node
    keep_on_cpu: bool = False
    dim: int = 0
    batch_size: int = 1


class PromptUpdate(msgspec.Struct, frozen=True):
    """Expansion of an image in a prompt: ``target`` is replaced by, or followed by, ``full``.

    ``mask`` has a byte for each id of ``full``: whether it is an embedding. ``None``: all are.
    """

    mode: Literal["insert", "replace"]
    target: list[int]
    full: list[int]
    mask: bytes | None = None


class Header(msgspec.Struct, frozen=True):
    """``settings`` is equal for servers that process alike; ``length`` is that of all tensors with their padding."""

    version: int
    settings: str
    name: str
    modality: str
    fields: list[Field]
    updates: list[PromptUpdate]
    length: Count


class PackedItem:
    """A packed item of ``length`` bytes; :meth:`write` copies it to its destination."""

    def __init__(self, header: Header, buffers: list[tuple[int, memoryview]]) -> None:
        encoded = msgspec.msgpack.encode(header)
        self._head = _LENGTH.pack(len(encoded)) + encoded
        self._begin = aligned(len(self._head))
        self._buffers = buffers
        self.length = self._begin + header.length

    def write(self, target: memoryview) -> None:
        """Write the item to ``target``, flat and of bytes, at least ``length`` of them."""
        end = len(self._head)
        target[:end] = self._head
        target[end : self._begin] = bytes(self._begin - end)
        end = self._begin
        for offset, data in self._buffers:
            at = self._begin + offset
            target[end:at] = bytes(at - end)  # clear what the destination held before
            end = at + len(data)
            target[at:end] = data
        target[end : self.length] = bytes(self.length - end)


class Packer:
    """Collects the tensors of an item while its fields are built."""

    def __init__(self) -> None:
        self._buffers: list[tuple[int, memoryview]] = []
        self._length = 0

    def tensor(self, dtype: str, shape: tuple[int, ...], data: memoryview) -> Node:
        """Add a tensor. ``data`` is flat, of bytes, and must not change until the item is written."""
        placed = Tensor(dtype, shape, self._length)
        if placed.length != len(data):
            raise HandOverFailed("refused", f"{dtype} of shape {shape} is not {len(data)} bytes")
        self._buffers.append((self._length, data))
        self._length = aligned(self._length + len(data))
        return Node(tensor=placed)

    def pack(
        self, settings: str, name: str, modality: str, fields: list[Field], updates: list[PromptUpdate]
    ) -> PackedItem:
        header = Header(WIRE_VERSION, settings, name, modality, fields, updates, self._length)
        return PackedItem(header, self._buffers)


def read_header(packed: memoryview, *, name: str, settings: str) -> tuple[Header, memoryview]:
    """Return the verified header of a packed item, and a view of its tensors.

    Raises :class:`HandOverFailed`: ``truncated`` or ``refused`` if it is not a valid packed item of ``name``,
    ``settings`` if it was processed with other settings.
    """
    if len(packed) < _LENGTH.size:
        raise HandOverFailed("truncated", f"an item of {len(packed)} bytes")
    (length,) = _LENGTH.unpack(packed[: _LENGTH.size])
    if length > min(MAX_HEADER_BYTES, len(packed) - _LENGTH.size):
        raise HandOverFailed("truncated", f"a header of {length} bytes in an item of {len(packed)}")
    try:
        header = msgspec.msgpack.decode(packed[_LENGTH.size : _LENGTH.size + length], type=Header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise HandOverFailed("refused", f"not a packed item: {error}") from error
    if header.version != WIRE_VERSION:
        raise HandOverFailed("refused", f"an item of version {header.version}, not {WIRE_VERSION}")
    if header.name != name:
        raise HandOverFailed("refused", f"the item is {header.name[:80]!r}, not {name[:80]!r}")
    if header.settings != settings:
        raise HandOverFailed("settings", "the image was processed with other settings")
    begin = aligned(_LENGTH.size + length)
    if len(packed) != begin + header.length:
        raise HandOverFailed("truncated", f"{len(packed) - begin} bytes of tensors, not {header.length}")
    for field in header.fields:
        for tensor in _tensors(field.node, 0):
            if tensor.offset % ALIGNMENT or tensor.offset + tensor.length > header.length:
                raise HandOverFailed("refused", f"a tensor at {tensor.offset}+{tensor.length} of {header.length}")
    for update in header.updates:
        if update.mask is not None and len(update.mask) != len(update.full):
            raise HandOverFailed("refused", f"a mask of {len(update.mask)} for {len(update.full)} ids")
    return header, packed[begin:]  # last, because a traceback would keep a reference to it


def aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def _tensors(node: Node, depth: int) -> Iterator[Tensor]:
    if depth > MAX_DEPTH:
        raise HandOverFailed("refused", "lists are nested too deeply")
    if node.tensor is not None:
        yield node.tensor
    for inner in node.nodes or ():
        yield from _tensors(inner, depth + 1)


def unpack_node(node: Node, tensor: Any) -> Any:
    """Return the value of a node; ``tensor`` converts each :class:`Tensor`."""
    if node.tensor is not None:
        return tensor(node.tensor)
    if node.nodes is not None:
        return [unpack_node(inner, tensor) for inner in node.nodes]
    return node.number
