"""Whether processed images pay off where they should: many large images at once, one API server, two renderers.

Figures are recorded, not judged, because they depend on the machine. What is judged: no request fails, every image
reaches the engine in the way that the mode has, and ``auto`` takes the way that it measured to be cheaper.
"""

import asyncio
import itertools
import json
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
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

from mmrouter_router.handover.ways import AUTO_GAIN

pytestmark = pytest.mark.long_form

SIZE, IMAGES, AT_ONCE, REQUESTS, ROUNDS = (4032, 3024), 3, 4, 32, 3
"""A telephone's photographs. The processor shrinks them to few tokens, so that reading them is most of the work."""
AUTO_REQUESTS = 96
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


@cache
def photograph() -> bytes:
    return picture(*SIZE, form="JPEG")


def body() -> dict[str, Any]:
    """Return a request with new images: the same picture, each time with another comment."""
    images = []
    for _ in range(IMAGES):
        comment = secrets.token_bytes(16)
        start, rest = photograph()[:2], photograph()[2:]
        images.append(start + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + rest)
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": data_uri(data)}} for data in images]
    text = {"type": "text", "text": f"{secrets.token_hex(8)} what?"}
    return {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": [text, *parts]}]}


class Measured(NamedTuple):
    """Seconds of all requests and the median of one; how many images were handed over by each way."""

    seconds: float
    median: float
    ways: Counter[str]


async def run(deployment: Deployment, requests: int) -> Measured:
    """Send as many requests; with 0 until the frontend knows the costs of both ways."""
    seconds, ways = list[float](), Counter[str]()
    url = deployment.run["frontends"][0]["url"]
    numbers = itertools.takewhile(
        lambda number: number < requests or not (requests or known(deployment)), itertools.count()
    )
    async with httpx.AsyncClient(timeout=300) as client:

        async def ask() -> None:
            for _ in numbers:
                began = time.monotonic()
                answer = await client.post(f"{url}/v1/chat/completions", json=body())
                seconds.append(time.monotonic() - began)
                assert answer.status_code == 200, answer.text
                ways.update(image["how"] for image in deployment.decision(answer)["travelled"])

        began = time.monotonic()
        await asyncio.gather(*(ask() for _ in range(AT_ONCE)))
        return Measured(time.monotonic() - began, median(seconds), ways)


def costs(deployment: Deployment) -> list[float]:
    """Return the measured costs of the engine's and the renderers' processing."""
    return [deployment.metric("mmrouter_handover_cost_seconds", by=by) for by in ("engine", "renderer")]


def known(deployment: Deployment) -> bool:
    return all(costs(deployment))


def plugins(deployment: Deployment) -> int:
    """Return how often a frontend has heard from a new plugin."""
    return sum("plugin:" in line for line in deployment.log)


def by_shm(deployment: Deployment) -> bool:
    """Whether a new request's images reached the engine through shared memory."""
    answer = httpx.post(f"{deployment.run['frontends'][0]['url']}/v1/chat/completions", json=body(), timeout=300)
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
            measured = asyncio.run(run(deployment, REQUESTS))
            whole[mode].append(measured.seconds)
            each[mode].append(measured.median)
            ways = set(measured.ways)
            assert ways <= ({"shm", "inline"} if mode == "shm" else {"bytes"}), ways
    for mode in MODES:
        record(f"images per s, {mode}", round(REQUESTS * IMAGES / median(whole[mode]), 2))
        record(f"median request, s, {mode}", round(median(each[mode]), 3))
    record("requests with renderers over without, time", round(median(whole["shm"]) / median(whole["none"]), 3))


@pytest.mark.parametrize("deployment", [("auto", {})], indirect=True)
def test_auto_takes_the_way_that_it_measured_to_be_cheaper(deployment: Deployment, record: Record) -> None:
    """Which way wins depends on the machine, so a run is judged by the frontend's own figures."""
    use(deployment, "none")
    none = [asyncio.run(run(deployment, AUTO_REQUESTS // 2))]
    heard = plugins(deployment)
    use(deployment, "auto")
    wait_for(lambda: plugins(deployment) >= heard + 3, 120, "the router knows the plugins")
    asyncio.run(run(deployment, 0))
    before, auto = costs(deployment), asyncio.run(run(deployment, AUTO_REQUESTS))
    after = costs(deployment)
    use(deployment, "none")
    none.append(asyncio.run(run(deployment, AUTO_REQUESTS // 2)))

    processed = auto.ways["shm"] + auto.ways["inline"]
    record(
        "auto, time per visual token, engine and renderer, ms", [round(1000 * cost, 3) for cost in (*before, *after)]
    )
    record("auto, images processed by a renderer", f"{processed} of {AUTO_REQUESTS * IMAGES}")
    for mode, seconds, each in (
        ("auto", auto.seconds, auto.median),
        ("none, before and after", sum(one.seconds for one in none), median(one.median for one in none)),
    ):
        record(f"auto, images per s, {mode}", round(AUTO_REQUESTS * IMAGES / seconds, 2))
        record(f"auto, median request, s, {mode}", round(each, 3))
    gains = [renderer < AUTO_GAIN * engine for engine, renderer in (before, after)]
    if gains[0] == gains[1]:
        assert (processed > AUTO_REQUESTS * IMAGES / 2) is gains[0]
