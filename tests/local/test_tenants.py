"""Tenants of a running deployment: limits of one leave the others undisturbed, and keys rotate without a restart."""

import asyncio
import time
from collections import Counter

import aiohttp
import httpx
import openai
import pytest
from local.rig import deployed, example
from waiting import wait_for

from mmrouter_cli.sample_images import data_uri, picture

KEYS = {"limited": "key-of-limited", "free": "key-of-free", "first": "key-of-first", "second": "key-of-second"}
MANY = {f"tenant-{number}": f"key-of-tenant-{number}" for number in range(1000)}
SECRET = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": KEYS | MANY}
SLOTS = 2
TENANTS = {"named": [{"name": "limited", "requestsPerMinute": 20, "concurrency": 4}]}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    """Two frontends before one engine of two slots."""
    resource = example()
    spec, pool = resource["spec"], resource["spec"]["pools"][0]
    spec["frontend"].update(replicas=2, apiKeys={"secret": {"name": "keys"}}, tenants=TENANTS)
    pool["replicas"], pool["args"] = 1, [f"--max-num-seqs={SLOTS}", "--sim-decode-ms=5", "--sim-jitter=0"]
    with deployed(tmp_path_factory.mktemp("tenants"), SECRET, resource) as deployment:
        yield deployment


@pytest.fixture
def one_router(deployment):
    """The address for clients of one frontend."""
    host = httpx.URL(deployment.controls[0]).host
    return f"http://{host}:8000"


async def ask(session: aiohttp.ClientSession, key: str, number: int) -> tuple[int, str, dict[str, str]]:
    """Return status, error code and headers of an answer to a text that no other request has."""
    text = f"{key} {number}: what is it?"
    body = {"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": text}]}
    headers = {"authorization": f"Bearer {key}"}
    async with session.post("/v1/chat/completions", json=body, headers=headers) as answer:
        content = await answer.json()
        code = content.get("error", {}).get("code", "")
        return answer.status, code, {name.lower(): value for name, value in answer.headers.items()}


def session_of(url: str) -> aiohttp.ClientSession:
    timeout, connector = aiohttp.ClientTimeout(total=300), aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(url, timeout=timeout, connector=connector)


async def test_a_limited_tenant_is_refused_under_load_and_the_other_is_not(one_router):
    async with session_of(one_router) as session:
        began = time.monotonic()
        asked = [ask(session, KEYS[name], number) for number in range(60) for name in ("limited", "free")]
        answers = await asyncio.gather(*asked)
        seconds = time.monotonic() - began
    limited, free = answers[::2], answers[1::2]
    assert Counter((status, code) for status, code, _ in free) == {(200, ""): 60}
    assert not [headers for *_, headers in free if "x-ratelimit-limit-requests" in headers]
    came = Counter((status, code) for status, code, _ in limited)
    assert set(came) <= {(200, ""), (429, "rate_limited"), (429, "concurrency_limited")}
    # Of a limit of 20 each of two routers admits 10, and one more in each 6 seconds; of 4 at once, 2.
    assert 1 <= came[200, ""] <= 10 + 1 + seconds / 6
    assert came[429, "concurrency_limited"] > 0
    for status, code, headers in limited:
        if code != "concurrency_limited":
            assert headers["x-ratelimit-limit-requests"] == "10"
        if status == 429:
            assert int(headers["retry-after"]) >= 1


async def test_a_client_that_waits_as_retry_after_says_is_served(one_router):
    async with session_of(one_router) as session:
        for number in range(1000, 1100):
            status, code, headers = await ask(session, KEYS["limited"], number)
            if code == "rate_limited":
                break
            assert (status, code) == (200, "")
        assert code == "rate_limited"
        assert int(headers["retry-after"]) <= 6
        await asyncio.sleep(int(headers["retry-after"]))
        assert (await ask(session, KEYS["limited"], 2000))[0] == 200


def test_a_tenant_reads_nothing_of_prompts_and_images_that_another_one_sent(deployment, one_router):
    image = {"type": "image_url", "image_url": {"url": data_uri(picture("of both tenants", 112, 112))}}

    def ask(name: str, number: int, **headers: str) -> httpx.Response:
        parts = [{"type": "text", "text": f"Prompt {number}. " + "What is to be seen here? " * 20}, image]
        body = {"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": parts}]}
        given = {"authorization": f"Bearer {KEYS[name]}", **headers}
        return httpx.post(f"{one_router}/v1/chat/completions", json=body, headers=given, timeout=60).raise_for_status()

    def hits(answer: httpx.Response) -> tuple[int, int]:
        """Blocks that the router predicted, and tokens that the engine found in its cache."""
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return int(answer.headers["x-mmrouter-overlap-blocks"]), cached

    shown = {"x-mmrouter-control": deployment.token}
    numbers = range(10, 26)
    sent = numbers[::2]
    for number in sent:
        ask("first", number)
    wait_for(lambda: all(min(hits(ask("first", number, **shown))) > 0 for number in sent), 30, "the blocks are known")
    seen = {number: hits(ask("second", number, **shown)) for number in numbers}
    assert set(seen.values()) == {(0, 0)}

    plain = [ask("second", number) for number in (sent[0], numbers[1])]
    assert {frozenset(answer.headers) for answer in plain} == {frozenset(plain[0].headers)}
    assert [name for name in plain[0].headers if name.startswith("x-")] == ["x-mmrouter-request-id", "x-request-id"]
    key = {"authorization": f"Bearer {KEYS['second']}"}
    control = deployment.controls[0]
    decision = ask("first", sent[0]).headers["x-mmrouter-request-id"]
    urls = [f"{one_router}/metrics", f"{control}/control/decisions/{decision}", f"{control}/control/state"]
    assert [httpx.get(url, headers=key).status_code for url in urls] == [404, 401, 401]
    assert httpx.post(f"{control}/control/explain", headers=key, json={}).status_code == 401


async def test_a_thousand_tenants_under_load_hit_their_own_blocks_alone(deployment):
    """All send the same prompt, each twice: the first time it is new to the tenant, the second time it is a hit."""
    body = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "What is to be seen? " * 12}]}
    places = asyncio.Semaphore(64)

    async def cached(session: aiohttp.ClientSession, key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        async with session.post("/v1/chat/completions", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            return int((await answer.json())["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def first_and_second(session: aiohttp.ClientSession, key: str) -> tuple[bool, bool]:
        async with places:
            first, second = await cached(session, key), await cached(session, key)
            return first > 0, second > 0

    async with session_of(deployment.url) as session:
        seen = Counter(await asyncio.gather(*(first_and_second(session, key) for key in MANY.values())))
    assert seen == {(False, True): len(MANY)}


def test_keys_rotate_without_a_restart(deployment):
    def ok(key: str) -> bool:
        client = openai.OpenAI(base_url=f"{deployment.url}/v1", api_key=key, max_retries=0)
        try:
            return bool(client.models.list().data)
        except openai.AuthenticationError:
            return False

    before = {name: process.pid for name, process in deployment.processes("router").items()}
    files = {file.resolve() for file in deployment.folder.rglob("api-keys/free")}
    assert len(files) == len(before)
    for new, works, fails in (("a\nkey-of-free", ("a", "key-of-free"), "b"), ("a\nb", ("a", "b"), "key-of-free")):
        for file in files:
            file.chmod(0o600)
            file.write_text(new)
        wait_for(
            lambda works=works, fails=fails: all(all(ok(key) for key in works) and not ok(fails) for _ in range(6)),
            60,
            "the new keys work on all frontends and the old one does not",
        )
    assert {name: process.pid for name, process in deployment.processes("router").items()} == before
