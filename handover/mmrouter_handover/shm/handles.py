"""What travels from a writer to a reader, and how a hand-over fails."""

import math
from typing import Annotated, Any, Literal

import msgspec

Reason = Literal["stale", "gone", "corrupt", "truncated", "refused", "full"]
"""Why a hand-over failed.

``stale``: the slot holds, or is about to hold, something else. ``gone``: there is no such slot any more. ``corrupt``:
its contents are not what the handle says. ``truncated``: it ends too early. ``refused``: the handle or the slot is
nothing that may be read: another version, an unknown dtype, a path that leaves the root, a link. ``full``: the writer
has no room.
"""

DTYPES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
}
"""Names of element types that may be handed over, and their sizes in bytes. Encoded images are ``uint8``."""

PATTERN = r"^pool-[A-Za-z0-9._-]{1,128}/slot-[0-9a-f]{1,16}\Z"
MAX_HANDLE_BYTES = 1 << 16
MAX_DIMENSIONS = 16

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Shape = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
Check = Literal["sampled", "full"]


class HandOverError(Exception):
    """A hand-over did not take place; ``reason`` is for counters, the message for people."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason: Reason = reason


class Handle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a payload lies and what it is. All values fit into JSON.

    ``path`` is relative to the root and has two parts, ``generation`` is used once in the life of its pool, ``length``
    is in bytes. ``refetch`` says how to get the same payload without this hand-over; its meaning is the caller's.
    Raises ``ValueError`` when made from values that contradict each other.
    """

    path: Annotated[str, msgspec.Meta(pattern=PATTERN, max_length=160)]
    generation: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
    length: Count
    check: Check
    checksum: Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
    dtype: str
    shape: Shape
    refetch: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_HANDLE_BYTES)]

    def __post_init__(self) -> None:
        require_layout(self.length, self.dtype, self.shape)

    def to_json(self) -> dict[str, Any]:
        """Return the handle as values of JSON; :func:`read_handle` is the way back."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values


def require_layout(length: int, dtype: str, shape: tuple[int, ...]) -> None:
    """Raise ``ValueError`` unless ``shape`` elements of ``dtype`` are ``length`` bytes."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype[:40]!r} is not handed over")
    if math.prod(shape) * DTYPES[dtype] != length:
        raise ValueError(f"{dtype} of shape {shape} is {math.prod(shape) * DTYPES[dtype]} bytes, not {length}")


def read_handle(value: bytes | str | dict[str, Any]) -> Handle:
    """Return the handle that a peer sent, as JSON text or as parsed JSON. Raises :class:`HandOverError`."""
    try:
        if isinstance(value, dict):
            return msgspec.convert(value, Handle)
        if len(value) > MAX_HANDLE_BYTES:
            raise HandOverError("refused", f"a handle of {len(value)} characters")
        return msgspec.json.decode(value, type=Handle)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise HandOverError("refused", f"not a handle: {error}") from error
