"""Encoders, prefill and decode engines as local processes: exact through the chain, and simpler without a pool."""

import json
import os
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from local.rig import MEDIA, Deployment, deployed, example, metric, staged
from long_form import parameters
from scenarios import SCENARIOS, Chat, Folder, Scenario, open_chat, title
from streams import BEST_ONLY, GREEDY, Streams
from waiting import wait_for

from mmrouter_cli.sample_images import data_uri, picture

FORGETFUL = {
    "kv_connector": "NixlConnector",
    "kv_buffer_device": "cpu",
    "kv_load_failure_policy": "fail",
    "kv_connector_extra_config": {"kv_lease_duration": 0},
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The example, with every prompt through a prefill engine."""
    with staged("demo-disaggregated.yaml", tmp_path_factory.mktemp("chain"), minPrefillTokens=0) as deployment:
        yield deployment


def stages(decision: dict[str, Any]) -> list[tuple[str, str]]:
    return [(note["stage"], note["outcome"]) for note in decision["chain"]]


def encoded_tokens(deployment: Deployment, role: str) -> float:
    """Visual tokens that the engines of a role have encoded so far."""
    return sum(metric(each["ip"], "mmrouter_sim_visual_tokens_total", 8000) for each in deployment.workers(role))


def kill(deployment: Deployment, role: str) -> None:
    """End every engine of a role that runs."""
    names = {worker["name"] for worker in deployment.workers(role)}
    for name, process in deployment.processes("vllm").items():
        if name in names:
            process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=title)
def test_scenario(scenario: Scenario, chat: Chat, web: Folder) -> None:
    scenario(chat, web)


def test_the_gate_passes_through_the_whole_chain(settled: Deployment) -> None:
    settled.assert_gate_passes()


def test_a_request_goes_through_every_stage_and_its_image_is_encoded_once_and_by_an_encoder(
    settled: Deployment, chat: Chat
) -> None:
    before = {role: encoded_tokens(settled, role) for role in ("encoder", "prefill", "decode")}
    decision = chat.decided(chat.image("a"), "what?")
    assert decision["form"] == "encode-prefill-decode"
    assert stages(decision) == [("encode", "done"), ("prefill", "done"), ("answer", "first_byte")]
    assert all(note["seconds"] > 0 for note in decision["chain"])
    roles = {worker["name"]: worker["role"] for worker in settled.state()["workers"]}
    assert (roles[decision["worker"]], roles[decision["answers"]]) == ("prefill", "decode")
    shown = settled.mmrouter("explain", settled.url, decision["request_id"]).stdout
    for part in ("stages, of the form encode-prefill-decode", decision["worker"], decision["answers"]):
        assert part in shown
    chat.decided(chat.image("a"), "and again, at another place?")
    after = {role: encoded_tokens(settled, role) for role in before}
    visual = decision["images"][0]["tokens"]
    assert {role: after[role] - before[role] for role in before} == {"encoder": visual, "prefill": 0, "decode": 0}


def test_sidecars_find_the_embeddings_in_the_directory_of_their_node_and_routers_hear_of_it(
    settled: Deployment, chat: Chat
) -> None:
    chat.decided(chat.image("left in a file"), "what?")

    def seen() -> bool:
        workers = [worker for number in range(len(settled.controls)) for worker in settled.state(number)["workers"]]
        shared = [worker["shared"] for worker in workers if worker["role"] != "decode"]
        return all(one and one["taken"] > 0 and one["limit"] == 8 << 30 for one in shared)

    wait_for(seen, 30, "every pod of scope node has looked")
    assert metric(settled.workers("encoder")[0]["ip"], "mmrouter_sidecar_shm_bytes", state="encoder") > 0


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
        forms.append(chat.decided(chat.image(os.urandom(4).hex()), "what?"))
        return without in forms[-1]["degraded"]

    # None of the requests on the way there fails either: each stage that breaks is done by the next engine.
    wait_for(simpler, 30, f"a request is served without the {role}s")
    assert forms[-1]["form"] == form
    counted = settled.metric("mmrouter_degraded_total", missing=without)
    assert counted == sum(without in each["degraded"] for each in forms)
    wait_for(settled.settled, 60, "the pool is back")
    wait_for(lambda: not chat.decided("back?")["degraded"], 30, "requests use it again")


@pytest.mark.parametrize("frontends", parameters([2, 4], 2))
def test_images_are_encoded_once_for_all_frontends(tmp_path: Path, frontends: int) -> None:
    resource = example("demo-disaggregated.yaml")
    cpu = {"replicas": 2, "accelerator": {"kind": "cpu"}}
    resource["spec"]["pools"] = [{"name": role, "role": role, **cpu} for role in ("encoder", "worker")]
    resource["spec"] |= {"frontend": {"replicas": frontends, "service": {"port": 8000}}, "routing": {"media": MEDIA}}
    with deployed(tmp_path, resource) as deployment:
        wait_for(deployment.settled, 60, "all pods are verified")
        before = {role: encoded_tokens(deployment, role) for role in ("encoder", "worker")}
        pictures = [data_uri(picture(f"picture {number}", 448, 448)) for number in range(24)]
        urls = [control.replace(":8001", ":8000") for control in deployment.controls]

        def ask(number: int) -> None:
            image = {"type": "image_url", "image_url": {"url": pictures[number % 24]}}
            question = {"type": "text", "text": f"question {number}"}
            body = {"model": "demo", "messages": [{"role": "user", "content": [question, image]}], "max_tokens": 1}
            url = f"{urls[number // 24]}/v1/chat/completions"
            httpx.post(url, json=body, timeout=120).raise_for_status()

        with ThreadPoolExecutor(16) as threads:
            order = [24 * frontend + number for number in range(24) for frontend in range(frontends)]
            list(threads.map(ask, order))  # each image through all frontends at the same time
        after = {role: encoded_tokens(deployment, role) - tokens for role, tokens in before.items()}
        assert after == {"encoder": 24 * 256, "worker": 0}


@pytest.mark.parametrize("sampling", [GREEDY, BEST_ONLY], ids=["repeated", "continued"])
def test_streams_outlive_their_decode_engine(settled: Deployment, sampling: Mapping[str, float]) -> None:
    """A continued answer passes no stage: the engine that continues it computes the prompt."""
    Streams(settled, 8, 200, sampling).assert_outlive(lambda name: settled.processes("vllm")[name].kill())


def test_the_bench_measures_each_encoder_mode(settled: Deployment, tmp_path: Path) -> None:
    file, page = tmp_path / "modes.json", tmp_path / "modes.html"
    load = "--requests 12 --concurrency 2 --turns 1 --image-share 1 --image-reuse 0 --output-tokens 4"
    modes = ("perImage", "perRequest", "auto")
    options = [*load.split(), "--encoder-modes", ",".join(modes), "--json", str(file), "--html", str(page)]
    done = settled.mmrouter("bench", settled.url, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(file.read_text())
    assert tuple(result["encoder_mode"] for result in results) == modes
    for result in results:
        assert (result["answered"], result["failures"]) == (12, {})
        work = result["encoders"].values()
        assert sum(encoder["images"] for encoder in work) == 12
        assert all(0 <= encoder["busy"] <= 1 for encoder in work)
    assert all(sorted(e["images"] for e in result["encoders"].values()) == [6, 6] for result in results[:2])
    assert all(mode in done.stdout and mode in page.read_text() for mode in modes)
    refused = settled.mmrouter("bench", settled.url, "--encoder-modes", "auto,fastest")
    assert refused.returncode == 2
    assert "fastest" in refused.stderr


def test_an_expired_transfer_fails_no_request_because_the_decode_engine_computes_the_prompt(tmp_path: Path) -> None:
    """A prefill engine that keeps no blocks for decode engines, with a connector that fails requests for them."""
    resource = example("demo-disaggregated.yaml")
    spec = resource["spec"]
    spec["engine"] = {"type": "vllm", "blockSize": 16, "kvConnector": FORGETFUL}
    spec["frontend"]["replicas"] = 1
    spec["routing"] = {"minPrefillTokens": 0, "media": MEDIA}
    cpu = {"replicas": 1, "accelerator": {"kind": "cpu"}}
    spec["pools"] = [{"name": role, "role": role, **cpu} for role in ("prefill", "decode")]
    with deployed(tmp_path, resource) as deployment:
        wait_for(deployment.settled, 60, "both pods are verified")
        (prefill,), (decode,) = deployment.workers("prefill"), deployment.workers("decode")
        before = metric(prefill["ip"], "vllm:nixl_num_kv_expired_reqs_total", 8000)
        with open_chat(deployment) as chat:
            decision = chat.decided(chat.image("a"), "what?")
        assert metric(prefill["ip"], "vllm:nixl_num_kv_expired_reqs_total", 8000) == before + 1
    assert [each["outcome"] for each in decision["attempts"]] == ["transfer", "answered 200"]
    assert stages(decision) == [("prefill", "done"), ("prefill", "transfer"), ("answer", "first_byte")]
    assert {each["worker"] for each in decision["attempts"]} == {decode["name"]}
