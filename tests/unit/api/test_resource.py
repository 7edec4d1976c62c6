"""The resource of examples/full.yaml: what is accepted, what it defaults to, how it travels; and quantities."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from unit.engines.conftest import document

from mmrouter_lib.api import SpecError, block_size_of, load_deployment, parse_deployment, quantity_bytes, to_json

WHOLE: dict[str, Any] = yaml.safe_load((Path(__file__).parents[3] / "examples" / "full.yaml").read_text())
COUNTS = dict.fromkeys(("desired", "ready", "routable", "verified", "updated"), 2)
STATUS = {"observedGeneration": 3, "phase": "Ready", "endpoint": "http://qwen-vl.inference.svc", "conditions": []}
STATUS |= {"routing": {"exactRatio": "0.998", "hitRatio": "0.83"}}
STATUS |= {"pools": [{"name": "enc-xpu", "role": "encoder", **COUNTS}]}


def test_every_field_of_the_full_example_is_accepted() -> None:
    metadata = {"name": "qwen-vl", "namespace": "inference", "uid": "1", "managedFields": [{}]}
    dep = parse_deployment({**WHOLE, "metadata": metadata, "status": STATUS})
    assert dep.metadata.namespace == "inference"
    assert dep.spec.routing.media.allowed_cidrs == ["10.20.0.0/16"]
    assert dep.spec.pools[0].accelerator.kind == "intel-xe"
    assert dep.status is not None
    assert dep.status.pools[0].verified == 2


def test_hosts_and_ranges_may_be_of_either_family_and_quantities_numbers() -> None:
    media = {"fetch": "allowList", "allowedHosts": ["a.example", "10.0.0.1", "::1"], "allowedCIDRs": ["fd00::/8"]}
    pool = document()["spec"]["pools"][0] | {"resources": {"requests": {"cpu": 4, "memory": "16Gi"}}}
    spec = parse_deployment(document(routing={"media": media}, pools=[pool])).spec
    assert spec.routing.media.allowed_hosts == media["allowedHosts"]
    assert spec.routing.media.allowed_cidrs == media["allowedCIDRs"]
    assert spec.pools[0].resources.requests == {"cpu": "4", "memory": "16Gi"}


def test_the_shortest_resource_gets_the_defaults() -> None:
    spec = parse_deployment(document()).spec
    assert spec.model.served_name == "vl"
    assert spec.model.revision == "main"
    assert (spec.frontend.replicas, spec.frontend.service.port) == (2, 80)
    assert (spec.routing.policy, spec.routing.overlap_weight, spec.routing.media.fetch) == ("kv", "1.0", "dataOnly")
    media = spec.routing.media
    assert (media.max_bytes, media.max_request_bytes) == ("20Mi", "64Mi")
    assert (media.max_pixels, media.max_images) == (64_000_000, 32)
    pool = spec.pools[0]
    assert (pool.accelerator.devices, pool.shared_memory.size, pool.updates.max_surge) == (1, "8Gi", 1)
    assert (spec.sidecar.buffer_events, spec.verification.timeout_seconds) == (10_000, 300)
    assert not spec.observability.debug_headers


def test_a_resource_survives_a_round_trip_through_the_config_file(tmp_path: Path) -> None:
    dep = parse_deployment(WHOLE)
    path = tmp_path / "deployment.json"
    path.write_text(json.dumps(to_json(dep)))
    assert load_deployment(path).spec == dep.spec
    assert load_deployment(path).metadata.name == dep.metadata.name


def test_the_config_file_has_only_the_users_fields() -> None:
    """A default written out would stop a pod of the release before from reading the file."""
    doc = document()
    assert to_json(parse_deployment(doc))["spec"] == doc["spec"]


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "deployment.json"
    path.write_text("{")
    with pytest.raises(SpecError, match=r"^deployment\.json: not JSON"):
        load_deployment(path)


def test_values_cannot_be_changed() -> None:
    dep = parse_deployment(document())
    with pytest.raises(ValidationError):
        dep.spec.paused = True


@pytest.mark.parametrize(
    ("kind", "size"), [("nvidia", 16), ("amd", 16), ("intel-i915", 64), ("intel-xe", 64), ("gaudi", 128), ("cpu", 128)]
)
def test_block_size_is_the_pools_then_the_engines_then_the_accelerators(kind: str, size: int) -> None:
    for engine, pool, wanted in (
        ({}, {}, size),
        ({"blockSize": 32}, {}, 32),
        ({"blockSize": 32}, {"blockSize": 48}, 48),
    ):
        dep = parse_deployment(document({"accelerator": {"kind": kind}, **pool}, engine={"type": "vllm", **engine}))
        assert block_size_of(dep, dep.spec.pools[0]) == wanted


QUANTITIES = {"0": 0, "1": 1, "20Mi": 20 << 20, "8Gi": 8 << 30, "1.5Ki": 1536, "2k": 2000, "3M": 3_000_000}
QUANTITIES |= {"1e3": 1000, "1.5E3": 1500, "2E": 2 * 10**18, "1Ei": 2**60, "500m": 1, "1500m": 2}


def test_a_quantity_is_read_as_kubernetes_reads_it() -> None:
    assert {text: quantity_bytes(text) for text in QUANTITIES} == QUANTITIES


@pytest.mark.parametrize(
    "text", ["", "Mi", "-1", "+1", "1 Mi", "1mi", "1KI", "1.", ".5", "1e", "1e99", "9999999999Ei", "1_0", "٣"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="quantity"):
        quantity_bytes(text)
