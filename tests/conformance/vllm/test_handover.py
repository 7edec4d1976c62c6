"""Processed images handed from a real renderer to a real engine, by every way: the engine computes the same.

Both are started from the stock environment with the product's wrapper, and the plugin from the folder that
``mmrouter plugin`` makes. One renderer and one engine of each release serve the whole file; the test that kills the
renderer is the last.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
import pytest
from artefacts import ROOT
from conformance.conftest import Shrunk
from conformance.engine_process import API_KEY, BLOCK_SIZE, TESTED_KERNELS, Engine, engine, tail
from conformance.rendering import Renderer, renderer
from conformance.setups import NEWER
from conformance.workload import data_uri, picture
from waiting import wait_for

from handover.tests.support import without_bytes
from mmrouter_handover.shm import ledger, reclaim
from mmrouter_lib.engines.base.events import Stored
from mmrouter_lib.engines.vllm import plugin_api as wire
from mmrouter_lib.media_identity import to_wire

MODEL = "Qwen/Qwen2-VL-2B-Instruct"
SMALL, LARGE = (224, 224), (1008, 1008)
SECONDS = 60.0
PAUSES = 10.0
"""Seconds of several pauses after a failed connection by NIXL."""
WEIGHTS = ("--load-format", "auto")


@dataclass(frozen=True)
class Sides:
    """``root``: the shared tmpfs."""

    renderer: Renderer
    engine: Engine
    root: Path


NEWER_ENGINE = [pytest.mark.long_form, pytest.mark.proves("vllm", NEWER, "qwen2_vl")]


@pytest.fixture(scope="module", params=["vllm_env", pytest.param("newer_vllm_env", marks=NEWER_ENGINE)])
def sides(
    request: pytest.FixtureRequest, vllm_env: Path, shrunk: Shrunk, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sides]:
    env: Path = request.getfixturevalue(request.param)
    folder = tmp_path_factory.mktemp("handover")
    model = weighted(shrunk(MODEL), folder / "models", vllm_env)
    plugin = folder / "plugin"
    made = subprocess.run(
        [sys.executable, "-m", "mmrouter_cli", "plugin", str(plugin)], capture_output=True, text=True, check=True
    )
    assert "mmrouter_handover" in made.stdout
    wrapper = [str(env / "bin" / "python3"), "-m", "mmrouter_handover.plugin.start"]
    with ExitStack() as running:
        # The hand-over by shared memory needs a tmpfs.
        root = Path(running.enter_context(TemporaryDirectory(dir="/dev/shm", prefix="mmrouter-handover-")))
        variables = TESTED_KERNELS | {
            "PYTHONPATH": str(plugin),
            "MMROUTER_SHARED_DIR": str(root),
            "MMROUTER_HANDOVER_WAYS": "nixl,shm,inline",
            "MMROUTER_HANDOVER_BYTES": str(256 << 20),
            "UCX_TLS": "tcp,self,sm",
            "UCX_NET_DEVICES": "lo",  # others, such as a node's bridge, may vanish while the engines run
            "VLLM_API_KEY": API_KEY,
            "VLLM_SERVER_DEV_MODE": "1",
        }
        log = folder / "renderer.log"
        renders = running.enter_context(
            renderer(env, model, log, "--dtype", "float32", wrapper=wrapper, variables=variables)
        )
        renders.client.headers["authorization"] = f"Bearer {API_KEY}"
        serves = running.enter_context(
            engine(env, model, folder / "engine.log", *WEIGHTS, wrapper=wrapper, variables=variables)
        )
        yield Sides(renders, serves, root)


def weighted(model: Path, into: Path, env: Path) -> Path:
    """Return a copy of a model folder with weights, so that an answer depends on every pixel."""
    copy = Path(shutil.copytree(model, into / model.name))
    python = str(env / "bin" / "python3")
    environ = {**os.environ, "VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1"}
    subprocess.run(
        [python, str(ROOT / "hack" / "engines" / "shrink_model.py"), "--weights", str(copy)],
        env=environ,
        capture_output=True,
        check=True,
    )
    return copy


def name(*what: object) -> str:
    """Return a new identity: a renderer caches processed images by it."""
    return to_wire(hashlib.sha256(repr(what).encode()).digest())


def chat(sides: Sides, *images: tuple[str, bytes], tokens: int = 8) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "What is to be seen? " + "Look closely. " * 8}]
    for uuid, data in images:
        parts.append({"type": "image_url", "image_url": {"url": data_uri(data)}, "uuid": uuid})
    parts.append({"type": "text", "text": "Say it in one word."})
    messages = [{"role": "user", "content": parts}]
    return {"model": sides.engine.model, "messages": messages, "max_tokens": tokens}


def ask(client: httpx.Client, path: str, body: Any, status: int = 200) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    # The client retries on a closed connection; these routes are idempotent.
    answer = client.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    return answer.content


def status(client: httpx.Client) -> tuple[wire.Status, dict[str, int]]:
    raw = client.get(wire.STATUS_PATH).raise_for_status().content
    return wire.read_status(raw), json.loads(raw)["counts"]


def rendered(sides: Sides, body: Mapping[str, Any], *ways: wire.Way, seconds: float = SECONDS) -> wire.Rendered:
    asked = wire.render_request(body, ways=ways, seconds=seconds, inline_bytes=64 << 20)
    return wire.read_render(ask(sides.renderer.client, wire.RENDER_PATH, asked))


def taken(sides: Sides, offers: Mapping[str, wire.Offer]) -> wire.Taken:
    request = wire.items_request(offers, seconds=SECONDS)
    answer = wire.read_items(ask(sides.engine.client, wire.ITEMS_PATH, request))
    if answer.refused:
        print(tail(sides.engine.log))  # pytest shows it if the test fails: the log has the error behind a reason
    return answer


def release(sides: Sides, made: wire.Rendered) -> None:
    ask(sides.renderer.client, wire.RELEASE_PATH, wire.release_request(made.lease))


def forget(sides: Sides) -> None:
    """Clear the engine's blocks, embeddings and processed images, so that it computes the next request."""
    for cache in ("prefix", "mm", "encoder"):
        sides.engine.client.post(f"/reset_{cache}_cache").raise_for_status()


def computed(sides: Sides, body: Mapping[str, Any]) -> tuple[Any, ...]:
    """Send a chat to an engine with empty caches; return prompt, answer, probabilities and published blocks."""
    seen = len(sides.engine.listener.frames)
    answer = sides.engine.chat({**body, "logprobs": True, "top_logprobs": 5})
    choice = answer["choices"][0]
    # The last generated token is in no block yet.
    full = (len(answer["prompt_token_ids"]) + len(choice["token_ids"]) - 1) // BLOCK_SIZE
    return answer["prompt_token_ids"], choice["token_ids"], choice["logprobs"]["content"], stored(sides, seen, full)


def stored(sides: Sides, seen: int, count: int, seconds: float = 20) -> list[tuple[Any, ...]]:
    """Wait until ``count`` blocks were published after the first ``seen`` messages, and return them one by one."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        blocks = [
            block
            for batch in sides.engine.listener.batches()[seen:]
            for event in batch.events
            if isinstance(event, Stored)
            for block in blocks_of(event)
        ]
        if len(blocks) >= count:
            return blocks
        time.sleep(0.05)
    pytest.fail(f"{count} blocks were not published within {seconds:g} s")


def blocks_of(event: Stored) -> Iterator[tuple[Any, ...]]:
    """Hash, the hash before it, tokens, what else the hash is made of, and the images of each block."""
    for number, value in enumerate(event.hashes):
        ids = event.ids[number * event.block_size : (number + 1) * event.block_size].tolist()
        spans = [(identity, place) for block, identity, place in event.spans if block == number]
        yield value, event.hashes[number - 1] if number else event.parent, ids, event.extras.get(number), spans


PICTURES: dict[str, Sequence[bytes]] = {
    "a small one": [picture(*SMALL, seed=3)],
    "a large one": [picture(*LARGE, seed=4, form="JPEG")],
    "two of unequal size, one of them twice": [picture(*SMALL, seed=5), picture(640, 480, seed=6)],
}


@pytest.mark.parametrize("way", wire.WAYS)
@pytest.mark.parametrize("case", list(PICTURES))
def test_an_engine_computes_of_handed_over_images_what_it_computes_of_its_own_processing(
    sides: Sides, way: wire.Way, case: str
):
    if why := status(sides.renderer.client)[0].ways[way] or status(sides.engine.client)[0].ways[way]:
        pytest.skip(f"not run: {why}")
    pictures = PICTURES[case]
    images = [(name(data), data) for data in pictures]
    body = chat(sides, *images, *images[:1] if len(images) > 1 else ())
    forget(sides)
    own = computed(sides, body)
    forget(sides)
    made = rendered(sides, body, way)
    assert {uuid: offer.way for uuid, offer in made.offers.items()} == {uuid: way for uuid, _ in images}
    assert made.ids.tolist() == own[0]
    before = status(sides.engine.client)[1]
    wait_for(
        lambda: taken(sides, made.offers) == wire.Taken(frozenset(made.offers), {}),
        PAUSES,
        "all images are taken, also where the first connection by NIXL fails",
    )
    release(sides, made)
    bare = without_bytes(body, made.offers.keys())
    assert b"base64" not in json.dumps(bare).encode()
    assert computed(sides, bare) == own
    after = status(sides.engine.client)[1]
    assert after["used"] - before.get("used", 0) == len(images)
    assert after["kept bytes"] == after["kept"] == 0
    # Other pixels under these names change the answer, so the comparison depends on the images.
    forget(sides)
    others = [(uuid, picture(*SMALL, seed=40 + number)) for number, (uuid, _) in enumerate(images)]
    assert computed(sides, chat(sides, *others))[2] != own[2]


def test_an_image_that_was_not_handed_over_is_a_cache_miss_and_its_bytes_succeed(sides: Sides):
    images = [(name(2000), PICTURES["a small one"][0])]
    body = chat(sides, *images, tokens=2)
    refused = sides.engine.post(without_bytes(body, {name(2000)}))
    assert wire.is_cache_miss(refused.status_code, refused.content)
    answered = sides.engine.post(body)
    assert answered.status_code == 200
    assert not wire.is_cache_miss(answered.status_code, answered.content)


def test_what_cannot_be_taken_is_refused_with_its_reason_and_the_engine_goes_on(sides: Sides):
    body = chat(sides, (name(3000), picture(*SMALL, seed=7)))
    made = {way: rendered(sides, body, way) for way in ("shm", "nixl", "inline")}
    offers = {way: json.loads(one.offers[name(3000)].raw) for way, one in made.items()}
    other = name(3001)
    tries = {
        "another image's": ({other: offers["inline"]}, "refused"),
        "not all of it": ({other: {**offers["inline"], "data": offers["inline"]["data"][:64]}}, "truncated"),
        "no such slot": ({other: {**offers["shm"], "handle": {"path": "../../etc/passwd"}}}, "refused"),
        "no such memory": ({other: {**offers["nixl"], "address": 4096}}, "failed"),
    }
    for label, (items, reason) in tries.items():
        raw = ask(sides.engine.client, wire.ITEMS_PATH, {"items": items, "seconds": SECONDS})
        assert wire.read_items(raw) == wire.Taken(frozenset(), {other: reason}), label
    for one in made.values():
        release(sides, one)
    for way in ("shm", "nixl"):
        assert taken(sides, made[way].offers).refused == {name(3000): "stale"}, way
    assert taken(sides, made["inline"].offers).held == {name(3000)}
    for path, asked in ((wire.ITEMS_PATH, {"items": 1}), (wire.RELEASE_PATH, {}), (wire.RENDER_PATH, {"chat": 1})):
        client = sides.engine.client if path == wire.ITEMS_PATH else sides.renderer.client
        ask(client, path, asked, 400)
    without_key = httpx.get(f"{sides.engine.url}{wire.STATUS_PATH}")
    assert without_key.status_code == 401


def test_a_renderer_withholds_what_it_cannot_offer_and_reports_the_ways_that_failed(sides: Sides):
    body = chat(sides, (name(4000), picture(*SMALL, seed=8)))
    asked = wire.render_request(
        body, ways=("inline", "shm"), seconds=SECONDS, inline_bytes=1, images=[name(4000), name(1)]
    )
    made = wire.read_render(ask(sides.renderer.client, wire.RENDER_PATH, asked))
    assert {uuid: offer.way for uuid, offer in made.offers.items()} == {name(4000): "shm"}
    assert (made.fell, made.withheld) == ((("inline", "large"),), {name(1): "unnamed"})
    release(sides, made)
    made = wire.read_render(ask(sides.renderer.client, wire.RENDER_PATH, {**asked, "ways": ["inline"]}))
    assert (made.offers, made.withheld[name(4000)]) == ({}, "large")
    text = chat(sides)
    made = rendered(sides, text, "shm")
    assert (made.offers, made.withheld, made.spans) == ({}, {}, ())


def test_both_sides_report_equal_settings_and_the_engine_keeps_the_plugins_of_its_image(sides: Sides):
    here, there = status(sides.renderer.client)[0], status(sides.engine.client)[0]
    assert (here.role, there.role) == ("renderer", "engine")
    assert here.settings == there.settings
    assert len(here.settings) == 64
    for side in (here, there):
        assert all(side.offers(way) for way in wire.WAYS), side
    plugin = json.loads(sides.engine.client.get(wire.STATUS_PATH).content)
    assert plugin["engine"].partition("+")[0] in plugin["releases"]
    # The plugins of the stock environment are loaded as they are without ours.
    variable = psutil.Process(sides.engine.process.pid).environ()["VLLM_PLUGINS"].split(",")
    assert variable[-1] == "mmrouter"
    assert len(variable) > 1


def test_the_replay_holds_what_was_published_live(sides: Sides):
    live = list(sides.engine.listener.frames)
    assert sides.engine.listener.replayed()[: len(live)] == live
    assert [number for number, _ in live] == list(range(len(live)))
    assert live


def clock() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def test_a_killed_renderer_fails_what_it_offered_with_a_reason_drains_no_pool_and_leaves_no_byte(sides: Sides):
    seconds = 5.0
    images = [(name(7000 + number), picture(*SMALL, seed=20 + number)) for number in range(4)]
    made = {way: rendered(sides, chat(sides, *images), way, seconds=seconds) for way in ("shm", "nixl")}
    engines_before = status(sides.engine.client)[1]
    assert ledger(sides.root, clock()).bytes > 0
    process = sides.renderer.process
    assert process is not None
    process.kill()
    process.wait(30)
    for _ in range(10):
        assert set(taken(sides, made["nixl"].offers).refused.values()) == {"failed"}
    after = status(sides.engine.client)[1]
    assert after["nixl leased bytes"] == after["nixl stuck"] == 0
    assert after["refused failed"] >= engines_before.get("refused failed", 0) + 40
    # Files on the tmpfs outlive their writer until their lease ends.
    held = taken(sides, dict(list(made["shm"].offers.items())[:2]))
    assert len(held.held) == 2
    deadline = time.monotonic() + seconds + 5
    while ledger(sides.root, clock()).bytes and time.monotonic() < deadline:
        reclaim(sides.root, clock())
        time.sleep(0.1)
    assert ledger(sides.root, clock()).bytes == 0
    assert set(taken(sides, dict(list(made["shm"].offers.items())[2:])).refused.values()) <= {"gone", "stale"}
    assert sides.engine.healthy()
