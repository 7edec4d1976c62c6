"""Packed items, and the reason of a refusal."""

from collections.abc import Callable

import pytest

from mmrouter_handover.plugin.packed_item import Field, Node, Packer, Plan, Update
from mmrouter_handover.plugin.wire import HandOverFailed

SETTINGS, NAME = "settings of both", "m1-a"


@pytest.fixture
def plan() -> Callable[..., Plan]:
    def make(*payloads: bytes, name: str = NAME, settings: str = SETTINGS) -> Plan:
        packer = Packer()
        nodes = [packer.tensor("uint8", (len(payload),), memoryview(payload)) for payload in payloads]
        fields = [
            Field("pixels", "flat", Node(nodes=nodes), dim=1),
            Field("grid", "batched", packer.tensor("int64", (3,), memoryview(bytes(range(24)))), keep_on_cpu=True),
            Field("scale", "shared", Node(number=0.5), batch_size=2),
            Field("nothing", "batched", Node()),
        ]
        updates = [Update("replace", [7], [1, 7, 7, 2], b"\0\1\1\0"), Update("insert", [], [9])]
        return packer.plan(settings, name, "image", fields, updates)

    return make


def packed(plan: Plan) -> bytearray:
    """Write a plan to memory that held something else."""
    out = bytearray(b"\xee" * plan.length)
    plan.write(memoryview(out))
    return out


def refusal(act: Callable[[], object]) -> str:
    """Return the reason with which an act fails, empty where it does not."""
    try:
        act()
    except HandOverFailed as failed:
        return failed.reason
    return ""
