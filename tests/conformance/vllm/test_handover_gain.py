"""Whether processed images pay off where they should: many large images at once, one API server, two renderers.

Figures are recorded, not judged, because they depend on the machine. What is judged: no request fails, and every image
reaches the engine in the way that the mode has.
"""

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx
import pytest
from artefacts import Record
from conformance.conftest import Shrunk
from conformance.engine_process import engine_args, require_memory
from conformance.engines import LOOPBACK_MEDIA, MAX_PIXELS, REPOSITORY, deployed, environment, manifest, pool
from conformance.workload import data_uri, picture
from local.rig import Deployment
from waiting import wait_for

pytestmark = pytest.mark.long_form

SIZE, IMAGES, AT_ONCE, REQUESTS, ROUNDS = (4032, 3024), 3, 4, 8, 3
"""A telephone's photographs. The processor shrinks them to few tokens, so that reading them is most of the work."""
MODES = ("none", "shm")


@pytest.fixture
def deployment(request: pytest.FixtureRequest, vllm_env: Path, shrunk: Shrunk, tmp_path: Path) -> Iterator[Deployment]:
    """One engine and two renderers, with ``routing.transfer`` and the frontend's environment of the parameter."""
    require_memory(engines=2)
    transfer, variables = request.param
    shared = {"sharedMemory": {"scope": "node", "size": "1Gi"}}
    pools = [pool("worker", **shared), pool("renderer", replicas=2, **shared)]
    router = {"name": "router", "env": environment(variables)}
    made = manifest(
        shrunk(REPOSITORY),
        {"type": "vllm", "args": [*engine_args(), "--api-server-count=1"], "processor": {"maxPixels": MAX_PIXELS}},
        pools,
        frontend={"podTemplate": {"spec": {"containers": [router]}}},
        routing={"media": LOOPBACK_MEDIA, "transfer": transfer},
    )
    with deployed(vllm_env, tmp_path, made) as deployment:
        yield deployment


def use(deployment: Deployment, mode: str) -> None:
    """Restart the frontend with a mode."""
    (router,) = deployment.processes("router").values()
    config = Path(router.environ()["MMROUTER_CONFIG"]) / "deployment.json"
    resource = json.loads(config.read_text())
    resource["spec"]["routing"]["transfer"] = mode
    config.write_text(json.dumps(resource))
    router.terminate()
    router.wait(60)
    wait_for(deployment.settled, 60, "the frontend is back and sees every engine verified")


def body(seed: int) -> dict[str, Any]:
    images = [picture(*SIZE, seed=seed * IMAGES + number, form="JPEG") for number in range(IMAGES)]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": data_uri(data)}} for data in images]
    text = {"type": "text", "text": f"{secrets.token_hex(8)} what?"}
    return {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": [text, *parts]}]}


class Measured(NamedTuple):
    """Seconds of all requests and the median of one; how many images came by each way, and why not processed."""

    seconds: float
    median: float
    ways: Counter[str]
    reasons: Counter[str]


async def run(deployment: Deployment, first: int) -> Measured:
    bodies = [json.dumps(body(first + number)) for number in range(REQUESTS)]
    turns, seconds, ways, reasons = asyncio.Semaphore(AT_ONCE), [], Counter[str](), Counter[str]()
    url = deployment.run["frontends"][0]["url"]
    async with httpx.AsyncClient(timeout=300) as client:

        async def ask(content: str) -> None:
            async with turns:
                began = time.monotonic()
                answer = await client.post(f"{url}/v1/chat/completions", content=content)
                seconds.append(time.monotonic() - began)
            assert answer.status_code == 200, answer.text
            for image in deployment.decision(answer)["travelled"]:
                ways[image["how"]] += 1
                reasons.update({fallback["reason"] for fallback in image["instead_of"] if fallback["how"] == "shm"})

        began = time.monotonic()
        await asyncio.gather(*map(ask, bodies))
        return Measured(time.monotonic() - began, median(seconds), ways, reasons)


def by_shm(deployment: Deployment) -> bool:
    """Whether a new request's images reached the engine through shared memory."""
    url = f"{deployment.run['frontends'][0]['url']}/v1/chat/completions"
    answer = httpx.post(url, json=body(secrets.randbits(20)), timeout=300)
    return any(image["how"] == "shm" for image in deployment.decision(answer)["travelled"])


# What is measured is a mode, so the frontend compares nothing itself.
@pytest.mark.parametrize("deployment", [("shm", {"MMROUTER_HANDOVER": "always"})], indirect=True)
def test_many_large_images_at_once_with_and_without_renderers(deployment: Deployment, record: Record) -> None:
    whole: dict[str, list[float]] = {mode: [] for mode in MODES}
    each: dict[str, list[float]] = {mode: [] for mode in MODES}

    for turn in range(ROUNDS):
        for mode in MODES if turn % 2 else MODES[::-1]:
            use(deployment, mode)
            if mode == "shm":
                wait_for(lambda: by_shm(deployment), 120, "the router knows the plugins")
            measured = asyncio.run(run(deployment, 1000 * (turn + 1) + 100 * MODES.index(mode)))
            whole[mode].append(measured.seconds)
            each[mode].append(measured.median)
            ways = set(measured.ways)
            assert ways <= ({"shm", "inline"} if mode == "shm" else {"bytes"}), ways
    for mode in MODES:
        record(f"images per s, {mode}", round(REQUESTS * IMAGES / median(whole[mode]), 2))
        record(f"median request, s, {mode}", round(median(each[mode]), 3))
    record("requests with renderers over without, time", round(median(whole["shm"]) / median(whole["none"]), 3))


@pytest.mark.parametrize("deployment", [("auto", {})], indirect=True)
def test_auto_measures_both_ways_and_names_the_measurement_where_it_uses_no_renderer(
    deployment: Deployment, record: Record
) -> None:
    """Which way wins depends on the machine, so a run is judged by the router's own reasons."""
    wait_for(lambda: by_shm(deployment), 120, "the router knows the plugins")
    rounds = [asyncio.run(run(deployment, 10_000 * (turn + 1))) for turn in range(ROUNDS)]
    processed = [ways["shm"] + ways["inline"] for ways in (each.ways for each in rounds)]
    assert 0 < sum(processed) < ROUNDS * REQUESTS * IMAGES
    assert {reason for each in rounds for reason in each.reasons} == {"slower"}
    record("images per s, auto, after both ways were measured", round(REQUESTS * IMAGES / rounds[-1].seconds, 2))
    record("images processed by a renderer of those", f"{processed[-1]} of {REQUESTS * IMAGES}")
