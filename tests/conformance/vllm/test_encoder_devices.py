"""Two real encoders of different speed before one real engine, with the connector that the operator chooses itself.

The slow encoder's process is stopped for seven eighths of the time, as a CPU quota of the kernel does. The vision tower
is wider than that of other shrunk models, so that a request waits mostly for its images. What is asserted does not
depend on the machine's speed: which encoder got which image, how often images were encoded, that no request fails, and
which mode is faster by a multiple.
"""

import json
import os
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from artefacts import Record
from conformance.conftest import model_folder
from conformance.engine_process import require_memory
from conformance.engines import REPOSITORY, deployed, pool, resource
from local.rig import Deployment
from scenarios import Chat, open_chat
from waiting import wait_for

from hack.engines.shrink_model import shrink

# test_encoders.py has a real encoder beside an engine in every run, and tests/local/test_disaggregated.py the modes.
pytestmark = pytest.mark.long_form
RUNS, SHARE = 0.1, 1 / 8
"""Seconds for which the slow encoder runs at a time, and that as a share of all time. Shorter ones limit it less on a
busy machine, whose scheduler prefers a process that has just been continued.
"""
LONGEST_STOP = 2.0
"""Seconds: below the timeout of a health check."""
TOWER = {"depth": 2, "embed_dim": 128, "num_heads": 4, "mlp_ratio": 4}
SIDE = 336
"""Pixels of the measured images: 144 visual tokens."""
ROUNDS = 4  # an even number, because whole requests take turns


@pytest.fixture(scope="module")
def deployment(vllm_env: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    require_memory(engines=3)
    folder = tmp_path_factory.mktemp("devices")
    shrink(model_folder(REPOSITORY.replace("/", "--")), folder / "model", TOWER)
    scope = {"sharedMemory": {"scope": "pod"}}  # embeddings then go by files of a volume
    pools = [{**pool("encoder", **scope), "name": name} for name in ("fast", "slow")]
    made = resource(folder / "model", [*pools, pool("worker", **scope)])
    with deployed(vllm_env, folder, made) as deployment, quota(processes(deployment, "demo-slow-")):
        yield deployment


def processes(deployment: Deployment, prefix: str) -> list[psutil.Process]:
    """Return the engine processes of the pods with this name: the API server, and its engine below it."""
    found = [
        child
        for child in psutil.Process(deployment.process.pid).children(recursive=True)
        if child.environ().get("POD_NAME", "").startswith(prefix) and "VLLM_API_KEY" in child.environ()
    ]
    assert found, prefix
    below = [child for process in found for child in process.children(recursive=True)]
    return list(dict.fromkeys([*found, *below]))


@contextmanager
def quota(limited: list[psutil.Process]) -> Iterator[None]:
    """Let processes run for :data:`SHARE` of the time."""
    ended = threading.Event()

    def everyone(number: signal.Signals) -> None:
        for process in limited:
            if process.is_running():
                os.kill(process.pid, number)

    def turns() -> None:
        began = time.monotonic()
        while not ended.wait(RUNS):
            everyone(signal.SIGSTOP)
            ran = time.monotonic() - began  # longer than planned on a busy machine
            time.sleep(min(LONGEST_STOP, ran * (1 / SHARE - 1)))
            everyone(signal.SIGCONT)
            began = time.monotonic()

    thread = threading.Thread(target=turns, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def decided(deployment: Deployment, chat: Chat, mode: str, *content: Any) -> tuple[dict[str, Any], float]:
    """Ask by a mode of encoder scheduling; return the stage ``encode`` and the seconds until the answer."""
    headers = {"x-mmrouter-encoder-mode": mode}
    began = time.monotonic()
    raw = chat.client.chat.completions.with_raw_response.create(
        model="demo", messages=chat.messages(*content), max_tokens=1, extra_headers=headers
    )
    seconds = time.monotonic() - began
    (encode,) = [stage for stage in deployment.decision(raw)["chain"] if stage["stage"] == "encode"]
    return encode, seconds


def encoders(stage: dict[str, Any]) -> list[str]:
    """Return the pool of each image's encoder."""
    return [placed["encoder"].split("-")[1] for placed in stage["placed"]]


def images(chat: Chat, name: str, count: int, side: int = 224) -> list[Any]:
    return [chat.image(f"{name} {number}", side) for number in range(count)]


def work(deployment: Deployment) -> dict[str, Any]:
    """Return each encoder's figures for the router, by pool."""
    with deployment.control() as client:
        rows = client.get("/control/encoders").raise_for_status().json()
    return {row["id"].split("-")[1]: row for row in rows}


def test_the_operators_connector_hands_embeddings_over(deployment: Deployment, chat: Chat) -> None:
    environ = processes(deployment, "demo-worker-")[0].cmdline()
    config = environ[environ.index("--ec-transfer-config") + 1]
    assert "ECExampleConnector" in config
    folder = Path(config.partition('"shared_storage_path":"')[2].partition('"')[0])
    encode, _ = decided(deployment, chat, "auto", chat.image("first"), "what?")
    assert encode["outcome"] == "done"
    written = [path.parent.name for path in folder.glob("*/encoder_cache.safetensors")]
    assert {placed["identity"] for placed in encode["placed"]} <= set(written)


def test_images_of_a_request_are_split_over_both_encoders(deployment: Deployment, chat: Chat) -> None:
    encode, _ = decided(deployment, chat, "perImage", *images(chat, "split", 4), "what?")
    assert Counter(encoders(encode)) == {"fast": 2, "slow": 2}


def test_whole_requests_take_turns(deployment: Deployment, chat: Chat) -> None:
    taken = []
    for number in range(4):
        encode, _ = decided(deployment, chat, "perRequest", *images(chat, f"whole {number}", 2), "what?")
        taken.append(set(encoders(encode)))
    assert Counter(next(iter(each)) for each in taken if len(each) == 1) == {"fast": 2, "slow": 2}


def test_auto_encodes_each_image_once_and_uses_what_is_held(deployment: Deployment, chat: Chat) -> None:
    content = images(chat, "auto", 3)
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(decided, deployment, chat, "auto", *content, f"{n}?") for n in range(3)]
        stages = [each.result()[0] for each in asked]
    how = Counter(placed["how"] for stage in stages for placed in stage.get("placed", ()))
    assert how["queued"] == 3, "once each, whichever request came first"


def test_auto_answers_sooner_than_modes_that_take_turns(deployment: Deployment, chat: Chat) -> None:
    """Prints the time to the first token by mode, in turns, for docs/disaggregation.md. Both other modes take about
    three times as long, on an idle and on a busy machine.
    """
    decided(deployment, chat, "perImage", *images(chat, "warm", 4, SIDE), "what?")  # the router then has both rates
    seconds: dict[str, list[float]] = {"auto": [], "perImage": [], "perRequest": []}
    encoding: dict[str, list[float]] = {mode: [] for mode in seconds}
    share: dict[str, Counter[str]] = {mode: Counter() for mode in seconds}
    before = work(deployment)
    for number in range(ROUNDS):
        for mode, measured in seconds.items():
            encode, took = decided(deployment, chat, mode, *images(chat, f"{mode} {number}", 4, SIDE), "what?")
            assert (encode["outcome"], len(encode["placed"])) == ("done", 4)
            measured.append(took)
            encoding[mode].append(encode["seconds"])
            share[mode].update(encoders(encode))
    for mode, measured in seconds.items():
        for what, values in (("first token", measured), ("encoding", encoding[mode])):
            mean, median, most = (1000 * of(values) for of in (statistics.mean, statistics.median, max))
            print(f"{mode}: {what}: mean {mean:.0f}, median {median:.0f}, most {most:.0f} ms; images {share[mode]}")
    for name, after in work(deployment).items():
        spent, encoded = (after[key] - before[name][key] for key in ("busy_seconds", "images"))
        print(f"{name}: {1000 * spent / encoded:.0f} ms per image, {encoded} images")
    assert share["auto"]["fast"] > share["auto"]["slow"]
    for of in (statistics.mean, statistics.median):
        assert min(seconds, key=lambda mode: of(seconds[mode])) == "auto", seconds


def test_the_bench_measures_each_mode_on_the_same_engines(deployment: Deployment, tmp_path: Path) -> None:
    file = tmp_path / "modes.json"
    load = f"--requests 12 --concurrency 4 --turns 1 --image-share 1 --image-reuse 0 --image-size {SIDE}x{SIDE}"
    shape = "--system-tokens 16 --text-tokens 16 --output-tokens 8 --ignore-eos --timeout 600"
    modes = ["--encoder-modes", "auto,perImage,perRequest", "--json", str(file)]
    done = deployment.mmrouter("bench", deployment.url, *load.split(), *shape.split(), *modes)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(file.read_text())
    assert [result["encoder_mode"] for result in results] == ["auto", "perImage", "perRequest"]
    for result in results:
        assert (result["answered"], result["failures"]) == (12, {})
        assert sum(encoder["images"] for encoder in result["encoders"].values()) == 12
        assert all(0 <= encoder["busy"] <= 1 for encoder in result["encoders"].values())
        assert result["encoder_mode"] == "auto" or all(encoder["images"] for encoder in result["encoders"].values())


@pytest.mark.parametrize("frontends", [2, 4])
def test_images_are_encoded_once_for_all_frontends(
    vllm_env: Path, tmp_path: Path, frontends: int, record: Record
) -> None:
    """Each image is shown through all frontends at the same time; each frontend counts what it let encoders do."""
    require_memory(engines=3)
    shrink(model_folder(REPOSITORY.replace("/", "--")), tmp_path / "model", TOWER)
    scope = {"sharedMemory": {"scope": "pod"}}
    pools = [{**pool("encoder", **scope), "name": name} for name in ("one", "other")]
    made = resource(tmp_path / "model", [*pools, pool("worker", **scope)])
    made["spec"]["frontend"]["replicas"] = frontends
    with deployed(vllm_env, tmp_path, made) as deployment:
        wait_for(deployment.settled, 300, "every engine is verified on every frontend")
        with open_chat(deployment) as chat:
            shown = images(chat, "shown", 24, SIDE)
            asked = [chat.messages(shown[n // frontends], f"question {n}") for n in range(24 * frontends)]
        before = visual_tokens(deployment)
        urls = [control.replace(":8001", ":8000") for control in deployment.controls]

        def ask(number: int) -> None:
            body = {"model": "demo", "messages": asked[number], "max_tokens": 1}
            url = f"{urls[number % frontends]}/v1/chat/completions"
            httpx.post(url, json=body, timeout=600).raise_for_status()

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(ask, range(len(asked))))
        encoded = visual_tokens(deployment) - before
    record(f"vLLM, 24 images through {frontends} frontends: visual tokens encoded", encoded)
    assert encoded == 24 * (SIDE // 28) ** 2


def visual_tokens(deployment: Deployment) -> int:
    """Return the visual tokens that all frontends' encoders have encoded."""
    total = 0
    for number in range(len(deployment.controls)):
        with deployment.control(number) as client:
            rows = client.get("/control/encoders").raise_for_status().json()
        total += sum(row["tokens"] for row in rows)
    return total


def test_an_encoder_that_is_killed_under_a_request_fails_none(deployment: Deployment, chat: Chat) -> None:
    """The slow encoder is ended as soon as it has an image; the last test, because it takes long to come back."""
    with ThreadPoolExecutor(4) as threads, open_chat(deployment, max_retries=0) as plain:
        content = [images(plain, f"killed {number}", 4) for number in range(4)]
        asked = [threads.submit(decided, deployment, plain, "perImage", *each, "what?") for each in content]

        def has_work() -> bool:
            with deployment.control() as client:
                rows = client.get("/control/encoders").raise_for_status().json()
            return any("slow" in row["id"] and row["running"] for row in rows)

        wait_for(has_work, 60, "the slow encoder has an image")
        for process in processes(deployment, "demo-slow-"):
            process.kill()
        stages = [each.result(timeout=300)[0] for each in asked]
    assert all(stage["outcome"] == "done" for stage in stages)
    assert all(len(stage["placed"]) == 4 for stage in stages)
