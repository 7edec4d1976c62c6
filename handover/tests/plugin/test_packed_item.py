"""A packed item is what was packed, and nothing else gets past its reader."""

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
    Packer,
    Plan,
    Tensor,
    plain,
    read_header,
)
from mmrouter_handover.plugin.wire import HandOverFailed

from .conftest import NAME, SETTINGS, packed, refusal


def read(data: bytes | bytearray, name: str = NAME, settings: str = SETTINGS) -> tuple[Header, memoryview]:
    return read_header(memoryview(data), name=name, settings=settings)


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_every_tensor_comes_back_at_an_aligned_place_whatever_lay_there_before(payloads: list[bytes]):
    packer = Packer()
    nodes = [packer.tensor("uint8", (len(payload),), memoryview(payload)) for payload in payloads]
    data = packed(packer.plan(SETTINGS, NAME, "image", [Field("pixels", "flat", Node(nodes=nodes))], []))
    header, tensors = read(data)

    def tensor(placed: Tensor) -> bytes:
        assert placed.offset % ALIGNMENT == 0
        return bytes(tensors[placed.offset : placed.offset + placed.length])

    assert plain(header.fields[0].node, tensor) == payloads
    assert b"\xee" not in bytes(data).replace(b"\xee", b"", sum(payload.count(b"\xee") for payload in payloads))


def test_fields_and_what_an_image_becomes_in_the_prompt_come_back(plan: Callable[..., Plan]):
    header, _ = read(packed(plan(b"abc", b"de")))
    assert [(field.name, field.kind, field.keep_on_cpu, field.dim, field.batch_size) for field in header.fields] == [
        ("pixels", "flat", False, 1, 1),
        ("grid", "batched", True, 0, 1),
        ("scale", "shared", False, 0, 2),
        ("nothing", "batched", False, 0, 1),
    ]
    assert plain(header.fields[2].node, None) == 0.5
    assert plain(header.fields[3].node, None) is None
    assert [(update.mode, update.target, update.full, update.mask) for update in header.updates] == [
        ("replace", [7], [1, 7, 7, 2], b"\0\1\1\0"),
        ("insert", [], [9], None),
    ]


@given(st.data())
def test_no_bytes_make_the_reader_fail_but_with_a_reason(data: Any):
    packer = Packer()
    node = packer.tensor("uint8", (5,), memoryview(b"abcde"))
    whole = packed(packer.plan(SETTINGS, NAME, "image", [Field("pixels", "flat", node)], []))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    found: list[tuple[Header, memoryview]] = []
    if reason := refusal(lambda: found.append(read(whole[:cut]))):
        assert reason in ("refused", "truncated", "settings")
    else:
        assert len(found[0][1]) == found[0][0].length


def test_an_item_of_another_image_of_other_settings_or_of_another_version_is_not_taken(plan: Callable[..., Plan]):
    data = packed(plan(b"abc"))
    with pytest.raises(HandOverFailed, match="refused: the item is"):
        read(data, name="m1-b")
    with pytest.raises(HandOverFailed, match="settings"):
        read(data, settings="others")
    with pytest.raises(HandOverFailed, match="truncated"):
        read(data[:-1])
    with pytest.raises(HandOverFailed, match="truncated"):
        read(data + b"more")
    with pytest.raises(HandOverFailed, match="of version 2"):
        read(altered(plan(b"abc"), version=2))


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
def test_a_header_that_points_outside_of_its_tensors_is_refused(plan: Callable[..., Plan], node: Node):
    with pytest.raises(HandOverFailed, match="refused"):
        read(altered(plan(b"abc"), fields=[Field("pixels", "flat", node)]))


def test_a_tensor_of_another_length_than_its_shape_is_not_packed():
    with pytest.raises(HandOverFailed, match="refused"):
        Packer().tensor("int64", (2,), memoryview(bytes(15)))


def altered(plan: Plan, **changes: Any) -> bytearray:
    """Write a plan with another header over the same tensors."""
    header, tensors = read(packed(plan))
    return packed(Plan(msgspec.structs.replace(header, **changes), [(0, tensors)]))
