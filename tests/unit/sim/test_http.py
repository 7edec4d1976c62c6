"""The HTTP side of the simulated vLLM, over loopback."""

import asyncio
import json
import zlib
from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families
from unit.sim.conftest import CHAT, LONG, cached_tokens, chat_body, image, png, samples, text

from mmrouter_lib.engines.base.adapter import RankLoad
from mmrouter_lib.engines.vllm.adapter import parse_load
from mmrouter_sim.media import default_identifier


async def test_an_answer_has_the_engines_fields_and_honest_usage(serve):
    client = await serve("--block-size", "16")
    status, reply = await client.chat([text(LONG), image(png(), "u-1")], return_token_ids=True)
    assert status == 200
    choice, usage = reply["choices"][0], reply["usage"]
    assert reply["object"] == "chat.completion"
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    assert len(choice["token_ids"]) == usage["completion_tokens"] == 4
    assert usage["prompt_tokens"] == len(reply["prompt_token_ids"])
    assert usage["total_tokens"] == usage["prompt_tokens"] + 4
    pads = Counter(reply["prompt_token_ids"])[client.engine.model.family.placeholder_id]
    assert usage["prompt_tokens_details"] == {
        "cached_tokens": 0,
        "created_cache_tokens": usage["prompt_tokens"] // 16 * 16,
        "multimodal_tokens": {"image": pads},
    }
    assert pads == client.engine.model.count(112, 84)


async def test_a_repeat_hits_all_but_the_last_token_and_another_image_hits_only_the_text_before_it(serve):
    client = await serve("--block-size", "16")
    first = [text(LONG), image(png("red"), "u-1"), text("and?")]
    other = [text(LONG), image(png("blue"), "u-2"), text("and?")]
    _, cold = await client.chat(first, return_token_ids=True)
    _, warm = await client.chat(first)
    _, swapped = await client.chat(other)
    ids = cold["prompt_token_ids"]
    before = ids.index(client.engine.model.family.placeholder_id)
    assert cached_tokens(cold) == 0
    details = warm["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == (len(ids) - 1) // 16 * 16
    assert details["cached_tokens"] + details["created_cache_tokens"] == len(ids) // 16 * 16
    assert cached_tokens(swapped) == before // 16 * 16


async def test_a_prompt_is_tokenized_as_it_is_computed(serve):
    client = await serve()
    _, reply = await client.chat(LONG, return_token_ids=True)
    status, made = await client.post("/tokenize", chat_body(LONG))
    assert (status, made["tokens"], made["count"]) == (200, reply["prompt_token_ids"], len(reply["prompt_token_ids"]))
    _, text_alone = await client.post("/tokenize", {"prompt": LONG})
    assert text_alone["tokens"] == client.engine.model.tokenizer.encode(LONG).ids


async def test_the_engine_lists_its_routes(serve):
    client = await serve()
    status, made = await client.get("/openapi.json")
    assert status == 200
    assert {"/tokenize", "/detokenize", CHAT} <= made["paths"].keys()
    assert "/v1/embeddings" not in made["paths"]


async def test_a_salt_keeps_equal_prompts_apart(serve):
    client = await serve()
    cached = []
    for salt in (None, "a", "b", "a"):
        _, reply = await client.chat(LONG, **({"cache_salt": salt} if salt else {}))
        cached.append(cached_tokens(reply) > 0)
    assert cached == [False, False, False, True]


async def test_a_stream_has_the_text_of_a_whole_answer(serve):
    client = await serve()
    body = chat_body(LONG, max_tokens=30, return_token_ids=True)
    _, whole = await client.post(CHAT, body)
    chunks = await client.stream(CHAT, body | {"stream_options": {"include_usage": True}})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert (
        "".join(c["choices"][0]["delta"]["content"] for c in chunks[:-1]) == whole["choices"][0]["message"]["content"]
    )
    assert [t for c in chunks[1:-1] for t in c["choices"][0]["token_ids"]] == whole["choices"][0]["token_ids"]
    assert chunks[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert "usage" not in (await client.stream(CHAT, body))[-1]


async def test_an_answer_in_the_next_turn_is_found_in_the_cache(serve):
    client = await serve("--block-size", "4")
    question = {"role": "user", "content": LONG}
    _, first = await client.post(CHAT, {"messages": [question], "max_tokens": 24, "return_token_ids": True})
    answer = first["choices"][0]["message"]["content"]
    assert answer[0].isupper()
    turns = [question, {"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]
    _, second = await client.post(CHAT, {"messages": turns, "max_tokens": 1, "return_token_ids": True})
    both = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    pairs = enumerate(zip(both, second["prompt_token_ids"], strict=False))
    same = next((i for i, (a, b) in pairs if a != b), len(both))
    assert same >= first["usage"]["prompt_tokens"] + 20
    assert cached_tokens(second) >= same // 4 * 4 - 4


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"max_tokens": 200}, "stop"), ({"max_tokens": 3}, "length"), ({"max_tokens": 90, "ignore_eos": True}, "length")],
)
async def test_answers_end_by_themselves_or_at_their_limit(serve, fields, reason):
    client = await serve()
    _, reply = await client.chat("hello", **fields)
    assert reply["choices"][0]["finish_reason"] == reason
    assert (reply["usage"]["completion_tokens"] == fields["max_tokens"]) == (reason == "length")


async def test_a_stop_string_cuts_the_answer_before_it(serve):
    client = await serve()
    _, whole = await client.chat("hello", max_tokens=12)
    words = whole["choices"][0]["message"]["content"].split(" ")
    _, cut = await client.chat("hello", max_tokens=12, stop=[f"{words[3]} {words[4]}"])
    choice = cut["choices"][0]
    assert choice["message"]["content"] == " ".join(words[:3]) + " "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", f"{words[3]} {words[4]}")
    assert client.engine.runners[0].load == 0


async def test_completions_take_text_or_ids(serve):
    client = await serve()
    tokens = client.engine.model.tokenizer.encode(LONG).ids
    body = {"model": "tiny", "max_tokens": 5, "return_token_ids": True}
    _, by_text = await client.post("/v1/completions", body | {"prompt": LONG})
    _, by_ids = await client.post("/v1/completions", body | {"prompt": tokens})
    assert by_text["object"] == "text_completion"
    assert by_text["choices"][0]["prompt_token_ids"] == tokens
    assert by_text["choices"][0]["text"] == by_ids["choices"][0]["text"]
    assert cached_tokens(by_ids) > 0
    chunks = await client.stream("/v1/completions", body | {"prompt": LONG})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == by_text["choices"][0]["text"]


async def test_identity_is_the_uuid_and_else_the_engines_hash_of_the_file(serve):
    client = await serve("--block-size", "4")
    data = png()
    await client.chat([image(data)])
    await client.chat([image(data, "u-9")])
    held = client.engine.held()["ranks"]["0"]
    assert {name for block in held for name, _ in block["media"]} == {default_identifier("m", data), "u-9"}


def test_the_engines_own_image_name_is_that_of_a_real_engine(captures):
    lines = (captures / "qwen2vl_core_uuid_clear.jsonl").read_text()
    for name in ("a_224.png", "b_224.png", "a_224.jpg", "c_56.png", "a_640x480.png"):
        assert default_identifier("models/qwen2vl", (captures / "images" / name).read_bytes()) in lines


async def test_a_known_uuid_needs_no_bytes_and_contradicting_bytes_are_ignored(serve):
    client = await serve("--block-size", "4")
    null = {"type": "image_url", "image_url": None, "uuid": "u-1"}
    status, reply = await client.chat([null, text("what")])
    assert status == 400
    assert reply["error"]["message"] == "Cache miss for image at index 0 but data is not provided."
    _, known = await client.chat([image(png("red"), "u-1"), text("what")])
    for part in (null, image(png("blue", (280, 280)), "u-1")):
        status, again = await client.chat([part, text("what")])
        assert status == 200
        assert again["usage"]["prompt_tokens"] == known["usage"]["prompt_tokens"]
        assert cached_tokens(again) > 0


async def test_files_are_read_below_the_allowed_folder_only(serve, tmp_path):
    (tmp_path / "in").mkdir()
    for place in ("in/a b.png", "out.png"):
        (tmp_path / place).write_bytes(png())
    (tmp_path / "in" / "link.png").symlink_to(tmp_path / "out.png")

    def part(path):
        return [{"type": "image_url", "image_url": {"url": f"file://{path}"}, "uuid": "u-1"}]

    client = await serve("--allowed-local-media-path", str(tmp_path / "in"))
    good, _ = await client.chat(part(tmp_path / "in" / "a%20b.png"))
    assert good == 200
    for path in ("out.png", "in/../out.png", "in/link.png"):
        status, reply = await client.chat(part(tmp_path / path))
        assert status == 400, path
        assert reply["error"]["type"] == "BadRequestError"
        assert str(tmp_path) not in reply["error"]["message"]
    # As the engine answers what it did not expect.
    status, reply = await client.chat(part(tmp_path / "in" / "none.png"))
    assert (status, reply["error"]["message"]) == (500, "[Errno 2] No such file or directory: '<path>'")
    status, reply = await (await serve()).chat(part(tmp_path / "in" / "a%20b.png"))
    assert status == 500
    assert "--allowed-local-media-path" in reply["error"]["message"]


BAD = [
    # body, status, error.type, error.param, part of the message
    (b"{", 400, "Bad Request", None, "JSON"),
    (b"\xff", 400, "Bad Request", None, ""),
    ({"model": "tiny"}, 400, "Bad Request", None, "messages"),
    ({"messages": "hi"}, 400, "Bad Request", None, "messages"),
    (chat_body("x", max_tokens="many"), 400, "Bad Request", None, "max_tokens"),
    (chat_body("x", model="other"), 404, "NotFoundError", "model", "`other` does not exist"),
    (chat_body("x", max_tokens=0), 400, "BadRequestError", "max_tokens", "at least 1"),
    (chat_body("x", max_tokens=40_000), 400, "BadRequestError", "input_tokens", "maximum context length is 2000"),
    (chat_body("word " * 4_000), 400, "BadRequestError", "input_tokens", "maximum context length is 2000"),
    (chat_body("x", n=0), 400, "BadRequestError", "n", "at least 1"),
    (chat_body("x", n=2, temperature=0), 400, "BadRequestError", None, "greedy sampling"),
    (chat_body("x", echo=True), 400, "BadRequestError", "echo", "not simulated"),
    (b'{"response_format": {"a": ' + b"[" * 100_000, 400, "Bad Request", None, "JSON"),
    (chat_body("x", mm_processor_kwargs={"max_pixels": 1}), 400, "BadRequestError", "mm_processor_kwargs", "trust"),
    (chat_body("x", cache_salt=""), 400, "BadRequestError", "cache_salt", "non-empty"),
    (chat_body("x", chat_template="{{ 1 }}"), 400, "BadRequestError", None, "untrusted"),
    ({"messages": [{"role": "robot", "content": "x"}]}, 400, "BadRequestError", None, "unknown role"),
    (chat_body([{"type": "video_url", "video_url": {"url": "x"}}]), 400, "BadRequestError", "video", "At most 0"),
    (chat_body([image(b"not an image")]), 400, "BadRequestError", None, "cannot identify"),
    (chat_body([image(png(kind="JPEG", size=(300, 300))[:900])]), 400, "BadRequestError", None, "truncated"),
    (chat_body([image(png(size=(2000, 2)))]), 400, "BadRequestError", None, "image processor"),
    (chat_body([{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]), 400, "BadRequestError",
     None, "network"),
    (chat_body([{"type": "image_url", "image_url": {"url": "data:image/png,abc"}}]), 400, "BadRequestError", None,
     "base64"),
    (chat_body([{"type": "image_url", "image_url": {"url": "data:;base64,%%%"}}]), 400, "BadRequestError", None,
     "base64"),
    (chat_body([{"type": "image_url", "image_url": None}]), 400, "BadRequestError", "image_url", "uuid"),
    (chat_body([image(png()), image(png()), image(png())]), 400, "BadRequestError", "image", "At most 2"),
    (chat_body("x" * 100_000), 400, "BadRequestError", None, "cannot be cut"),  # the library's bound, not the engine's
]  # fmt: skip


async def test_bad_requests_are_answered_in_the_engines_shape_and_leave_the_connection_usable(serve):
    client = await serve("--limit-mm-per-prompt", '{"image": 2}', "--max-model-len", "2000")
    for body, status, kind, param, words in BAD:
        got, reply = await client.post(CHAT, body)
        shown = json.dumps(body)[:100] if isinstance(body, dict) else body
        assert (got, reply["error"]["code"]) == (status, status), shown
        assert reply["error"]["type"] == kind, shown
        assert reply["error"]["param"] == param, shown
        assert words in reply["error"]["message"], shown
    assert (await client.chat("still here"))[0] == 200
    assert client.engine.runners[0].load == 0


async def test_a_header_that_claims_too_many_pixels_is_a_500_as_in_the_engine(serve):
    header = png(size=(1, 1), mode="L", color=0)
    huge = header[:16] + (65_000).to_bytes(4, "big") * 2 + header[24:]
    huge = huge[:29] + zlib.crc32(huge[12:29]).to_bytes(4, "big") + huge[33:]
    status, reply = await (await serve()).chat([image(huge)])
    assert status == 500
    assert "pixels" in reply["error"]["message"]


async def test_the_key_guards_versioned_paths_only(serve, caplog):
    caplog.set_level("INFO")
    client = await serve("--api-key", "k1", "k2")
    for path in ("/health", "/version", "/metrics"):
        assert (await client.get(path))[0] == 200, path
    for headers in ({}, {"authorization": "Bearer no"}, {"authorization": "k1"}):
        for path in ("/v1/models", "/sim/cache"):
            assert await client.get(path, headers=headers) == (401, {"error": "Unauthorized"})
        assert (await client.post(CHAT, chat_body("x"), headers=headers))[0] == 401
    refusals = [record.getMessage() for record in caplog.records if "401 Unauthorized" in record.getMessage()]
    assert len(refusals) == 9, "one line for each, as the engine's own server writes them"
    assert sum(f'"POST {CHAT} HTTP/1.1"' in line for line in refusals) == 3
    for key in ("k1", "k2"):
        assert (await client.get("/v1/models", headers={"authorization": f"Bearer {key}"}))[0] == 200


async def test_unknown_paths_and_methods_are_errors_in_shape(serve):
    client = await serve()
    status, reply = await client.get("/v1/nothing")
    assert (status, reply["error"]["code"]) == (404, 404)
    status, reply = await client.get(CHAT)
    assert (status, reply["error"]["type"]) == (405, "Method Not Allowed")


async def test_models_and_version_routes(serve):
    client = await serve("--max-model-len", "1000", "--served-model-name", "tiny", "alias")
    _, models = await client.get("/v1/models")
    assert [(entry["id"], entry["max_model_len"]) for entry in models["data"]] == [("tiny", 1000), ("alias", 1000)]
    assert await client.get("/version") == (200, {"version": "0.32.0"})
    assert (await client.chat("x", model="alias"))[1]["model"] == "alias"


@pytest.mark.parametrize(
    ("flags", "size"), [([], "None"), (["--sim-device=cpu"], str(4 << 30)), (["--kv-cache-memory-bytes=4096"], "4096")]
)
async def test_only_a_cpu_takes_the_size_of_its_cache_from_the_environment(serve, monkeypatch, flags, size):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    _, page = await (await serve(*flags)).get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(page)}
    (info,) = families["vllm:cache_config_info"].samples
    assert info.labels["kv_cache_memory_bytes"] == size


async def test_metrics_carry_the_engines_names_and_labels(serve):
    client = await serve("--block-size", "32", "--num-gpu-blocks-override", "1100", "--data-parallel-size", "2")
    asked = 0
    for _ in range(2):
        asked += (await client.chat(LONG, max_tokens=2))[1]["usage"]["prompt_tokens"]
    _, page = await client.get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(page)}
    info = families["vllm:cache_config_info"].samples
    assert [sample.labels["engine"] for sample in info] == ["0", "1"]
    assert (info[0].labels["block_size"], info[0].labels["num_gpu_blocks"]) == ("32", "1100")
    assert info[0].labels["prefix_caching_hash_algo"] == "sha256_cbor"
    values = await samples(client)
    assert values["vllm:prefix_cache_queries_total", "0"] + values["vllm:prefix_cache_queries_total", "1"] == asked
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_hits_total"):
        assert ("vllm:" + name, "1") in values
    assert parse_load(page) == {rank: RankLoad(running=0, waiting=0, kv_usage=0.0) for rank in (0, 1)}


async def test_a_rank_header_pins_the_rank(serve):
    client = await serve("--data-parallel-size", "2")
    for rank in ("1", "1", "0"):
        status, _ = await client.post(CHAT, chat_body(LONG), headers={"X-data-parallel-rank": rank})
        assert status == 200
    assert [r.scheduler.counters.prefix_hits > 0 for r in client.engine.runners] == [False, True]
    status, reply = await client.post(CHAT, chat_body("x"), headers={"X-data-parallel-rank": "2"})
    assert status == 400
    assert "out of range" in reply["error"]["message"]


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_ends_its_request(serve, streamed):
    client = await serve("--sim-speed", "1")
    body = chat_body("hello", max_tokens=20_000, ignore_eos=True, stream=streamed)
    post = client.session.post(client.url + CHAT, json=body)
    rank = client.engine.runners[0]
    if streamed:
        answer = await post
        await answer.content.readline()
        assert rank.load == 1
        answer.close()
    else:
        waiting = asyncio.create_task(post.__aenter__())
        while not rank.scheduler.running:
            await asyncio.sleep(0.001)
        waiting.cancel()
    async with asyncio.timeout(20):  # of the forty seconds that its answer would take
        await rank.quiet()
    assert rank.scheduler.pool.used == 0


async def test_more_requests_than_sequences_wait_and_all_are_answered(serve):
    client = await serve("--max-num-seqs", "2", "--sim-speed", "5")
    replies = await asyncio.gather(*(client.chat(f"{n} {LONG}", max_tokens=3) for n in range(6)))
    assert [status for status, _ in replies] == [200] * 6
    values = await samples(client)
    assert values["vllm:num_requests_running", "0"] == values["vllm:num_requests_waiting", "0"] == 0


async def test_draining_lets_running_requests_finish_refuses_new_ones_and_stays_healthy(serve):
    client = await serve("--sim-speed", "2", "--shutdown-timeout", "30")
    running = asyncio.create_task(client.chat("hello", max_tokens=60, ignore_eos=True))
    while not client.engine.runners[0].load:
        await asyncio.sleep(0.001)
    drain = asyncio.create_task(client.engine.drain())
    await asyncio.sleep(0)
    status, reply = await client.chat("too late")
    assert (status, reply["error"]["message"]) == (500, "cannot schedule new futures after shutdown")
    assert (await client.get("/health"))[0] == 200
    assert not drain.done()
    status, reply = await running
    assert (status, reply["usage"]["completion_tokens"]) == (200, 60)
    await drain


async def test_without_a_shutdown_time_draining_ends_requests_at_once(serve):
    client = await serve("--sim-speed", "1")
    running = asyncio.create_task(client.chat("hello", max_tokens=20_000, ignore_eos=True))
    while not client.engine.runners[0].load:
        await asyncio.sleep(0.001)
    await client.engine.drain()
    status, reply = await running
    assert (status, reply["error"]["code"]) == (500, 500)
