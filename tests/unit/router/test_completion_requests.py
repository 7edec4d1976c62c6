"""Completions: which prompts are accepted, which are predicted, and what they are predicted to be."""

import json
from array import array
from dataclasses import replace

import pytest
from unit.router.preparing import preparing, settings
from unit.router.rig import BLOCK, Rig, prepared
from unit.router.test_intake import MISSING, TYPE, UNKNOWN, fault, read

from mmrouter_lib.block_keys import block_keys
from mmrouter_router.intake import Limits, parse_completion
from mmrouter_router.intake.completions import MAX_PROMPTS
from mmrouter_router.request.prepare import MAX_TEXT, Preparer

IDS = [5, 6, 7, 8]
TEXT = "The harbour lies still in the early light. "


def parsed(engine="vllm", **fields):
    return parse_completion(json.dumps({"model": "t", **fields}).encode(), Limits(), "t", engine)


@pytest.fixture
async def preparer():
    async with preparing(settings()) as preparer:
        yield preparer


async def predicted(preparer: Preparer, engine="vllm", **fields):
    return await preparer.prepare(parsed(engine, **fields), "salt")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("x", ("x",)),
        (["x"], ("x",)),
        (["x", "y"], ("x", "y")),
        (IDS, (array("I", IDS),)),
        ([IDS], (array("I", IDS),)),
        ([IDS, [1]], (array("I", IDS), array("I", [1]))),
    ],
)
def test_every_form_of_a_prompt_is_read(prompt, expected):
    request = parsed(prompt=prompt, max_tokens=3)
    assert (request.prompts, request.max_tokens, request.inexact) == (expected, 3, ())


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (400, "prompt", MISSING)),
        ({"prompt": None}, (400, "prompt", MISSING)),
        ({"prompt": {}}, (400, "prompt", TYPE)),
        ({"prompt": []}, (400, "prompt", TYPE)),
        ({"prompt": 7}, (400, "prompt", TYPE)),
        ({"prompt": ["x", 7]}, (400, "prompt[1]", TYPE)),
        ({"prompt": [7, "x"]}, (400, "prompt", TYPE)),
        ({"prompt": [7, -1]}, (400, "prompt", TYPE)),
        ({"prompt": [1 << 32]}, (400, "prompt", TYPE)),  # an image's name in SGLang is as large
        ({"prompt": [[7], "x"]}, (400, "prompt[1]", TYPE)),
        ({"prompt": [[7], [7.5]]}, (400, "prompt[1]", TYPE)),
        ({"prompt": [{"type": "image_url"}]}, (400, "prompt", TYPE)),
        ({"prompt": "x", "add_special_tokens": "yes"}, (400, "add_special_tokens", TYPE)),
        ({"prompt": "x", "vllm_xargs": 5}, (400, "vllm_xargs", TYPE)),
        ({"prompt": "x", "messages": []}, (400, "messages", UNKNOWN)),
        ({"prompt": "x", "prompt_embeds": "AAAA"}, (400, "prompt_embeds", "unsupported_parameter")),
    ],
)
def test_an_invalid_completion_is_refused_with_status_field_and_code(fields, expected):
    assert fault({"model": "demo", **fields}, parse=parse_completion) == expected


def test_the_head_of_a_prompt_is_stable_as_it_grows():
    def head(prompt):
        return read({"model": "demo", "prompt": prompt}, parse=parse_completion).messages

    start, ids = "once upon a time " * 200, list(range(3000))
    assert head(start + "A") == head(start + "B") == head([start, "more"]) != head("B" + start)
    assert head(ids) == head([*ids, 7]) == head([ids, [7]]) != head([7, *ids])


async def test_each_of_several_prompts_is_predicted_as_if_it_were_alone(preparer):
    texts = [TEXT * 9, "Another one. " * 20, TEXT * 9]
    alone = [await predicted(preparer, prompt=text) for text in texts]
    together = await predicted(preparer, prompt=texts)
    assert (together.exactness, together.reasons) == ("exact", ())
    assert together.all_keys(16) == [one.keys(16) for one in alone]
    assert together.tokens == sum(len(one.ids) for one in alone)
    assert together.all_keys(16)[0] != together.all_keys(16)[1]


async def test_a_text_and_its_token_ids_are_one_prompt_in_the_namespace_of_the_tenant(preparer):
    by_text = await predicted(preparer, prompt=TEXT * 9)
    by_ids = await predicted(preparer, prompt=by_text.ids.tolist())
    assert by_text.exactness == by_ids.exactness == "exact"
    assert by_text.keys(16) == by_ids.keys(16) == block_keys(by_text.ids, 16, (), preparer.seed("salt"))
    assert len(by_text.keys(16)) > 3
    assert preparer.prompter.tokenizer.decode(by_text.ids.tolist()) == TEXT * 9


@pytest.mark.parametrize(
    ("engine", "fields", "reason"),
    [
        ("vllm", {"echo": True, "logprobs": 0}, "cache_not_read:echo"),
        ("sglang", {"echo": True, "logprobs": 2}, "cache_not_read:echo"),
        ("vllm", {"prompt_logprobs": 1}, "cache_not_read:prompt_logprobs"),
        ("vllm", {"truncate_prompt_tokens": 5}, "truncation:truncate_prompt_tokens"),
        ("vllm", {"suffix": "the end"}, "infilling:suffix"),
        ("vllm", {"use_beam_search": True}, "beam_search:use_beam_search"),
        ("vllm", {"vllm_xargs": {"a": 1}}, "engine_arguments:vllm_xargs"),
        ("vllm", {"prompt": [TEXT] * (MAX_PROMPTS + 1)}, "several_prompts:prompt"),
        ("vllm", {"prompt": "x" * MAX_TEXT}, "prompt_size:prompt"),
    ],
)
async def test_what_is_not_read_from_the_cache_as_it_was_written_is_affinity_with_its_cause(
    preparer, engine, fields, reason
):
    made = await predicted(preparer, engine, **{"prompt": TEXT, **fields})
    assert (made.exactness, made.reasons, len(made.ids)) == ("affinity", (reason,), 0)


@pytest.mark.parametrize(
    ("engine", "fields"),
    [
        ("vllm", {"echo": False, "suffix": None, "truncate_prompt_tokens": None, "truncation_side": "left"}),
        ("vllm", {"n": 2, "logprobs": 1, "stream": True, "stop": ["x"]}),
        ("vllm", {"echo": True}),
        ("sglang", {"echo": True, "logprobs": None}),
        ("sglang", {"suffix": "without a template it has no effect", "mm_processor_kwargs": {"a": 1}}),
    ],
)
async def test_fields_without_effect_on_the_prompt_leave_it_exact(preparer, engine, fields):
    made = await predicted(preparer, engine, prompt=TEXT, **fields)
    assert (made.exactness, made.reasons) == ("exact", ())


def test_several_prompts_go_where_most_of_all_their_blocks_are():
    """The longest run of one prompt does not decide: the engine answers all of them."""
    rig, own = Rig(), prepared(ids=array("I", range(4 * BLOCK)))
    others = tuple(array("I", range(1000 * n, 1000 * n + 3 * BLOCK)) for n in (1, 2))
    several = replace(own, others=others)
    first, *more = several.all_keys(BLOCK)
    rig.worker("first", first[:3])
    rig.worker("others", [*more[0][:2], *more[1][:2]])
    decision = rig.placer.place(several)
    winner = decision.choice.winner
    assert (winner.name, winner.overlap, winner.blocks) == ("others", 4, 10)
    assert decision.fresh == first + more[0][2:] + more[1][2:]
