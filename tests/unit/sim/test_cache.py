"""``/sim/cache`` lists the blocks of a simulated engine with everything that keys are made of."""

from array import array

import pytest
from e2e.equality import difference, keys_of
from unit.sim.conftest import chat_body
from unit.sim.test_http import LONG, image, png, text

from mmrouter_lib.block_keys import Span, block_keys, namespace_seed
from mmrouter_lib.media_identity import foreign_identity, to_wire

OURS = bytes(range(32))
IMAGE_TOKEN = 1029  # of the tiny model


def seed(lora, salt):
    return namespace_seed(bytes(32), model="m", lora=lora, salt=salt)


async def test_the_keys_of_a_cache_are_those_of_the_prompts_and_answers_in_it(serve):
    client = await serve("--block-size", "16", "--sim-blocks", "2050")
    expected = set()
    for content, identity, salt in (
        ([text(LONG)], None, None),
        ([text(LONG), image(png(), to_wire(OURS)), text(LONG)], OURS, None),
        ([text(LONG), image(png("blue"), "u-1"), text(LONG)], foreign_identity("u-1"), None),
        ([text(LONG), image(png(), to_wire(OURS))], OURS, "tenant"),
    ):
        fields = {"cache_salt": salt} if salt else {}
        _, reply = await client.chat(content, max_tokens=40, ignore_eos=True, return_token_ids=True, **fields)
        prompt = reply["prompt_token_ids"]
        pads = [place for place, token in enumerate(prompt) if token == IMAGE_TOKEN]
        spans = [Span(pads[0], len(pads), identity)] if identity else []
        ids = array("I", prompt + reply["choices"][0]["token_ids"][:-1])  # the last token is sampled, never computed
        expected |= set(block_keys(ids, 16, spans, seed(None, salt)))
    _, told = await client.get("/sim/cache")
    assert keys_of(told, seed) == {"0": expected}


async def test_evicted_blocks_are_listed_only_as_ancestors(serve):
    client = await serve("--block-size", "16", "--max-model-len", "640", "--sim-blocks", "42")
    for number in range(6):
        await client.chat(f"{number} {LONG}", max_tokens=40, ignore_eos=True)
    _, told = await client.get("/sim/cache")
    held = client.engine.runners[0].scheduler.pool.contents()
    blocks = told["ranks"]["0"]
    assert {bytes.fromhex(block["digest"]) for block in blocks if block["held"]} == set(held)
    assert len(keys_of(told, seed)["0"]) == len(held)
    hung_on = {block["parent"] for block in blocks}
    assert all(block["held"] or place in hung_on for place, block in enumerate(blocks))


async def test_ranks_are_listed_separately(serve):
    client = await serve("--data-parallel-size", "2")
    await client.post("/v1/chat/completions", chat_body(LONG), headers={"x-data-parallel-rank": "1"})
    _, told = await client.get("/sim/cache")
    held = keys_of(told, seed)
    assert (len(held["0"]), bool(held["1"])) == (0, True)


async def test_the_cache_route_needs_the_key(serve):
    client = await serve("--api-key", "k1")
    assert (await client.get("/sim/cache"))[0] == 401
    assert (await client.get("/sim/cache", headers={"authorization": "Bearer k1"}))[0] == 200


@pytest.mark.parametrize(
    ("before", "believed", "after", "says"),
    [
        ({1, 2}, {1, 2}, {1, 2}, ""),
        ({1}, {1, 2}, {1, 2}, ""),  # stored meanwhile
        ({1, 2}, {1, 2}, {1}, ""),  # given up meanwhile
        ({1, 2}, {1}, {1, 2}, "rank 0: 1 of 2 held are not known, 0 are not held"),
        ({1}, {1, 2}, {1}, "rank 0: 0 of 1 held are not known, 1 are not held"),
        ({1}, {2}, {1}, "rank 0: 1 of 1 held are not known, 1 are not held"),
    ],
)
def test_a_belief_differs_where_it_was_wrong_the_whole_time(before, believed, after, says):
    assert difference({"0": before}, {"0": believed}, {"0": after}) == says


def test_a_missing_rank_counts_as_empty():
    assert difference({"0": set()}, {}, {"0": set()}) == ""
    assert difference({"0": {1}}, {}, {"0": {1}}) == "rank 0: 1 of 1 held are not known, 0 are not held"
