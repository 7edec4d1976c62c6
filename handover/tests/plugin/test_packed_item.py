"""Packed items round-trip, and the reader refuses everything else."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrouter_handover.plugin.packed_item import (
    ALIGNMENT,
    Field,
    Header,
    Node,
    PackedItem,
    Packer,
    Tensor,
    read_header,
    unpack_node,
)
from mmrouter_handover.plugin.wire import HandOverFailed

from .conftest import NAME, SETTINGS, refusal, written


def read(data: bytes | bytearray, name: str = NAME, settings: str = SETTINGS) -> tuple[Header, memoryview]:
    return read_header(memoryview(data), name=name, settings=settings)


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_tensors_round_trip_aligned_and_padding_is_cleared(payloads: list[bytes]):
    packer = Packer()
    nodes = [packer.tensor("uint8", (len(payload),), memoryview(payload)) for payload in payloads]
    data = written(packer.pack(SETTINGS, NAME, "image", [Field("pixels", "flat", Node(nodes=nodes))], []))
    header, tensors = read(data)

    def tensor(placed: Tensor) -> bytes:
        assert placed.offset % ALIGNMENT == 0
        return bytes(tensors[placed.offset : placed.offset + placed.length])

    assert unpack_node(header.fields[0].node, tensor) == payloads
    assert b"\xee" not in bytes(data).replace(b"\xee", b"", sum(payload.count(b"\xee") for payload in payloads))


def test_fields_and_prompt_updates_round_trip(pack: Callable[..., PackedItem]):
    header, _ = read(written(pack(b"abc", b"de")))
    assert [(field.name, field.kind, field.keep_on_cpu, field.dim, field.batch_size) for field in header.fields] == [
        ("pixels", "flat", False, 1, 1),
        ("grid", "batched", True, 0, 1),
        ("scale", "shared", False, 0, 2),
        ("nothing", "batched", False, 0, 1),
    ]
    assert unpack_node(header.fields[2].node, None) == 0.5
    assert unpack_node(header.fields[3].node, None) is None
    assert [(update.mode, update.target, update.full, update.mask) for update in header.updates] == [
        ("replace", [7], [1, 7, 7, 2], b"\0\1\1\0"),
        ("insert", [], [9], None),
    ]


@given(st.data())
def test_any_damaged_item_is_refused_with_a_reason(data: Any):
    packer = Packer()
    node = packer.tensor("uint8", (5,), memoryview(b"abcde"))
    whole = written(packer.pack(SETTINGS, NAME, "image", [Field("pixels", "flat", node)], []))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    found: list[tuple[Header, memoryview]] = []
    if reason := refusal(lambda: found.append(read(whole[:cut]))):
        assert reason in ("refused", "truncated", "settings")
    else:
        assert len(found[0][1]) == found[0][0].length


def test_an_item_of_another_image_settings_or_version_is_refused(pack: Callable[..., PackedItem]):
    data = written(pack(b"abc"))
    with pytest.raises(HandOverFailed, match="refused: the item is"):
        read(data, name="m1-b")
    with pytest.raises(HandOverFailed, match="settings"):
        read(data, settings="others")
    with pytest.raises(HandOverFailed, match="truncated"):
        read(data[:-1])
    with pytest.raises(HandOverFailed, match="truncated"):
        read(data + b"more")
    with pytest.raises(HandOverFailed, match="of version 2"):
        read(altered(pack(b"abc"), version=2))


@pytest.mark.parametrize(
    "node",
    [
        Node(tensor=Tensor("uint8", (4096,), 0)),
        Node(tensor=Tensor("uint8", (1,), 3)),
        Node(tensor=Tensor("uint8", (1,), 1 << 40)),
        Node(tensor=Tensor("object", (1,), 0)),
        Node(nodes=[Node(nodes=[Node(nodes=[Node(nodes=[Node(nodes=[Node()])])])])]),
    ],
)
def test_a_header_that_points_outside_its_tensors_is_refused(pack: Callable[..., PackedItem], node: Node):
    with pytest.raises(HandOverFailed, match="refused"):
        read(altered(pack(b"abc"), fields=[Field("pixels", "flat", node)]))


def test_a_tensor_of_another_length_than_its_shape_is_not_written():
    with pytest.raises(HandOverFailed, match="refused"):
        Packer().tensor("int64", (2,), memoryview(bytes(15)))


def altered(item: PackedItem, **changes: Any) -> bytearray:
    """Write an item with another header over the same tensors."""
    header, tensors = read(written(item))
    return written(PackedItem(msgspec.structs.replace(header, **changes), [(0, tensors)]))
