"""Three times as many requests as an engine can answer: as many answers in time as at its peak, else 429."""

import asyncio
import time
from collections import Counter

import aiohttp
import pytest
import yaml
from local.rig import ROOT, running

SLOTS, QUEUED = 4, 12
TOKENS, STEP_MS = 4, 50
"""Few long steps: by how much a busy machine is late with each is little of them, at the peak as above it."""
PATIENCE_SECONDS = 3.0
"""Clients go after that. The last of a full queue is answered in 0.8 s, if the machine has nothing else to do; without
a bound on the queue, the last of the overload would be answered after 12 s."""
PEAK_SECONDS, OVERLOAD_SECONDS = 3.0, 6.0


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    """One engine of few slots, whose queue is as long as clients are patient."""
    resource = yaml.safe_load((ROOT / "examples" / "demo.yaml").read_text())
    resource["metadata"]["name"] = "overload"
    resource["spec"]["frontend"]["replicas"] = 1
    resource["spec"]["routing"]["maxQueuedRequests"] = QUEUED
    resource["spec"]["model"]["volume"]["hostPath"]["path"] = str(ROOT / "examples" / "models" / "tiny-qwen2-vl")
    pool = resource["spec"]["pools"][0]
    pool["replicas"], pool["args"] = 1, [f"--max-num-seqs={SLOTS}", f"--sim-decode-ms={STEP_MS}", "--sim-jitter=0"]
    file = tmp_path_factory.mktemp("overload") / "overload.yaml"
    file.write_text(yaml.safe_dump(resource))
    with running(file) as deployment:
        yield deployment


async def ask(session: aiohttp.ClientSession, number: int) -> str:
    """Return ``200``, a refusal with when to come back, or what else it was; a client that has waited enough leaves."""
    text = f"Question {number}: what is it?"
    body = {"model": "overload", "max_tokens": TOKENS, "messages": [{"role": "user", "content": text}]}
    try:
        async with session.post("/v1/chat/completions", json=body) as answer:
            said = await answer.json()
    except TimeoutError:
        return "left"
    if answer.status == 429:
        return f"{said['error']['code']}, {answer.headers.get('retry-after')}"
    return str(answer.status)


async def at_once(session: aiohttp.ClientSession, clients: int, seconds: float) -> float:
    """Let clients ask one request after the other; return answers per second."""
    end, answers = time.monotonic() + seconds, 0

    async def client(number: int) -> None:
        nonlocal answers
        while time.monotonic() < end:
            assert await ask(session, number) == "200"
            answers += time.monotonic() < end

    await asyncio.gather(*map(client, range(clients)))
    return answers / seconds


async def at_a_rate(session: aiohttp.ClientSession, rate: float, seconds: float) -> Counter[str]:
    """Send requests whether others are answered or not; return how many came to what."""
    asked, began = [], time.monotonic()
    while (elapsed := time.monotonic() - began) < seconds:
        while len(asked) < rate * elapsed:
            asked.append(asyncio.create_task(ask(session, len(asked))))
        await asyncio.sleep(0.005)
    return Counter(await asyncio.gather(*asked))


async def test_three_times_the_load_leaves_as_many_answers_as_the_peak_and_tells_all_others_when_to_come_back(
    deployment,
):
    timeout = aiohttp.ClientTimeout(total=PATIENCE_SECONDS)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(deployment.url, timeout=timeout, connector=connector) as session:
        peak = await at_once(session, 2 * SLOTS, PEAK_SECONDS)
        came = await at_a_rate(session, 3 * peak, OVERLOAD_SECONDS)
    goodput = came.pop("200") / OVERLOAD_SECONDS
    assert goodput >= 0.9 * peak, (peak, goodput, came)
    assert set(came) == {"queue_full, 1"}, came
    assert came.total() > OVERLOAD_SECONDS * peak, "it was no overload"
