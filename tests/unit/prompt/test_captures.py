"""Prompts equal those of a real vLLM 0.32: token ids, and image spans in its block events."""

import pytest
from unit.engines.conftest import OWN
from unit.prompt.conftest import MODELS, TINY, load

from mmrouter_lib.prompt import PromptImage, render_arguments

BLOCK = 32


def compare(prompter, model, captures, name):
    """Compare every answered chat of a capture; return the numbers of prompts and of stored blocks compared."""
    ends: dict[object, int] = {}  # engine hash -> where its block ends in its prompt
    prompts = blocks = 0
    for step in captures.steps(name, model):
        spans, ids = (), step.prompt + step.output
        if step.prompt:
            text = prompter.render(step.body["messages"], **render_arguments(step.body))
            expanded = prompter.expand(text, step.images, step.body.get("add_special_tokens", False))
            assert list(expanded.ids) == step.prompt, step.label
            spans = expanded.spans
            prompts += 1
        for event in step.events:
            if event["type"] == "AllBlocksCleared":
                ends.clear()
            if event["type"] != "BlockStored" or not step.prompt:
                continue
            start = ends[event["parent_block_hash"]] if event["parent_block_hash"] else 0
            for number, block_hash in enumerate(event["block_hashes"]):
                at = start + number * BLOCK
                assert event["token_ids"][number * BLOCK : (number + 1) * BLOCK] == ids[at : at + BLOCK], step.label
                extra = (event.get("extra_keys") or [None] * len(event["block_hashes"]))[number] or []
                offsets = [pair[1] for pair in extra if isinstance(pair, list)]
                inside = [span for span in spans if span.offset < at + BLOCK and span.end > at]
                assert offsets == [span.offset - at for span in inside], step.label
                ends[block_hash] = at + BLOCK
                blocks += 1
    return prompts, blocks


def test_prompts_and_spans_of_the_capture_in_this_repository_are_the_engines(tiny, captures):
    assert compare(tiny, TINY, captures, OWN) == (9, 13)


@pytest.mark.parametrize(
    ("name", "prompts", "blocks"),
    [
        ("qwen2vl_core_uuid_clear.jsonl", 31, 87),
        ("qwen2vl_evict_byteshash.jsonl", 6, 30),
        ("qwen2vl_kwargs_byteshash.jsonl", 8, 16),
        ("qwen2vl_kvshare_lora.jsonl", 5, 16),
    ],
)
def test_prompts_and_spans_of_the_small_vocabulary_are_the_engines(captured_model, captures, name, prompts, blocks):
    assert compare(load(captured_model), captured_model, captures, name) == (prompts, blocks)


@pytest.mark.parametrize(
    ("prompter", "name", "counts"),
    [
        ("qwen2", "qwen2vl-real.jsonl", (8, 23)),
        ("qwen3", "qwen3vl-real.jsonl", (8, 20)),
        ("llava", "llava15-real.jsonl", (8, 128)),
        ("llavanext", "llavanext-real.jsonl", (8, 279)),
        ("phi3", "phi3v-nosw.jsonl", (8, 320)),
    ],
)
def test_prompts_and_spans_of_real_tokenizers_are_the_engines(prompter, name, counts, models, captures, request):
    assert compare(request.getfixturevalue(prompter), models / MODELS[prompter], captures, name) == counts


BEGIN = 1
TEXT = [{"role": "user", "content": "hello"}]
PICTURE = [{"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "What is this?"}]}]


@pytest.mark.parametrize(("prompter", "total"), [("qwen2", 416), ("qwen3", 314), ("llava", 592), ("llavanext", 2355)])
def test_an_image_between_texts_has_the_prompt_length_of_the_hugging_face_processor(prompter, total, request):
    # models/README: one user message with a 640x480 image, then "What is this?"; LLaVA's with special tokens.
    loaded, qwen = request.getfixturevalue(prompter), prompter.startswith("qwen")
    images = [PromptImage(bytes(32), loaded.family.count(640, 480))]
    expanded = loaded.expand(loaded.render(PICTURE), images, add_special_tokens=not qwen)
    assert len(expanded.ids) == total
    if qwen:
        span = expanded.spans[0]
        assert list(expanded.ids[span.offset - 1 : span.offset + 1]) == [151652, 151655]
        assert list(expanded.ids[span.end - 1 : span.end + 1]) == [151655, 151653]


@pytest.fixture(params=["llava", "llavanext"])
def prompter(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("messages", [TEXT, PICTURE])
def test_case_35_a_beginning_of_text_token_comes_first_exactly_when_special_tokens_are_requested(prompter, messages):
    images = [PromptImage(bytes(32), 5)] if messages is PICTURE else []
    text = prompter.render(messages, **render_arguments({}))
    without, with_it = (prompter.expand(text, images, add_special_tokens=asked) for asked in (False, True))
    assert BEGIN not in without.ids
    assert with_it.ids.tolist() == [BEGIN, *without.ids]
    assert [span.offset for span in with_it.spans] == [span.offset + 1 for span in without.spans]


def test_case_35_the_captured_engine_has_none_in_chat(captures, models):
    for name, model in (("llava15-real.jsonl", "llava"), ("llavanext-real.jsonl", "llavanext")):
        prompts = [step.prompt for step in captures.steps(name, models / MODELS[model]) if step.prompt]
        assert len(prompts) == 8
        assert all(BEGIN not in prompt for prompt in prompts)
