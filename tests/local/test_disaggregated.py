"""Encoders, prefill and decode engines as local processes: exact through the chain, and simpler without a pool."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from local.rig import Deployment
from local.staged_deployments import decided, started
from local.test_scenarios import Folder, web
from prometheus_client.parser import text_string_to_metric_families
from scenarios import SCENARIOS, Chat, Scenario, open_chat, title
from waiting import wait_for

__all__ = ["web"]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The example, with every prompt through a prefill engine."""
    with started("demo-disaggregated.yaml", tmp_path_factory.mktemp("chain"), minPrefillTokens=0) as deployment:
        yield deployment


@pytest.fixture
def settled(chain: Deployment) -> Deployment:
    wait_for(chain.settled, 60, "every pod is verified on every frontend")
    return chain


@pytest.fixture
def chat(settled: Deployment) -> Iterator[Chat]:
    with open_chat(settled) as chat:
        yield chat


def stages(decision: dict[str, Any]) -> dict[str, str]:
    return {note["stage"]: note["outcome"] for note in decision["chain"]}


def encoded_tokens(deployment: Deployment, role: str) -> float:
    """Visual tokens that the engines of a role have encoded so far."""
    total = 0.0
    for worker in deployment.state()["workers"]:
        if worker["role"] == role:
            page = httpx.get(f"http://{worker['ip']}:8000/metrics").text
            samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
            total += sum(each.value for each in samples if each.name == "mmrouter_sim_visual_tokens_total")
    return total


def kill(deployment: Deployment, role: str) -> None:
    """End every engine of a role that runs."""
    names = {worker["name"] for worker in deployment.state()["workers"] if worker["role"] == role}
    for name, process in deployment.processes("vllm").items():
        if name in names:
            process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=title)
def test_scenario(scenario: Scenario, chat: Chat, web: Folder) -> None:
    scenario(chat, web)


def test_the_gate_passes_through_the_whole_chain(settled: Deployment) -> None:
    done = settled.mmrouter("verify", settled.url)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_request_goes_through_every_stage_and_its_image_is_encoded_once_and_by_an_encoder(
    settled: Deployment, chat: Chat
) -> None:
    before = {role: encoded_tokens(settled, role) for role in ("encoder", "prefill", "decode")}
    decision = decided(settled, chat, chat.image("a"), "what?")
    assert decision["form"] == "encode-prefill-decode"
    assert stages(decision) == {"encode": "done", "prefill": "done", "answer": "first_byte"}
    assert all(note["seconds"] > 0 for note in decision["chain"])
    roles = {worker["name"]: worker["role"] for worker in settled.state()["workers"]}
    assert (roles[decision["worker"]], roles[decision["answers"]]) == ("prefill", "decode")
    shown = settled.mmrouter("explain", settled.url, decision["request_id"]).stdout
    assert "stages, of the form encode-prefill-decode" in shown
    for engine in (decision["worker"], decision["answers"]):
        assert engine in shown
    decided(settled, chat, chat.image("a"), "and again, at another place?")
    after = {role: encoded_tokens(settled, role) for role in before}
    visual = decision["images"][0]["tokens"]
    assert {role: after[role] - before[role] for role in before} == {"encoder": visual, "prefill": 0, "decode": 0}


def test_sidecars_find_the_embeddings_in_the_directory_of_their_node_and_routers_hear_of_it(
    settled: Deployment, chat: Chat
) -> None:
    decided(settled, chat, chat.image("left in a file"), "what?")

    def told() -> bool:
        workers = [worker for number in range(len(settled.controls)) for worker in settled.state(number)["workers"]]
        shared = [worker["shared"] for worker in workers if worker["role"] != "decode"]
        return all(one and one["taken"] > 0 and one["limit"] == 8 << 30 for one in shared)

    wait_for(told, 30, "every pod of scope node has looked")
    encoder = next(worker for worker in settled.state()["workers"] if worker["role"] == "encoder")
    page = httpx.get(f"http://{encoder['ip']}:9090/metrics").text
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    held = {each.labels["state"]: each.value for each in samples if each.name == "mmrouter_sidecar_shm_bytes"}
    assert held["encoder"] > 0


@pytest.mark.parametrize(
    ("role", "without", "form"),
    [
        ("encoder", "no_encoder", "prefill-decode"),
        ("prefill", "no_prefill", "whole"),
        ("decode", "no_decode", "encode-whole"),
    ],
)
def test_a_pool_that_is_down_costs_no_request_and_the_decision_says_so(
    settled: Deployment, chat: Chat, role: str, without: str, form: str
) -> None:
    forms: list[dict[str, Any]] = []

    def simpler() -> bool:
        kill(settled, role)  # again and again, because each starts again by itself
        forms.append(decided(settled, chat, chat.image(os.urandom(4).hex()), "what?"))
        return without in forms[-1]["degraded"]

    # None of the requests on the way there fails either: each stage that breaks is done by the next engine.
    wait_for(simpler, 30, f"a request is served without the {role}s")
    assert forms[-1]["form"] == form
    metrics = httpx.get(settled.controls[0].replace(":8001", ":9090") + "/metrics").text
    counted = f'mmrouter_degraded_total{{missing="{without}"}} '
    (value,) = (line.removeprefix(counted) for line in metrics.splitlines() if line.startswith(counted))
    assert float(value) == sum(without in each["degraded"] for each in forms)
    wait_for(settled.settled, 60, "the pool is back")
    wait_for(lambda: not decided(settled, chat, "back?")["degraded"], 30, "requests use it again")
