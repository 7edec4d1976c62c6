"""Simulated SGLang engines with encoders: images are distributed at random and named by their embeddings."""

import pytest
from unit.sim.test_http import image, png, text

CHAT = "/v1/chat/completions"


@pytest.fixture
async def pair(serve_sglang):
    """An encoder, and an engine that knows it by many URLs."""
    encoder = await serve_sglang("--encoder-only", "--api-key", "secret")
    return encoder, await serve_sglang("--language-only", "--encoder-urls", *[encoder.url] * 4)


async def ask(client, *parts, **fields):
    body = {"model": "tiny", "messages": [{"role": "user", "content": list(parts)}], "max_tokens": 2} | fields
    return await client.post(CHAT, body)


def sentinels(client):
    return {token for block in client.engine.held()["ranks"]["0"] for token in block["token_ids"] if token >= 1_000_000}


async def test_images_are_encoded_once_and_named_by_their_embeddings(pair, serve_sglang):
    encoder, engine = pair
    alone = await serve_sglang()
    status, answer = await ask(engine, image(png()), image(png("blue", (64, 32))), text("what?"))
    assert status == 200
    _, same = await ask(alone, image(png()), image(png("blue", (64, 32))), text("what?"))
    assert answer["usage"]["prompt_tokens"] == same["usage"]["prompt_tokens"]
    assert sentinels(engine).isdisjoint(sentinels(alone))  # an image is another one where its embedding names it
    assert (encoder.engine.encoder.images, encoder.engine.encoder.hits) == (2, 0)
    await ask(engine, image(png("blue", (64, 32))), text("and now?"))
    assert (encoder.engine.encoder.images, encoder.engine.encoder.hits) == (3, 1)
    _, told = await encoder.get("/metrics")
    assert 'sglang:encoder_cache_hit_files_total{modality="image"} 1.0' in told


async def test_an_encoder_that_fails_fails_the_request_and_not_the_engine(pair):
    _, engine = pair
    status, answer = await ask(engine, image(b"hello"), text("what?"))
    assert (status, answer["code"]) == (503, 503)
    assert "did not return multimodal embeddings" in answer["message"]
    assert (await ask(engine, image(png()), text("what?")))[0] == 200
    assert (await ask(engine, text("only words"), max_tokens=1))[0] == 200


async def test_an_engine_beside_encoders_cannot_show_a_prompts_ids(pair):
    _, engine = pair
    status, _ = await ask(engine, image(png()), text("what?"), return_prompt_token_ids=True)
    assert status == 500


@pytest.mark.parametrize(
    "body", [{}, {"req_id": "r", "mm_items": []}, {"mm_items": ["x"], "num_parts": 1, "part_idx": 1}]
)
async def test_an_invalid_share_is_refused(pair, body):
    encoder, _ = pair
    whole = {"req_id": "r", "modality": "IMAGE", "prefill_host": "127.0.0.1", "num_parts": 1, "part_idx": 0} | body
    status, answer = await encoder.post("/encode", whole)
    assert (status, answer["status"]) == (400, "error")
