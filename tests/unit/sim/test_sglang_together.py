"""Simulated SGLang engines that work together: with encoders, and as prefill and decode pairs."""

import asyncio
import json
from functools import partial

import pytest
from unit.sim.conftest import CHAT, LONG, cached_tokens, chat_body, image, png, text
from unit.sim.test_handover import held, listening
from waiting import until


@pytest.fixture
async def pair(serve_sglang):
    """An encoder, and an engine that knows it by many URLs."""
    encoder = await serve_sglang("--encoder-only", "--api-key", "secret")
    return encoder, await serve_sglang("--language-only", "--encoder-urls", *[encoder.url] * 4)


async def show(client, *parts, **fields):
    return await client.chat(list(parts), **fields)


def sentinels(client):
    return {token for block in client.engine.held()["ranks"]["0"] for token in block["token_ids"] if token >= 1_000_000}


async def test_images_are_encoded_once_and_named_by_their_embeddings(pair, serve_sglang):
    encoder, engine = pair
    alone = await serve_sglang()
    status, answer = await show(engine, image(png()), image(png("blue", (64, 32))), text("what?"))
    assert status == 200
    _, same = await show(alone, image(png()), image(png("blue", (64, 32))), text("what?"))
    assert answer["usage"]["prompt_tokens"] == same["usage"]["prompt_tokens"]
    assert sentinels(engine).isdisjoint(sentinels(alone))  # an image is another one where its embedding names it
    assert (encoder.engine.encoder.images, encoder.engine.encoder.hits) == (2, 0)
    await show(engine, image(png("blue", (64, 32))), text("and now?"))
    assert (encoder.engine.encoder.images, encoder.engine.encoder.hits) == (3, 1)
    _, page = await encoder.get("/metrics")
    assert 'sglang:encoder_cache_hit_files_total{modality="image"} 1.0' in page


async def test_an_encoder_that_fails_fails_the_request_and_not_the_engine(pair):
    _, engine = pair
    status, answer = await show(engine, image(b"hello"), text("what?"))
    assert (status, answer["code"]) == (503, 503)
    assert "did not return multimodal embeddings" in answer["message"]
    assert (await show(engine, image(png()), text("what?")))[0] == 200
    assert (await show(engine, text("only words"), max_tokens=1))[0] == 200


async def test_an_engine_beside_encoders_cannot_show_a_prompts_ids(pair):
    _, engine = pair
    status, _ = await show(engine, image(png()), text("what?"), return_prompt_token_ids=True)
    assert status == 500


@pytest.mark.parametrize(
    "body", [{}, {"req_id": "r", "mm_items": []}, {"mm_items": ["x"], "num_parts": 1, "part_idx": 1}]
)
async def test_an_invalid_share_is_refused(pair, body):
    encoder, _ = pair
    whole = {"req_id": "r", "modality": "IMAGE", "prefill_host": "127.0.0.1", "num_parts": 1, "part_idx": 0} | body
    status, answer = await encoder.post("/encode", whole)
    assert (status, answer["status"]) == (400, "error")


CONTENT = [text(LONG), image(png())]


@pytest.fixture
def prefill(serve_sglang, unused_port):
    """Start a prefill engine with a bootstrap server of its own."""

    async def start(*flags):
        port = unused_port(1)
        mode = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port))
        client = await serve_sglang("--disaggregation-transfer-backend", "nixl", *mode, *flags)
        await listening("127.0.0.1", port)
        return client

    return start


@pytest.fixture
def decode(serve_sglang):
    return partial(serve_sglang, "--disaggregation-mode", "decode")


def at(client, room=7, **more):
    host, port = client.engine.pairing.config.address
    names = {"host": host, "port": port, "room": room}
    return {f"x-override-bootstrap-{name}": str(value) for name, value in names.items()} | more


async def ask(client, headers, **fields):
    return await client.post(CHAT, chat_body(CONTENT, **fields), headers=headers)


async def both(first, second, **fields):
    return await asyncio.gather(ask(first, at(first), **fields), ask(second, at(first), **fields))


async def test_the_decoder_answers_as_one_engine_would_and_the_prefill_engine_with_one_token(
    prefill, decode, serve_sglang
):
    first, second, whole = await prefill(), await decode(), await serve_sglang()
    (prefilled, short), (status, answer) = await both(first, second)
    _, alone = await ask(whole, {})
    assert (prefilled, status) == (200, 200)
    assert answer["choices"][0]["message"] == alone["choices"][0]["message"]
    assert (short["usage"]["completion_tokens"], answer["usage"]["completion_tokens"]) == (1, 4)


async def test_only_the_prefill_engine_computes_and_only_it_keeps_a_cache(prefill, decode):
    first, second = await prefill(), await decode()
    await both(first, second)
    (_, again), (_, answer) = await both(first, second)
    cached = cached_tokens(again)
    assert cached_tokens(answer) == cached > 0  # the decoder passes it on
    counters = second.engine.runners[0].scheduler.counters
    assert counters.visual_tokens == 0
    assert counters.external_hits == 2 * (again["usage"]["prompt_tokens"] - 1)
    kept = [client.engine.held()["ranks"]["0"] for client in (first, second)]
    assert len(kept[0]) == again["usage"]["prompt_tokens"] // 16
    assert kept[1] == []
    for client in (first, second):
        await until(lambda client=client: client.engine.runners[0].scheduler.idle and not held(client))
    assert second.engine.runners[0].scheduler.pool.used == 0


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_without_a_room_both_engines_refuse(prefill, decode, side):
    client = await (prefill if side == "prefill" else decode)()
    status, answer = await ask(client, {})
    assert status == 400
    assert "without bootstrap room" in answer["message"]
    (chunk,) = await client.stream(CHAT, chat_body("hi"))
    assert (chunk["error"]["code"], "without bootstrap room" in chunk["error"]["message"]) == (400, True)


async def test_engines_without_a_peer_time_out(prefill, decode, monkeypatch):
    monkeypatch.setenv("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "0.05")
    monkeypatch.setenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "0.05")
    first, second = await prefill(), await decode()
    assert (await ask(first, at(first, 1)))[0] == 500
    assert (await ask(second, at(first, 2)))[0] == 500
    assert first.engine.runners[0].scheduler.counters.prompt_tokens == 0  # nothing was computed
    await until(lambda: not first.engine.pairing.readers)


async def test_engines_fail_when_their_peer_gives_up(prefill, decode):
    first, second = await prefill("--sim-prefill-rate", "0.1"), await decode()
    waiting, computing = (asyncio.create_task(ask(client, at(first))) for client in (second, first))
    await until(lambda: not first.engine.runners[0].scheduler.idle)
    computing.cancel()
    assert (await waiting)[0] == 500
    await until(lambda: first.engine.runners[0].scheduler.idle)
    assert (held(first), first.engine.runners[0].scheduler.pool.used) == (0, 0)


async def test_a_prefill_engine_whose_reader_left_fails_and_holds_nothing(prefill, decode):
    first, second = await prefill(), await decode()
    leaving = asyncio.create_task(ask(second, at(first)))
    await until(lambda: any(came.done() for came in first.engine.pairing.readers.values()))
    (came,) = first.engine.pairing.readers.values()
    leaving.cancel()
    await until(came.result().reader.at_eof)
    assert (await ask(first, at(first)))[0] == 500
    assert held(first) == 0


async def test_a_decoder_that_cannot_reach_the_prefill_engine_fails(decode, unused_port):
    second = await decode()
    headers = {"x-override-bootstrap-host": "127.0.0.1", "x-override-bootstrap-port": str(unused_port(1))}
    assert (await ask(second, headers | {"x-override-bootstrap-room": "7"}))[0] == 500


@pytest.mark.parametrize(("rank", "status"), [(None, 200), ("1", 200), ("0", 500)])
async def test_the_room_names_the_rank_that_computes(prefill, decode, rank, status):
    first, second = await prefill("--dp-size", "2"), await decode()
    pinned = {} if rank is None else {"x-override-routed-dp-rank": rank}
    work = asyncio.create_task(ask(second, at(first, 7)))
    assert (await ask(first, at(first, 7, **pinned)))[0] == status
    if status == 200:
        assert (await work)[0] == 200
        assert [runner.scheduler.counters.prompt_tokens > 0 for runner in first.engine.runners] == [False, True]
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


async def test_a_pair_streams_and_serves_plain_completions(prefill, decode):
    first, second = await prefill(), await decode()
    body = {"model": "tiny", "prompt": LONG, "max_tokens": 4, "stream": True}
    host, port = first.engine.pairing.config.address
    meeting = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": 7}

    async def frames(client):
        async with client.session.post(client.url + "/v1/completions", json=body | meeting) as answer:
            return [json.loads(f[6:]) for f in (await answer.text()).split("\n\n") if f.startswith("data: {")]

    prefilled, answer = await asyncio.gather(frames(first), frames(second))
    assert (len(prefilled), len(answer)) == (1, 4)


async def test_server_info_has_the_role_in_a_pair(prefill, decode, serve_sglang):
    for client, mode in ((await prefill(), "prefill"), (await decode(), "decode"), (await serve_sglang(), "null")):
        assert (await client.get("/server_info"))[1]["disaggregation_mode"] == mode
        assert (await client.get("/model_info"))[1]["disaggregation_mode"] == mode
