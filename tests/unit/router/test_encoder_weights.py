"""The weights of encoder pools follow the mounted resource, and nothing else of it does."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mmrouter_lib.api import parse_deployment, to_json
from mmrouter_router.encoding.encoder_queue import Encoder, Image
from mmrouter_router.encoding.encoder_weights import EncoderWeights
from mmrouter_router.encoding.image_sender import ImageSender
from mmrouter_router.encoding.scheduler import EncoderScheduler


def resource(**weights: int) -> dict[str, Any]:
    accelerator = {"accelerator": {"kind": "cpu"}}
    encoders = [{"name": name, "role": "encoder", "weight": weight, **accelerator} for name, weight in weights.items()]
    return {
        "apiVersion": "mmrouter.io/v1alpha1",
        "kind": "MMRouterDeployment",
        "metadata": {"name": "demo"},
        "spec": {
            "model": {"id": "a/b", "volume": {"emptyDir": {}}},
            "engine": {"type": "vllm"},
            "pools": [*encoders, {"name": "worker", "role": "worker", **accelerator}],
        },
    }


class Mounted:
    """A mounted resource, and how often its readers heard of a change."""

    def __init__(self, folder: Path) -> None:
        self.file, self.changes = folder / "deployment.json", 0
        self.weights = EncoderWeights(self.file, parse_deployment(resource(fast=8, slow=1)), self._count)

    def _count(self) -> None:
        self.changes += 1

    def write(self, **weights: int) -> None:
        self.file.write_text(json.dumps(to_json(parse_deployment(resource(**weights)))))

    @property
    def read(self) -> tuple[int, int]:
        self.weights.read()
        return self.weights.of("fast"), self.weights.of("slow")


@pytest.fixture
def mounted(tmp_path: Path) -> Mounted:
    return Mounted(tmp_path)


def test_a_changed_weight_is_used_once_and_equal_ones_are_no_change(mounted: Mounted) -> None:
    mounted.write(fast=8, slow=1)
    assert (mounted.read, mounted.changes) == ((8, 1), 0)
    mounted.write(fast=1, slow=0)
    assert [mounted.read for _ in range(3)] == [(1, 0)] * 3
    assert mounted.changes == 1


def test_a_file_that_is_absent_or_malformed_and_a_pool_that_is_not_there_leave_weights_as_they_are(
    mounted: Mounted, caplog: pytest.LogCaptureFixture
) -> None:
    assert mounted.read == (8, 1)
    mounted.file.write_text("{")
    assert [mounted.read for _ in range(3)] == [(8, 1)] * 3
    assert sum("not JSON" in record.message for record in caplog.records) == 1
    mounted.write(fast=3, other=9)
    assert (mounted.read, mounted.changes) == ((3, 1), 1)


def test_images_are_shared_by_a_changed_weight() -> None:
    sender = ImageSender(EncoderScheduler("perImage"), post=None)  # type: ignore[arg-type] # nothing is sent

    def shares(request: str, **weights: int) -> Counter[str]:
        sender.update([Encoder(name, "cpu", weight=weight, queue=64) for name, weight in weights.items()])
        images = [Image(f"{request}{number}".encode(), 10) for number in range(8)]
        return Counter(placed.encoder for placed in sender.scheduler.place(request, images, 0.0).placed)

    assert shares("before", a=3, b=1) == {"a": 6, "b": 2}
    assert shares("after", a=0, b=1) == {"b": 8}
