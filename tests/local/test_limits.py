"""Limits of a deployment: API keys whose tenants share no block, and a queue that refuses what would come too late."""

import asyncio
import time
from collections import Counter

import aiohttp
import openai
import pytest
from local.rig import deployed, example

from mmrouter_cli.sample_images import data_uri, picture

KEYS = {"red": "key-of-red", "blue": "key-of-blue"}
SECRET = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": KEYS}
QUESTION = [
    {"type": "text", "text": "Both tenants ask exactly the same question about the same picture. " * 2},
    {"type": "image_url", "image_url": {"url": data_uri(picture("shared", 112, 112))}},
]
SLOTS, QUEUED = 4, 12
TOKENS, STEP_MS = 4, 50
"""Few long steps: by how much a busy machine is late with each is little of them, at the peak as above it."""
PATIENCE_SECONDS = 3.0
"""Clients go after that. The last of a full queue is answered in 0.8 s, if the machine has nothing else to do; without
a bound on the queue, the last of the overload would be answered after 12 s."""
PEAK_SECONDS, OVERLOAD_SECONDS = 3.0, 6.0


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    """One frontend with two tenants, and one engine of few slots, whose queue is as long as clients are patient."""
    resource = example()
    spec, pool = resource["spec"], resource["spec"]["pools"][0]
    spec["frontend"].update(replicas=1, apiKeys={"secret": {"name": "keys"}})
    spec["routing"]["maxQueuedRequests"] = QUEUED
    pool["replicas"], pool["args"] = 1, [f"--max-num-seqs={SLOTS}", f"--sim-decode-ms={STEP_MS}", "--sim-jitter=0"]
    with deployed(tmp_path_factory.mktemp("limits"), SECRET, resource) as deployment:
        yield deployment


# -- tenants -------------------------------------------------------------------------------------------------------


def asked_by(deployment, key):
    headers = {"x-mmrouter-control": deployment.token}
    client = openai.OpenAI(base_url=f"{deployment.url}/v1", api_key=key, default_headers=headers)
    messages = [{"role": "user", "content": QUESTION}]
    raw = client.chat.completions.with_raw_response.create(model="demo", messages=messages, max_tokens=2)
    return raw.parse().usage, raw.headers


@pytest.mark.parametrize("key", ["nonsense", "key-of-reD"])
def test_a_wrong_key_is_a_401_in_openais_shape(deployment, key):
    with pytest.raises(openai.AuthenticationError) as caught:
        asked_by(deployment, key)
    assert (caught.value.status_code, caught.value.code) == (401, "invalid_api_key")


def test_models_need_a_key_too(deployment):
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="x").models.list()


def test_tenants_share_no_block_predicted_or_real(deployment):
    first, _ = asked_by(deployment, "key-of-red")
    assert first.prompt_tokens_details.cached_tokens == 0
    other, headers = asked_by(deployment, "key-of-blue")
    assert other.prompt_tokens_details.cached_tokens == 0
    assert headers["x-mmrouter-overlap-blocks"] == "0"
    again, headers = asked_by(deployment, "key-of-blue")
    assert headers["x-mmrouter-exactness"] == "exact"
    assert again.prompt_tokens_details.cached_tokens >= 16 * (int(headers["x-mmrouter-prompt-blocks"]) - 1)


def test_the_gate_passes_with_a_tenants_key_and_fails_without(deployment):
    good = deployment.mmrouter("verify", deployment.url, "--api-key", "key-of-red")
    assert good.returncode == 0, good.stdout + good.stderr
    assert deployment.mmrouter("verify", deployment.url, "--api-key", "nonsense").returncode == 1


# -- overload ------------------------------------------------------------------------------------------------------


async def ask(session: aiohttp.ClientSession, number: int) -> str:
    """Return ``200``, a refusal with when to come back, or what else it was; a client that has waited enough leaves."""
    text = f"Question {number}: what is it?"
    body = {"model": "demo", "max_tokens": TOKENS, "messages": [{"role": "user", "content": text}]}
    try:
        async with session.post("/v1/chat/completions", json=body) as answer:
            content = await answer.json()
    except TimeoutError:
        return "left"
    if answer.status == 429:
        return f"{content['error']['code']}, {answer.headers.get('retry-after')}"
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
    timeout, connector = aiohttp.ClientTimeout(total=PATIENCE_SECONDS), aiohttp.TCPConnector(limit=0)
    headers = {"authorization": "Bearer key-of-red"}
    async with aiohttp.ClientSession(deployment.url, timeout=timeout, connector=connector, headers=headers) as session:
        peak = await at_once(session, 2 * SLOTS, PEAK_SECONDS)
        came = await at_a_rate(session, 3 * peak, OVERLOAD_SECONDS)
    goodput = came.pop("200") / OVERLOAD_SECONDS
    # Other load on the machine differs between the two phases; a collapse would leave next to nothing.
    assert goodput >= 0.2 * peak, (peak, goodput, came)
    assert set(came) - {"left"} == {"queue_full, 1"}, came  # on a slow machine some clients lose their patience
    assert came.total() > OVERLOAD_SECONDS * peak, "it was no overload"
