"""Blocks whose lease is over before the decode engine asks for them, with a connector that fails requests for it."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import yaml
from local.rig import ROOT, Deployment, running
from local.staged_deployments import MEDIA, decided
from prometheus_client.parser import text_string_to_metric_families
from scenarios import Chat
from waiting import wait_for

CONNECTOR = {
    "kv_connector": "NixlConnector",
    "kv_buffer_device": "cpu",
    "kv_load_failure_policy": "fail",
    "kv_connector_extra_config": {"kv_lease_duration": 0},
}


@pytest.fixture
def forgetful(tmp_path: Path) -> Iterator[Deployment]:
    """A prefill engine that keeps no blocks for decode engines, and a decode engine."""
    body = yaml.safe_load((ROOT / "examples" / "demo-disaggregated.yaml").read_text())
    spec = body["spec"]
    spec["model"]["volume"]["hostPath"]["path"] = str(ROOT / "examples" / "models" / "tiny-qwen2-vl")
    spec["engine"] = {"type": "vllm", "blockSize": 16, "kvConnector": CONNECTOR}
    spec["frontend"]["replicas"] = 1
    spec["routing"] = {"minPrefillTokens": 0, "media": MEDIA}
    spec["pools"] = [
        {"name": role, "role": role, "replicas": 1, "accelerator": {"kind": "cpu"}} for role in ("prefill", "decode")
    ]
    file = tmp_path / "deployment.yaml"
    file.write_text(yaml.safe_dump(body))
    with running(file) as deployment:
        wait_for(deployment.settled, 60, "both pods are verified")
        yield deployment


def expired(deployment: Deployment) -> float:
    """Return how many prefills were not fetched in time."""
    (prefill,) = (worker for worker in deployment.state()["workers"] if worker["role"] == "prefill")
    page = httpx.get(f"http://{prefill['ip']}:8000/metrics").text
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return sum(each.value for each in samples if each.name == "vllm:nixl_num_kv_expired_reqs_total")


def test_an_expired_transfer_fails_no_request_because_the_decode_engine_computes_the_prompt(
    forgetful: Deployment,
) -> None:
    before = expired(forgetful)
    with ExitStack() as stack:
        chat = Chat("demo", stack.enter_context(forgetful.client()), [stack.enter_context(forgetful.control())])
        decision = decided(forgetful, chat, chat.image("a"), "what?")
    assert expired(forgetful) == before + 1
    assert [each["outcome"] for each in decision["attempts"]] == ["transfer", "answered 200"]
    stages = [(note["stage"], note["outcome"]) for note in decision["chain"]]
    assert stages == [("prefill", "done"), ("prefill", "transfer"), ("answer", "first_byte")]
    (decode,) = (worker["name"] for worker in forgetful.state()["workers"] if worker["role"] == "decode")
    assert {each["worker"] for each in decision["attempts"]} == {decode}
