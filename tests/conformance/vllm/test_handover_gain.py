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
from typing import Any

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


@pytest.fixture(scope="module")
def deployment(vllm_env: Path, shrunk: Shrunk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One engine and two renderers. What is measured is a mode, so the frontend compares nothing itself."""
    require_memory(engines=2)
    shared = {"sharedMemory": {"scope": "node", "size": "1Gi"}}
    pools = [pool("worker", **shared), pool("renderer", replicas=2, **shared)]
    router = {"name": "router", "env": environment({"MMROUTER_HANDOVER": "always"})}
    made = manifest(
        shrunk(REPOSITORY),
        {"type": "vllm", "args": [*engine_args(), "--api-server-count=1"], "processor": {"maxPixels": MAX_PIXELS}},
        pools,
        frontend={"podTemplate": {"spec": {"containers": [router]}}},
        routing={"media": LOOPBACK_MEDIA, "transfer": "shm"},
    )
    with deployed(vllm_env, tmp_path_factory.mktemp("gain"), made) as deployment:
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


async def run(deployment: Deployment, first: int) -> tuple[float, float, Counter[str]]:
    """Return seconds of all requests, the median of one, and how many images came by each way."""
    bodies = [json.dumps(body(first + number)) for number in range(REQUESTS)]
    turns, seconds, ways = asyncio.Semaphore(AT_ONCE), [], Counter[str]()
    url = deployment.run["frontends"][0]["url"]
    async with httpx.AsyncClient(timeout=300) as client:

        async def ask(content: str) -> None:
            async with turns:
                began = time.monotonic()
                answer = await client.post(f"{url}/v1/chat/completions", content=content)
                seconds.append(time.monotonic() - began)
            assert answer.status_code == 200, answer.text
            ways.update(one["how"] for one in deployment.decision(answer)["travelled"])

        began = time.monotonic()
        await asyncio.gather(*map(ask, bodies))
        return time.monotonic() - began, median(seconds), ways


def test_many_large_images_at_once_with_and_without_renderers(deployment: Deployment, record: Record) -> None:
    whole: dict[str, list[float]] = {mode: [] for mode in MODES}
    each: dict[str, list[float]] = {mode: [] for mode in MODES}
    seed = 0

    def by_shm() -> bool:
        nonlocal seed
        seed += 1
        answer = httpx.post(
            f"{deployment.run['frontends'][0]['url']}/v1/chat/completions", json=body(seed), timeout=300
        )
        return any(one["how"] == "shm" for one in deployment.decision(answer)["travelled"])

    for turn in range(ROUNDS):
        for mode in MODES if turn % 2 else MODES[::-1]:
            use(deployment, mode)
            if mode == "shm":
                wait_for(by_shm, 120, "the router knows the plugins")
            seconds, one, ways = asyncio.run(run(deployment, 1000 * (turn + 1) + 100 * MODES.index(mode)))
            whole[mode].append(seconds)
            each[mode].append(one)
            assert set(ways) <= ({"shm", "inline"} if mode == "shm" else {"bytes"}), ways
    for mode in MODES:
        record(f"images per s, {mode}", round(REQUESTS * IMAGES / median(whole[mode]), 2))
        record(f"median request, s, {mode}", round(median(each[mode]), 3))
    record("requests with renderers over without, time", round(median(whole["shm"]) / median(whole["none"]), 3))
