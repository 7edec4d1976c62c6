"""Fixtures of both packages' tests; hypothesis searches a quarter of its default outside the long form."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from handover.tests.support import NAME, SETTINGS, Clock, shared_root
from mmrouter_handover.plugin.wire import Field, Node, PackedItem, Packer, PromptUpdate

settings.register_profile(
    "handover",
    max_examples=100 if os.environ.get("MMROUTER_FAMILIES") else 25,
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("handover")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def root() -> Iterator[Path]:
    with shared_root() as folder:
        yield folder


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
