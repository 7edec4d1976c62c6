"""Packed items for the plugin's tests, and the reason of a refusal."""

from collections.abc import Callable

import pytest

from mmrouter_handover.plugin.packed_item import Field, Node, PackedItem, Packer, PromptUpdate
from mmrouter_handover.plugin.wire import HandOverFailed

SETTINGS, NAME = "settings of both", "m1-a"


@pytest.fixture
def pack() -> Callable[..., PackedItem]:
    """Return a function that packs an item with tensors of the given payloads."""

    def make(*payloads: bytes, name: str = NAME, settings: str = SETTINGS) -> PackedItem:
        packer = Packer()
        nodes = [packer.tensor("uint8", (len(payload),), memoryview(payload)) for payload in payloads]
        fields = [
            Field("pixels", "flat", Node(nodes=nodes), dim=1),
            Field("grid", "batched", packer.tensor("int64", (3,), memoryview(bytes(range(24)))), keep_on_cpu=True),
            Field("scale", "shared", Node(number=0.5), batch_size=2),
            Field("nothing", "batched", Node()),
        ]
        updates = [PromptUpdate("replace", [7], [1, 7, 7, 2], b"\0\1\1\0"), PromptUpdate("insert", [], [9])]
        return packer.pack(settings, name, "image", fields, updates)

    return make


def written(item: PackedItem) -> bytearray:
    """Write an item to memory with other content."""
    out = bytearray(b"\xee" * item.length)
    item.write(memoryview(out))
    return out


def refusal(call: Callable[[], object]) -> str:
    """Return the reason with which a call fails, or empty."""
    try:
        call()
    except HandOverFailed as failed:
        return failed.reason
    return ""
