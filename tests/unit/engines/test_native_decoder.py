"""Decoding with and without the compiled extension gives the same events or the same error."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.engines.conftest import Captures, batch, capture_rows, rows, sglang_captures, stored

from mmrouter_lib import native
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.events import Batch, EventError

if native.form != "native":
    pytest.skip(f"not run: {native.why}", allow_module_level=True)
READERS: dict[str, tuple[Callable[[bytes], Batch], int]] = {
    "vllm": (adapter("vllm").decode_batch, 4),
    "sglang": (adapter("sglang").decode_batch, 8),
}
U32, U64 = (1 << 32) - 1, (1 << 64) - 1
ENGINES = pytest.mark.parametrize("engine", READERS)


def outcome(engine: str, payload: bytes) -> str:
    """Return what was read, or the words of the refusal. As text: NaN does not equal itself."""
    try:
        return repr(READERS[engine][0](payload))
    except EventError as error:
        return f"refused: {error}"


def in_python(engine: str, payload: bytes) -> str:
    with patch.object(native, "pack_token_ids", None):
        return outcome(engine, payload)


def packed(engine: str, payload: bytes) -> bytes | None:
    assert native.pack_token_ids is not None
    return native.pack_token_ids(payload, READERS[engine][1])


def equal(engine: str, payload: bytes) -> None:
    assert outcome(engine, payload) == in_python(engine, payload)


def number(value: int, size: int) -> bytes:
    """Return a number in msgpack's form of ``size`` bytes, which need not be the shortest."""
    return bytes((0xCC + (size.bit_length() - 1),)) + value.to_bytes(size, "big")


def with_ids(raw: bytes) -> bytes:
    """Return a batch with a value of ``token_ids`` as it is written here."""
    empty = batch(stored(token_ids=[], block_hashes=[1], block_size=1))
    before, name, after = empty.partition(b"\xa9token_ids")
    return before + name + raw + after[1:]


def test_captures_of_vllm_decode_equally(captures: Captures) -> None:
    read = 0
    for name in captures.names():
        for _, payload in captures.frames(name):
            equal("vllm", payload)
            read += packed("vllm", payload) is not None
    assert read > 100


def payloads(value: Any) -> Iterator[bytes]:
    """All payloads that stand as hex in a row of a capture."""
    if isinstance(value, dict):
        for key, each in value.items():
            if key in ("payload", "payload_hex") and isinstance(each, str):
                yield bytes.fromhex(each)
            elif key == "payloads":
                yield from map(bytes.fromhex, each)
            else:
                yield from payloads(each)
    elif isinstance(value, list):
        for each in value:
            yield from payloads(each)


def test_the_excerpt_of_sglang_decodes_equally() -> None:
    found = [payload for row in rows() for payload in payloads(row)]
    assert sum(packed("sglang", payload) is not None for payload in found) >= 5
    for payload in found:
        equal("sglang", payload)


def test_captures_of_sglang_decode_equally() -> None:
    for path in sorted(sglang_captures().glob("*.jsonl")):
        for row in capture_rows(path.name):
            for payload in payloads(row):
                equal("sglang", payload)


@ENGINES
def test_only_the_token_ids_change_and_become_bytes(engine: str) -> None:
    given = [1, 2, 3, 70000]
    first = stored(token_ids=given, extra_keys=[["token_ids", {"token_ids": [1]}], None])
    events = [first, {"type": "AllBlocksCleared"}, stored(token_ids=given)]
    raw, size = packed(engine, batch(*events)), READERS[engine][1]
    assert raw is not None
    ids = b"".join(value.to_bytes(size, "little") for value in given)
    expected = [events[0] | {"token_ids": ids}, events[1], events[2] | {"token_ids": ids}]
    assert msgspec.msgpack.decode(raw) == [1.5, expected, 0]


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), U64)
    | st.sampled_from([0, 127, 128, U32, U32 + 1, 1 << 62, U64, -1, -33])
    | st.floats()
    | st.text(max_size=40)
    | st.binary(max_size=40)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9) | st.integers(-9, 9), inner, max_size=3)
    ),
)
IDS = st.lists(st.integers(0, U32), max_size=20) | st.lists(st.integers(0, U64) | VALUES, max_size=6) | VALUES
EVENTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"]), "token_ids": IDS},
    optional={
        "block_hashes": st.lists(st.integers(-(1 << 63), U64), max_size=4) | VALUES,
        "parent_block_hash": st.none() | st.integers(0, U64) | VALUES,
        "block_size": st.integers(-1, 8) | VALUES,
        "medium": VALUES,
        "extra_keys": VALUES,
        "locality": st.sampled_from(["LOCAL", "REMOTE"]),
        "later": VALUES,
    },
)
WHOLE = st.builds(stored, token_ids=st.lists(st.integers(0, U32), min_size=4, max_size=4), later=VALUES)


@ENGINES
@given(events=st.lists(WHOLE | EVENTS | VALUES, max_size=4), rank=VALUES)
def test_drawn_batches_decode_equally(engine: str, events: list[Any], rank: Any) -> None:
    equal(engine, msgspec.msgpack.encode([1.5, events, rank]))
    equal(engine, msgspec.msgpack.encode([1.5, [stored(token_ids=[5, 6, 7, 8]), *events]]))


@ENGINES
@given(data=st.data(), events=st.lists(WHOLE, min_size=1, max_size=3))
def test_damaged_payloads_give_equal_results(engine: str, data: st.DataObject, events: list[Any]) -> None:
    raw = bytearray(batch(*events))
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    equal(engine, bytes(raw[: data.draw(st.integers(0, len(raw)))]))
    equal(engine, bytes(raw))
    equal(engine, bytes(raw) + data.draw(st.binary(max_size=3)))


@ENGINES
@given(st.binary(max_size=60))
def test_arbitrary_bytes_give_equal_results(engine: str, raw: bytes) -> None:
    equal(engine, raw)
    equal(engine, with_ids(raw))


@ENGINES
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("value", [0, 1, 200])
def test_a_number_in_a_longer_form_than_it_needs_is_the_same_number(engine: str, size: int, value: int) -> None:
    payload = with_ids(b"\x91" + number(value, size))
    equal(engine, payload)
    assert packed(engine, payload) is not None
    assert f"[{value}]" in outcome(engine, payload)


# In hexadecimal: bytes and a text, signed numbers, floats, nil and true, a pair, the largest number, an extension, an
# invalid byte, lengths beyond the end, a map, nil.
NO_IDS = (
    "c40401000000 a401000000 91ff 91d005 91d30000000000000005 91ca3f800000 91cb3ff0000000000000 91c0 91c3 91920102 "
    "91cfffffffffffffffff 91d40101 91c1 ddffffffff dcffff01 80 c0"
)


@ENGINES
@pytest.mark.parametrize("raw", NO_IDS.split())
def test_values_that_are_no_ids_give_equal_results(engine: str, raw: str) -> None:
    equal(engine, with_ids(bytes.fromhex(raw)))


@ENGINES
def test_a_repeated_field_gives_equal_results(engine: str) -> None:
    """No engine writes one; a decoder takes the last."""
    one = msgspec.msgpack.encode
    for second in ([7, 8], b"\x07\0\0\0", "78", None, [-1]):
        twice = one("token_ids") + one([5, 6]) + one("token_ids") + one(second)
        rest = {"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None, "block_size": 1}
        event = bytes((0x80 + len(rest) + 2,)) + b"".join(one(k) + one(v) for k, v in rest.items()) + twice
        equal(engine, b"\x92" + one(1.5) + b"\x91" + event)


@ENGINES
def test_deep_nesting_and_odd_keys_give_equal_results(engine: str) -> None:
    plain = batch(stored(later=0))
    deep = (b"\x91" * 5000 + b"\xc0", b"\x81\xc0" * 3000 + b"\xc0")
    for odd in (*deep, b"\x81\x01\x02", b"\xc7\x02\x05ab", b"\xa2\xff\xfe"):
        equal(engine, plain.replace(b"\xa5later\x00", b"\xa5later" + odd))
    for key in (b"\x01", b"\xc4\x05later", b"\xd9\x05later", b"\xdb\0\0\0\x05later", b"\xa5lat\xff\xff"):
        equal(engine, plain.replace(b"\xa5later", key))
    for key in (b"\xd9\x09token_ids", b"\xda\0\x09token_ids", b"\xc4\x09token_ids"):
        equal(engine, batch(stored()).replace(b"\xa9token_ids", key))


@ENGINES
@pytest.mark.parametrize("count", [15, 16, 255, 256, 65_535, 65_536, 300_000])
def test_long_events_decode_equally(engine: str, count: int) -> None:
    ids = [(value * 2_654_435_761) & U32 for value in range(count)]
    payload = batch(stored(token_ids=ids, block_hashes=[1], block_size=count))
    assert packed(engine, payload) is not None
    equal(engine, payload)
