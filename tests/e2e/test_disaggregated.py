"""Encoders on two kinds of devices, prefill and decode engines in real pods: proved, and simpler without a pool.

The encoders' kinds say the opposite of what they are: those on the XPU are slow. So only what was measured explains who
gets how much. The last tests are of SGLang's engines, which are proved in pairs.
"""

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from artefacts import Record
from cluster.access import Access
from cluster.resources import apply, delete, deployment, get
from e2e.deploying import EC_FLAG, RESTRICTED, choices, flag_field, mounted, process_here
from e2e.staged_deployments import METRICS_PORT, PRIVILEGED, Chain, NodeFolder, chained, encoded, samples, strike
from e2e.test_placement import RACK, device, equip, label, without_devices
from scenarios import SCENARIOS, Chat, Scenario, assert_whole, title
from waiting import wait_for

from mmrouter_handover.shm import Entry
from mmrouter_lib.pod_paths import SHARED_DIR
from mmrouter_operator.model.kinds import RESOURCE

FAST_MS, SLOW_MS = 2, 6
"""Milliseconds that an encoder takes for a visual token: far more than the processor's share of it."""
SHARE = (1 / FAST_MS) / (1 / FAST_MS + 1 / SLOW_MS)
NEAR = 0.15
PREFILL_RATE = 4000
"""Tokens per second: a file that an engine was named lies there for some tens of milliseconds."""
ALWAYS = [{"name": "MMROUTER_HANDOVER", "value": "always"}]
SHARED_MIB = 64
GONE_SECONDS = 5.0
"""Until nothing is left of what a killed process had in the folder."""
IN_ORDER = {"encode": "done", "prefill": "done", "answer": "first_byte"}
EC_ROLES = {"enc-cpu": "ec_producer", "enc-xpu": "ec_producer", "prefill": "ec_consumer", "decode": None}
POOLS = {"enc-cpu": "encoder", "enc-xpu": "encoder", "prefill": "prefill", "decode": "decode"}


def pool(name: str, kind: str = "cpu", *args: str) -> dict[str, Any]:
    shared = {"size": f"{SHARED_MIB}Mi", "scope": "node"}
    where = {"accelerator": {"kind": kind}, "nodeSelector": {RACK: "7"}, "sharedMemory": shared}
    return {"name": name, "role": POOLS[name], "replicas": 1, "args": list(args), **where}


SPEC = {
    # Every image as a file of the node, also where it is so small that its bytes were the cheaper way.
    "routing": {"minPrefillTokens": 0, "transfer": "shm"},
    "frontend": {"podTemplate": {"spec": {"containers": [{"name": "router", "env": ALWAYS}]}}},
    "pools": [
        pool("enc-cpu", "cpu", f"--sim-encode-seconds={FAST_MS / 1e3}"),
        pool("enc-xpu", "intel-xe", f"--sim-encode-seconds={SLOW_MS / 1e3}"),
        pool("prefill", "cpu", f"--sim-prefill-rate={PREFILL_RATE}"),
        pool("decode"),
    ],
}


@pytest.fixture(scope="module")
def node(operated: Access) -> Iterator[str]:
    """A node that takes pods and says that it has an XPU; what it said before it says again afterwards."""
    with without_devices(operated) as name:
        equip(operated, name, {label("xe"): "true", RACK: "7"}, {device("xe"): "1"})
        yield name


@pytest.fixture(scope="module")
def chain(operated: Access, node: str, record: Record) -> Iterator[Chain]:
    began = time.monotonic()
    with operated.namespace(**PRIVILEGED) as namespace, chained(operated, namespace, SPEC) as made:
        record("encoders, prefill and decode Ready and proved after apply, s", round(time.monotonic() - began, 1))
        yield made


@pytest.fixture
def chat(chain: Chain) -> Iterator[Chat]:
    chain.wait(chain.whole, "every stage is there")
    with chain.chat() as made:
        yield made


@pytest.fixture(scope="module")
def folder(chain: Chain) -> Iterator[NodeFolder]:
    found = NodeFolder(chain.deployed.pods("decode")[0])
    yield found
    found.close()


def test_every_condition_is_green(chain: Chain) -> None:
    true = {"Ready": "Serving", "ExactRoutingVerified": "Verified", "ChainComplete": "EveryStage"}
    true |= dict.fromkeys(("EncodersReady", "WorkersReady"), "AllReady")
    false = {"ShmPressure": "BelowHighWaterMark", "Degraded": "AsExpected"}
    expected = {type: ("True", reason) for type, reason in true.items()}
    expected |= {type: ("False", reason) for type, reason in false.items()}
    assert chain.conditions(*expected) == expected


def test_each_pools_pods_run_on_their_devices_nodes_with_their_roles_flags(chain: Chain, node: str) -> None:
    pods = {
        pod["metadata"]["labels"]["mmrouter.io/pool"]: pod
        for role in set(POOLS.values())
        for pod in chain.deployed.pods(role)
    }
    assert set(pods) == set(POOLS)
    for name, pod in pods.items():
        (engine,) = pod["spec"]["containers"]
        assert (pod["spec"]["nodeName"], pod["spec"]["nodeSelector"]) == (node, {RACK: "7"})
        wants_xpu = name == "enc-xpu"
        assert engine["resources"].get("limits", {}) == ({device("xe"): "1"} if wants_xpu else {})
        assert (label("xe") in json.dumps(pod["spec"]["affinity"])) is wants_xpu
    assert {name: flag_field(pod, EC_FLAG, "ec_role") for name, pod in pods.items()} == EC_ROLES
    devices = {name: flag_field(pod, "--kv-transfer-config", "kv_buffer_device") for name, pod in pods.items()}
    assert devices == {"enc-cpu": None, "enc-xpu": None, "prefill": "cpu", "decode": "cpu"}
    layouts = {name: pod["metadata"]["labels"]["mmrouter.io/compatibility"] for name, pod in pods.items()}
    assert layouts["prefill"] == layouts["decode"]


def test_embeddings_travel_in_the_memory_of_the_node_as_encoders_of_two_kinds_and_prefill_share_it(
    chain: Chain,
) -> None:
    pods = [pod for role in ("encoder", "prefill") for pod in chain.deployed.pods(role)]
    assert [flag_field(pod, EC_FLAG, "ec_connector") for pod in pods] == ["ECExampleConnector"] * 3
    folders = [flag_field(pod, EC_FLAG, "ec_connector_extra_config") for pod in pods]
    assert folders == [{"shared_storage_path": SHARED_DIR}] * 3
    assert [set(mounted(pod, SHARED_DIR)) for pod in pods] == [{"name", "hostPath"}] * 3
    (choice,) = [line for line in choices(chain.deployed) if line.startswith("embeddings")]
    assert "embeddings between enc-cpu, enc-xpu, prefill: ECExampleConnector" in choice
    assert "files in the memory that the pods of a node share, as the pools are cpu and intel-xe" in choice


@pytest.mark.parametrize("scenario", SCENARIOS, ids=title)
def test_scenario(scenario: Scenario, chat: Chat, chain: Chain) -> None:
    scenario(chat, chain.web)


def test_the_gate_passes_through_the_whole_chain(chain: Chain, chat: Chat) -> None:
    done = chain.reached.mmrouter("verify")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_request_goes_through_every_stage_explain_shows_them_and_its_image_is_encoded_once(
    chain: Chain, chat: Chat
) -> None:
    before = {role: sum(encoded(chain.deployed, role).values()) for role in set(POOLS.values())}
    decision = chat.decided(chat.image("a"), "what?")
    assert decision["form"] == "encode-prefill-decode"
    assert {note["stage"]: note["outcome"] for note in decision["chain"]} == IN_ORDER
    assert all(note["seconds"] > 0 for note in decision["chain"])
    ((prefill,), (decode,)) = (chain.deployed.pods(role) for role in ("prefill", "decode"))
    assert decision["worker"] == prefill["metadata"]["name"]
    assert decision["answers"] == decode["metadata"]["name"]
    shown = chain.reached.mmrouter("explain", decision["request_id"])
    assert "stages, of the form encode-prefill-decode" in shown.stdout, shown.stdout + shown.stderr
    chat.decided("and again, at another place?", chat.image("a"))
    after = {role: sum(encoded(chain.deployed, role).values()) for role in before}
    spent = {role: after[role] - before[role] for role in before}
    assert spent == {"encoder": decision["images"][0]["tokens"], "prefill": 0, "decode": 0}


def handed(chain: Chain, how: str, reason: str = "") -> float:
    """Return how many images the frontend counted that came by a way, or did not for a reason."""
    (pod,) = chain.deployed.pods("frontend")
    return samples(chain.deployed, pod, METRICS_PORT, "mmrouter_handover_total", how=how, reason=reason)


def test_images_reach_the_nodes_engines_as_files_of_which_nothing_stays(
    chain: Chain, chat: Chat, folder: NodeFolder
) -> None:
    before = handed(chain, "file")
    decision = chat.decided(chat.image("a"), chat.image("b"), "compare")
    encoders = next(note["workers"] for note in decision["chain"] if note["stage"] == "encode")
    reached = {(each["engine"], each["how"]) for each in decision["travelled"]}
    assert {engine for engine, _ in reached} >= {decision["worker"], decision["answers"]}
    assert {how for _, how in reached} == {"file"}
    assert encoders
    assert handed(chain, "file") - before == len(decision["travelled"])
    chain.wait(folder.emptied, "no image is left", GONE_SECONDS)


def test_encoders_get_images_by_the_rates_that_were_measured_and_not_by_their_kind(
    chain: Chain, chat: Chat, record: Record
) -> None:
    def show(name: str) -> None:
        chat.decided(*(chat.image(f"{name}-{number}") for number in range(8)), "compare")

    show("so that both are measured")
    before = encoded(chain.deployed, "encoder")
    with ThreadPoolExecutor(4) as clients:
        list(clients.map(show, "abcd"))
    after = encoded(chain.deployed, "encoder")
    spent = {name: after[name] - before[name] for name in after}
    share = spent["enc-cpu"] / sum(spent.values())
    record("share of the encoder that is three times as fast", round(share, 2))
    assert abs(share - SHARE) < NEAR, spent


def test_without_encoders_images_are_encoded_where_the_prompt_is_computed_until_there_are_some_again(
    chain: Chain, chat: Chat
) -> None:
    body = get(chain.deployed.cluster, RESOURCE, chain.deployed.namespace, chain.name)
    whole = deployment(chain.name, body["spec"])
    pools = [{**each, "replicas": 0} if each["role"] == "encoder" else each for each in whole["spec"]["pools"]]
    empty = {**whole, "spec": {**whole["spec"], "pools": pools}}
    wanted = {
        "Ready": ("False", "EncodersNotReady"),
        "EncodersReady": ("False", "ScaledToZero"),
        "ChainComplete": ("False", "NoEncoder"),
    }
    try:
        apply(chain.deployed.cluster, chain.deployed.namespace, empty)
        chain.wait(lambda: chain.conditions(*wanted) == wanted, "the conditions say that there are none")
        counted = chain.without("no_encoder")
        decision = chat.decided(chat.image("alone"), "what?")
        assert (decision["degraded"], decision["form"]) == (["no_encoder"], "prefill-decode")
        assert chain.without("no_encoder") == counted + 1
        shown = chain.reached.mmrouter("explain", decision["request_id"])
        assert "served without: no_encoder" in shown.stdout, shown.stdout + shown.stderr
    finally:
        apply(chain.deployed.cluster, chain.deployed.namespace, whole)
    chain.wait(chain.whole, "the encoders are back")
    decision = chat.decided(chat.image("together"), "what?")
    assert (decision["degraded"], decision["form"]) == ([], "encode-prefill-decode")


@pytest.mark.parametrize(
    ("role", "reason", "word", "form"),
    [
        ("encoder", "NoEncoder", "no_encoder", "prefill-decode"),
        ("prefill", "NoPrefill", "no_prefill", "whole"),
        ("decode", "NoDecode", "no_decode", "encode-whole"),
    ],
)
def test_a_pool_that_is_killed_costs_no_request_and_decision_condition_and_metric_say_so(
    chain: Chain, chat: Chat, folder: NodeFolder, role: str, reason: str, word: str, form: str, record: Record
) -> None:
    counted = chain.without(word)
    traffic, since = strike(chain, role, reason)
    without = [each for each in chain.decisions(since) if each["degraded"] == [word]]
    record(f"kill -9 of every {role}", f"{len(traffic.sent)} requests, {len(without)} went without")
    assert traffic.failed_before_streaming == [], traffic
    assert {each["form"] for each in without} == {form}
    assert chain.without(word) - counted == len(without)
    assert chat.decided(chat.image("back"), "what?")["degraded"] == []
    chain.wait(folder.emptied, "no image is left", GONE_SECONDS)


def test_a_frontend_that_is_killed_leaves_no_image_for_long(
    chain: Chain, chat: Chat, folder: NodeFolder, record: Record
) -> None:
    victim = process_here(chain.deployed.pods("frontend")[0], "router")
    impatient = replace(chat, client=chat.client.with_options(max_retries=0, timeout=GONE_SECONDS))

    def stopped_with_images() -> list[Entry]:
        if not folder.images():
            return []
        victim.stop()  # a process that runs may remove its images before a signal reaches it
        if not (left := folder.images()):
            victim.go_on()
        return left

    with ThreadPoolExecutor(8) as clients:
        # What becomes of them is not asked: there is no other frontend.
        images = (chat.image(f"in the middle {number}") for number in range(24))
        asked = [clients.submit(impatient.decided, image, "what?") for image in images]
        left = wait_for(stopped_with_images, 30, "images lie in the folder", every=0.001)
        gone = victim.kill()
        for each in asked:
            each.cancel()
        wait_for(folder.emptied, GONE_SECONDS, "no image is left")
        record("kill -9 of a frontend", f"{len(left)} images left, gone after {time.time() - gone:.1f} s")
    chain.wait(chain.whole, "it is back")


def test_a_full_folder_is_reported_and_images_travel_as_bytes_until_there_is_space(
    chain: Chain, chat: Chat, folder: NodeFolder
) -> None:
    wanted = {"ShmPressure": ("True", "AboveHighWaterMark")}
    file = os.open(f"{folder.path}/foreign-file", os.O_CREAT | os.O_WRONLY)
    try:
        os.posix_fallocate(file, 0, int(0.95 * SHARED_MIB * 2**20))
        chain.wait(lambda: chain.conditions(*wanted) == wanted, "the condition says that it is full")
        decision = chat.decided(chat.image("a"), "what?")
        assert {each["how"] for each in decision["travelled"]} == {"bytes"}
        assert {"how": "file", "reason": "full"} in decision["travelled"][0]["instead_of"]
        assert handed(chain, "file", "full") >= len(decision["travelled"])
    finally:
        os.close(file)
        os.unlink(f"{folder.path}/foreign-file")
    wanted = {"ShmPressure": ("False", "BelowHighWaterMark")}
    chain.wait(lambda: chain.conditions(*wanted) == wanted, "the condition says that there is room")
    decision = chat.decided(chat.image("b"), "what?")
    assert {each["how"] for each in decision["travelled"]} == {"file"}


def test_of_a_deleted_deployment_no_byte_stays_on_the_node(chain: Chain, folder: NodeFolder, record: Record) -> None:
    assert folder.entries()
    began = time.monotonic()
    delete(chain.deployed.cluster, RESOURCE, chain.deployed.namespace, chain.name)
    chain.wait(lambda: not folder.entries(), "the folder is empty")
    record("a deleted deployment's folder is empty after, s", round(time.monotonic() - began, 1))


SGLANG_SPEC = {
    "engine": {"type": "sglang", "kvConnector": {"transferBackend": "nixl"}},
    "pools": [
        {"name": "prefill", "role": "prefill", "replicas": 2, "accelerator": {"kind": "cpu"}},
        {"name": "decode", "role": "decode", "replicas": 1, "accelerator": {"kind": "cpu"}},
    ],
}


@pytest.fixture(scope="module")
def pairs(operated: Access, record: Record) -> Iterator[Chain]:
    began = time.monotonic()
    with operated.namespace(**RESTRICTED) as namespace, chained(operated, namespace, SGLANG_SPEC) as made:
        record("SGLang's pairs Ready and proved after apply, s", round(time.monotonic() - began, 1))
        yield made


def test_pairs_are_proved_and_a_picture_that_is_shown_again_is_a_whole_hit(pairs: Chain) -> None:
    expected = {
        "Ready": ("True", "Serving"),
        "ExactRoutingVerified": ("True", "Verified"),
        "ChainComplete": ("True", "EveryStage"),
    }
    assert pairs.conditions(*expected) == expected
    with pairs.chat() as chat:
        picture = chat.image("a")
        assert_whole(chat.send(picture, "what?"), chat.send(picture, "what?"))
        decision = chat.decided(picture, "and where?")
    (decode,) = pairs.deployed.pods("decode")
    assert (decision["form"], decision["answers"]) == ("prefill-decode", decode["metadata"]["name"])
    assert decision["worker"] in {pod["metadata"]["name"] for pod in pairs.deployed.pods("prefill")}


def test_a_prefill_engine_that_is_killed_costs_no_request(pairs: Chain, record: Record) -> None:
    traffic, since = strike(pairs, "prefill", "ReplicasMissing", count=1)
    again = [each for each in pairs.decisions(since) if len(each["attempts"]) > 1]
    summary = f"{len(traffic.sent)} requests, {len(again)} of them by another pair, {len(traffic.failed)} failed"
    record("kill -9 of one of two SGLang prefill engines", summary)
    assert traffic.failed_before_streaming == [], traffic
