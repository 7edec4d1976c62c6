"""LoRA adapters of a simulated engine: the rows of its model list, and blocks that only their own requests find."""

import json
import lzma
from array import array
from typing import Any

import msgspec
import pytest
from unit.sim.conftest import LONG, ROOT, cached_tokens, chat_body, text

from mmrouter_sim.settings import adapters
from mmrouter_sim.sglang.pages import namespace, page, published, root

LOADED = ("sql=/adapters/sql", '{"%s": "team:sql", "%s": "org/team-sql"}')
VLLM = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", LOADED[0], LOADED[1] % ("name", "path"))
SGLANG = ("--lora-paths", LOADED[0], LOADED[1] % ("lora_name", "lora_path"))
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def listed(client: Any) -> list[tuple[str, str, str | None, int | None]]:
    _, answer = await client.get("/v1/models")
    return [(row["id"], row["root"], row["parent"], row["max_model_len"]) for row in answer["data"]]


def loras(client: Any) -> dict[str | None, int]:
    """Return how many blocks of each adapter the engine holds, ``None`` for the model's."""
    (blocks,) = client.engine.held()["ranks"].values()
    names = [block["lora"] for block in blocks]
    return {name: names.count(name) for name in names}


async def test_the_model_list_names_adapters_with_their_paths_below_the_model(serve, serve_sglang):
    for client in (await serve(*VLLM), await serve_sglang(*SGLANG)):
        assert (await listed(client))[1:] == [
            ("sql", "/adapters/sql", "tiny", None),
            ("team:sql", "org/team-sql", "tiny", None),
        ]


async def test_a_vllm_answers_by_the_name_in_model_from_the_adapters_own_blocks(serve):
    client = await serve(*VLLM)
    for model in ("tiny", "sql", "team:sql"):
        status, first = await client.chat([text(LONG)], model=model)
        assert (status, first["model"], cached_tokens(first)) == (200, model, 0)
        _, again = await client.chat([text(LONG)], model=model)
        assert cached_tokens(again) > 0
    assert loras(client).keys() == {None, "sql", "team:sql"}
    status, _ = await client.chat([text(LONG)], model="none")
    assert status == 404


async def test_an_sglang_reads_the_adapter_from_lora_path_or_behind_a_colon(serve_sglang):
    client = await serve_sglang(*SGLANG)
    for fields in ({}, {"model": "sql", "lora_path": "sql"}, {"lora_path": "team:sql"}):
        _, first = await client.chat([text(LONG)], **fields)
        assert cached_tokens(first) == 0, fields
    for fields in ({"model": "tiny:sql"}, {"model": "other:team:sql"}, {"model": "sql"}):  # of which the last is none
        _, again = await client.chat([text(LONG)], **fields)
        assert cached_tokens(again) > 0, fields
    assert len({*loras(client).values()}) == 1
    body = {"model": "tiny", "prompt": LONG, "max_tokens": 1}
    for lora in (None, "sql"):
        _, first = await client.post(COMPLETIONS, body | {"lora_path": lora})
        assert cached_tokens(first) == 0, lora
    status, answer = await client.chat([text(LONG)], lora_path="none")
    assert (status, "not loaded: none" in answer["message"]) == (400, True)
    status, _ = await (await serve_sglang()).chat([text(LONG)], lora_path="sql")
    assert status == 400


def test_hashes_of_an_adapters_pages_are_those_that_sglang_published():
    recording = ROOT / "tests" / "kv_events" / "recordings" / "sglang-0.5.23-pages-of-16.jsonl.xz"
    lines = [json.loads(line) for line in lzma.decompress(recording.read_bytes()).splitlines()]
    batches = [msgspec.msgpack.decode(bytes.fromhex(line["events"])) for line in lines if "events" in line]
    firsts = [
        event
        for batch in batches
        for event in batch[1]
        if event["type"] == "BlockStored" and event["parent_block_hash"] is None and event.get("lora_name")
    ]
    assert firsts
    for event in firsts:
        first = page(root(event.get("cache_salt")), array("Q", event["token_ids"][: event["block_size"]]))
        # The recorded engine's ids of adapters are their names, filled up with zeros.
        assert published(first + namespace(event["lora_name"].rjust(32, "0"))) == event["block_hashes"][0]


async def test_sglangs_responses_are_the_models(serve_sglang):
    client = await serve_sglang(*SGLANG)
    body = {"model": "tiny:sql", "input": LONG, "lora_path": "sql", "max_output_tokens": 4}
    status, _ = await client.post("/v1/responses", body)
    assert status == 200
    assert loras(client).keys() == {None}


async def test_a_name_is_no_adapter_without_the_flags(serve, serve_sglang):
    status, _ = await (await serve()).post(CHAT, chat_body("x", model="sql"))
    assert status == 404
    assert len(await listed(await serve_sglang("--no-enable-lora", *SGLANG))) == 1


@pytest.mark.parametrize("given", ["sql", "=/path", '{"name": "sql"}', '{"name": 7, "path": "p"}', "tiny=/path"])
def test_an_adapter_needs_a_path_and_a_name_of_its_own(given):
    with pytest.raises(ValueError, match="--lora-modules"):
        adapters("--lora-modules", [given], ["tiny"], "name", "path")
    with pytest.raises(ValueError, match="'a' conflicts"):
        adapters("--lora-modules", ["a=1", "a=2"], [], "name", "path")
