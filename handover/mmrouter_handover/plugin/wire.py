"""Bodies of the plugin's routes, and images packed into bytes without pickle or any reference to code.

``mmrouter_lib.engines.vllm.plugin_api`` is the router's side of the routes. A packed item is

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
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from mmrouter_handover.plugin import PROVED_RELEASES, WIRE_VERSION
from mmrouter_handover.shm import HandOverError

STATUS_PATH = "/v1/mmrouter/handover"
RENDER_PATH = "/v1/mmrouter/render"
ITEMS_PATH = "/v1/mmrouter/items"
RELEASE_PATH = "/v1/mmrouter/release"

Way = Literal["shm", "nixl", "inline"]
WAYS: tuple[Way, ...] = ("shm", "nixl", "inline")
MAX_SECONDS = 600.0
_DTYPES_BY_SIZE = {
    1: ("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"),
    2: ("uint16", "int16", "float16", "bfloat16"),
    4: ("uint32", "int32", "float32"),
    8: ("uint64", "int64", "float64"),
}
DTYPES = {name: size for size, names in _DTYPES_BY_SIZE.items() for name in names}
"""Names of element types that may be handed over, and their sizes in bytes."""

Seconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)]
Length = Annotated[int, msgspec.Meta(ge=0, le=(1 << 40))]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]

T = TypeVar("T")
ALIGNMENT = 64
MAX_HEADER_BYTES = 16 << 20
MAX_DEPTH = 4
_LENGTH = struct.Struct("<Q")
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 48))]


class RenderRequest(msgspec.Struct):
    """``chat`` is passed to vLLM unchanged. ``images``: names to offer, ``None`` for all."""

    chat: msgspec.Raw
    ways: list[Way]
    seconds: Seconds
    images: list[Name] | None = None
    inline_bytes: Length = 0


class Shm(msgspec.Struct, frozen=True, tag="shm", tag_field="way"):
    """A packed item in a slot of the node's shared tmpfs; ``handle`` is one of ``mmrouter_handover.shm``."""

    length: Length
    handle: dict[str, Any]


class Inline(msgspec.Struct, frozen=True, tag="inline", tag_field="way"):
    """A packed item in the request itself, in base64."""

    length: Length
    data: bytes


class Nixl(msgspec.Struct, frozen=True, tag="nixl", tag_field="way"):
    """A packed item in registered memory of a NIXL agent.

    ``generation`` is stored in eight bytes at ``address``, the item ``HEAD_BYTES`` after it. The generation is zeroed
    before the memory is reused, so a reader that finds it unchanged after its read has read the item.
    """

    length: Length
    agent: Name
    metadata: bytes
    address: Annotated[int, msgspec.Meta(ge=0)]
    generation: Annotated[int, msgspec.Meta(ge=1)]
    checksum: int


Offer = Shm | Inline | Nixl


class ItemsRequest(msgspec.Struct):
    """Offers by name; each fetched item is kept for ``seconds`` at most."""

    items: dict[Name, Offer]
    seconds: Seconds


class ReleaseRequest(msgspec.Struct):
    lease: str


class Rendered(msgspec.Struct):
    """``token_ids`` and ``features`` are those of vLLM's own answer."""

    token_ids: list[int]
    features: Any
    lease: str
    offers: dict[str, Offer]
    withheld: dict[str, str]
    fell: list[tuple[str, str]]


class Taken(msgspec.Struct):
    held: list[str]
    refused: dict[str, str]


class Released(msgspec.Struct):
    released: int


class Status(msgspec.Struct):
    """``ways``: way -> reason why it is not offered, or empty. ``counts`` is for people and tests.

    ``releases``: of vLLM, with which the plugin was proved.
    """

    role: str
    enabled: bool
    reason: str
    engine: str
    settings: str
    node: str
    ways: dict[str, str]
    counts: dict[str, int]
    version: int = WIRE_VERSION
    releases: tuple[str, ...] = PROVED_RELEASES


def read(raw: bytes, kind: type[T]) -> T:
    """Return a decoded body. Raises ``ValueError`` that says why it cannot be read."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def error(status: int, message: str) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": "mmrouter", "param": None, "code": status}})


class Tensor(msgspec.Struct, frozen=True):
    """Place of a tensor; ``offset`` is from the begin of the tensors, ``shape`` in elements of ``dtype``."""

    dtype: str
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=16)]
    offset: Count

    @property
    def length(self) -> int:
        """Size in bytes. Raises :class:`HandOverError` for an unsupported dtype."""
        if self.dtype not in DTYPES:
            raise HandOverError("refused", f"dtype {self.dtype[:40]!r}")
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
            raise HandOverError("refused", f"{dtype} of shape {shape} is not {len(data)} bytes")
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

    Raises :class:`HandOverError`: ``truncated`` or ``refused`` if it is not a valid packed item of ``name``,
    ``settings`` if it was processed with other settings.
    """
    if len(packed) < _LENGTH.size:
        raise HandOverError("truncated", f"an item of {len(packed)} bytes")
    (length,) = _LENGTH.unpack(packed[: _LENGTH.size])
    if length > min(MAX_HEADER_BYTES, len(packed) - _LENGTH.size):
        raise HandOverError("truncated", f"a header of {length} bytes in an item of {len(packed)}")
    try:
        header = msgspec.msgpack.decode(packed[_LENGTH.size : _LENGTH.size + length], type=Header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise HandOverError("refused", f"not a packed item: {error}") from error
    if header.version != WIRE_VERSION:
        raise HandOverError("refused", f"an item of version {header.version}, not {WIRE_VERSION}")
    if header.name != name:
        raise HandOverError("refused", f"the item is {header.name[:80]!r}, not {name[:80]!r}")
    if header.settings != settings:
        raise HandOverError("settings", "the image was processed with other settings")
    begin = aligned(_LENGTH.size + length)
    if len(packed) != begin + header.length:
        raise HandOverError("truncated", f"{len(packed) - begin} bytes of tensors, not {header.length}")
    for field in header.fields:
        for tensor in _tensors(field.node, 0):
            if tensor.offset % ALIGNMENT or tensor.offset + tensor.length > header.length:
                raise HandOverError("refused", f"a tensor at {tensor.offset}+{tensor.length} of {header.length}")
    for update in header.updates:
        if update.mask is not None and len(update.mask) != len(update.full):
            raise HandOverError("refused", f"a mask of {len(update.mask)} for {len(update.full)} ids")
    return header, packed[begin:]  # last, because a traceback would keep a reference to it


def aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def _tensors(node: Node, depth: int) -> Iterator[Tensor]:
    if depth > MAX_DEPTH:
        raise HandOverError("refused", "lists are nested too deeply")
    if node.tensor is not None:
        yield node.tensor
    for inner in node.nodes or ():
        yield from _tensors(inner, depth + 1)


def unpack_node(node: Node, tensor: Any) -> Any:
    if node.tensor is not None:
        return tensor(node.tensor)
    if node.nodes is not None:
        return [unpack_node(inner, tensor) for inner in node.nodes]
    return node.number
