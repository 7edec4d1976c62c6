"""Slot headers, handles, checksums and slot sizes: valid input is read, any other input is refused with a reason.

The examples of docs/transfer.md run, and the package imports only the standard library of Python 3.10 and msgspec.
"""

import ast
import json
import pickle
import random
import re
import sys
import zlib
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import mmrouter_handover.shm
from handover.tests.support import outcome
from mmrouter_handover.shm import Handle, HandOverError, Pool, Reader, Reason, read_handle, slot_format
from mmrouter_handover.shm.pool import evictions
from mmrouter_handover.shm.slot_format import HEADER_BYTES, PAGE_BYTES

HANDLE = Handle("pool-a-00ff/slot-1f", 7, 24, 5, "image 0")
HEADER = slot_format.Header("pool-a-00ff", "slot-1f", 7, 10.0, 20.0, 24, 5)
AS_ARRAY = list(msgspec.to_builtins(HEADER))
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5)
OTHERS = bytes(value ^ 0x5A for value in range(256))
PAGE = (Path(__file__).parents[3] / "docs" / "transfer.md").read_text()
WRITER, READER = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
PACKAGE = "mmrouter_handover.shm"
FILES = sorted(Path(mmrouter_handover.shm.__file__).parent.glob("*.py"))
assert {"pool.py", "writer_folder.py", "reader.py", "janitor.py"} <= {path.name for path in FILES}
UNSAFE = {"pickle", "marshal", "shelve", "ctypes", "multiprocessing"}


def framed(frame: bytes, version: int = 1, length: int | None = None, magic: bytes = b"mmrslot") -> bytes:
    """Build a header page with a correct checksum around any frame, without the library."""
    head = magic + bytes([version]) + bytes(16) + (7).to_bytes(8, "little")
    head += (len(frame) if length is None else length).to_bytes(4, "little") + zlib.crc32(frame).to_bytes(4, "little")
    return (head + frame).ljust(HEADER_BYTES, b"\0")


def reason(page: bytes) -> str:
    with pytest.raises(HandOverError) as error:
        slot_format.decode_page(page)
    return error.value.reason


def test_headers_and_handles_round_trip():
    assert slot_format.decode_page(slot_format.encode_page(HEADER)) == slot_format.Page(HEADER, 0, 0, 7)
    assert slot_format.encode_page(HEADER) == framed(msgspec.msgpack.encode(AS_ARRAY))
    assert read_handle(json.dumps(HANDLE.to_json())) == read_handle(HANDLE.to_json()) == HANDLE


def test_case_62_frames_that_are_truncated_trailing_foreign_or_of_another_version_are_rejected():
    page, frame = slot_format.encode_page(HEADER), msgspec.msgpack.encode(AS_ARRAY)
    others = [msgspec.msgpack.encode(values) for values in ([*AS_ARRAY, 1], AS_ARRAY[:-1])]
    cuts = [page[:cut] for cut in (0, 7, 39, 40, 48, HEADER_BYTES - 1)]
    refused = [framed(frame, version=2), page[:-1] + b"x", *map(framed, (frame[:-1], frame + b"\x00", *others))]
    foreign = [framed(frame, length=len(frame) - 1), framed(frame, magic=b"another"), bytes(HEADER_BYTES)]
    assert set(map(reason, [*cuts, framed(frame, length=HEADER_BYTES)])) == {"truncated"}
    assert set(map(reason, refused)) == {"refused"}
    assert set(map(reason, foreign)) == {"corrupt"}


class Bomb:
    """Ends the test run when it is unpickled."""

    def __reduce__(self):
        return pytest.exit, ("a pickle was opened",)


def test_case_62_pickles_are_refused_as_frames_as_extensions_and_as_handles():
    bomb = pickle.dumps(Bomb())
    assert reason(framed(bomb)) == "refused"
    for code in (-1, 1, 2, 3, 127):
        extension = msgspec.msgpack.Ext(code, bomb)
        assert reason(framed(msgspec.msgpack.encode(extension))) == "refused"
        for place in range(len(AS_ARRAY)):
            values = [*AS_ARRAY[:place], extension, *AS_ARRAY[place + 1 :]]
            assert reason(framed(msgspec.msgpack.encode(values))) == "refused"
    with pytest.raises(HandOverError, match="refused"):
        read_handle(bomb)


@given(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
@example(50, 1)
def test_a_changed_byte_never_changes_the_decoded_header(place, change):
    page = bytearray(slot_format.encode_page(HEADER))
    page[place] ^= change
    try:
        found = slot_format.decode_page(bytes(page))
    except HandOverError:
        return
    assert found.header == HEADER
    assert 8 <= place < 32  # the generations, which are no part of the frame


@given(st.binary(max_size=200))
def test_any_frame_is_decoded_or_refused(frame):
    assert outcome(lambda: slot_format.decode_page(framed(frame)))[1] in ("", "refused")


@given(st.dictionaries(st.sampled_from([*HANDLE.to_json(), "more"]), JSON))
def test_any_handle_values_are_accepted_or_refused(changes):
    values = {**HANDLE.to_json(), **changes}
    found, why = outcome(lambda: read_handle(values))
    assert why == "refused" or found.to_json() == values


@given(st.binary() | st.text())
def test_any_text_is_refused_as_a_handle(text):
    with pytest.raises(HandOverError, match="refused"):
        read_handle(text)


NO_SLOTS = [
    "", "/", "slot-1", "pool-a", "pool-a/", "/slot-1", "pool-a/slot-1/", "pool-a//slot-1", "/pool-a/slot-1",
    "../pool-a/slot-1", "pool-a/../slot-1", "pool-a/slot-1/../../x", "pool-../slot-..", "pool-a/owner", "pool-a/..",
    "pool-a/slot-1\0", "pool-a/slot-1\n", "pool-a/slot-g", "pool-/slot-1", "pool-a\0b/slot-1",
    "pool-" + "a" * 200 + "/slot-1",
]  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        *({"path": path} for path in NO_SLOTS),
        {"generation": 0}, {"generation": 1 << 63}, {"checksum": 1 << 32},
        {"refetch": ""}, {"refetch": "x" * 70_000}, {"extra": 1}, {"length": -24},
    ],
)  # fmt: skip
def test_a_handle_with_invalid_values_is_refused(changes):
    values = {**HANDLE.to_json(), **changes}
    for form in (values, json.dumps(values)):
        with pytest.raises(HandOverError, match="refused"):
            read_handle(form)


def test_a_lease_beyond_an_hour_or_from_the_future_is_not_honoured():
    too_long = [*AS_ARRAY]
    too_long[4] = too_long[3] + slot_format.MAX_LEASE_SECONDS + 1
    assert reason(framed(msgspec.msgpack.encode(too_long))) == "refused"
    from_the_future = msgspec.structs.replace(HEADER, since=1e9, deadline=1e9 + 5)
    assert slot_format.state_of(slot_format.Page(from_the_future, 0, 0, 7), 15.0) == "expired"


@given(st.integers(0, 1 << 40))
def test_a_slot_holds_a_page_and_the_smallest_power_of_two_for_the_payload(length):
    found = slot_format.slot_bytes(length) - PAGE_BYTES
    assert found >= max(length, 1 << 16)
    assert found & (found - 1) == 0
    assert found == 1 << 16 or found < 2 * length


@given(st.lists(st.integers(1, 100), max_size=12), st.integers(0, 300), st.integers(0, 600))
def test_evictions_free_the_wanted_bytes_with_the_fewest_slots_or_return_none(idle, free, wanted):
    places = evictions(idle, free, wanted)
    if places is None:
        assert free + sum(idle) < wanted
        return
    assert len(set(places)) == len(places)
    assert free + sum(idle[place] for place in places) >= wanted
    fewer = sorted(idle, reverse=True)[: max(0, len(places) - 1)]
    assert not places or free + sum(fewer) < wanted


@given(st.integers(1, 5 << 16), st.integers(0, 1 << 32))
def test_a_checksum_detects_a_changed_byte_of_64_kib_and_a_changed_64_kib_of_more(length, seed):
    rnd = random.Random(seed)
    payload = bytearray(rnd.randbytes(length))
    before = slot_format.checksum(memoryview(payload))
    if length <= 1 << 16:
        assert before == zlib.crc32(payload)
        payload[rnd.randrange(length)] ^= 1 + rnd.randrange(255)
    else:
        start = rnd.randrange(length - (1 << 16))
        payload[start : start + (1 << 16)] = payload[start : start + (1 << 16)].translate(OTHERS)
    assert slot_format.checksum(memoryview(payload)) != before


def test_the_sampled_checksum_depends_on_the_length():
    sizes = (1 << 20, (1 << 20) + 8)
    assert len({slot_format.checksum(memoryview(bytes(size))) for size in sizes}) == 2


def test_the_examples_hand_a_payload_over_and_fall_back_when_it_is_gone(root):
    pixels = bytes(range(256)) * (1024 * 1176 * 2 // 256)
    used, fetched = [], []
    names = {
        "root": root, "pixels": pixels, "fetch": fetched.append, "use": lambda data: used.append(bytes(data)),
        "Pool": Pool, "Reader": Reader, "HandOverError": HandOverError, "read_handle": read_handle,
    }  # fmt: skip
    exec(WRITER, names)
    exec(READER, names)
    assert (used == [pixels], fetched) == (True, [])
    names["pool"].close()
    exec(READER, names)
    assert (len(used), fetched) == (1, ["image 0"])


def test_every_reason_is_explained():
    (table,) = (part for part in PAGE.split("\n\n") if part.startswith("| reason | what |") and "\n| `stale` |" in part)
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(get_args(Reason))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_module_is_python_3_10_and_imports_only_the_standard_library_and_msgspec(path):
    nodes = list(ast.walk(ast.parse(path.read_text(), feature_version=(3, 10))))
    modules = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names = {name.partition(".")[0] for name in modules if not f"{name}.".startswith(f"{PACKAGE}.")}
    assert names <= set(sys.stdlib_module_names) | {"msgspec"}
    assert not names & UNSAFE
