"""Prompts equal those of a real vLLM 0.32: token ids, and image spans in its block events."""

import pytest

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
            start = ends[_key(event["parent_block_hash"])] if event["parent_block_hash"] else 0
            for number, block_hash in enumerate(event["block_hashes"]):
                at = start + number * BLOCK
                assert event["token_ids"][number * BLOCK : (number + 1) * BLOCK] == ids[at : at + BLOCK], step.label
                extra = (event.get("extra_keys") or [None] * len(event["block_hashes"]))[number] or []
                offsets = [pair[1] for pair in extra if isinstance(pair, list)]
                inside = [span for span in spans if span.offset < at + BLOCK and span.end > at]
                assert offsets == [span.offset - at for span in inside], step.label
                ends[_key(block_hash)] = at + BLOCK
                blocks += 1
    return prompts, blocks


def _key(block_hash: object) -> object:
    return block_hash["bin"] if isinstance(block_hash, dict) else block_hash


@pytest.mark.parametrize(
    ("name", "prompts", "blocks"),
    [
        ("qwen2vl_core_uuid_clear.jsonl", 31, 87),
        ("qwen2vl_evict_byteshash.jsonl", 6, 30),
        ("qwen2vl_kwargs_byteshash.jsonl", 8, 16),
        ("qwen2vl_kvshare_lora.jsonl", 5, 16),
    ],
)
def test_prompts_and_spans_of_the_small_vocabulary_are_the_engines(
    load_prompter, captured_model, captures, name, prompts, blocks
):
    assert compare(load_prompter(captured_model), captured_model, captures, name) == (prompts, blocks)


def test_prompts_and_spans_of_the_real_qwen2_tokenizer_are_the_engines(qwen2, models, captures):
    model = models / "Qwen--Qwen2-VL-2B-Instruct"
    assert compare(qwen2, model, captures, "qwen2vl-real.jsonl") == (8, 23)


def test_prompts_and_spans_of_the_real_qwen3_tokenizer_are_the_engines(qwen3, models, captures):
    model = models / "Qwen--Qwen3-VL-2B-Instruct"
    assert compare(qwen3, model, captures, "qwen3vl-real.jsonl") == (8, 20)


def test_prompts_and_spans_of_the_real_llava15_tokenizer_are_the_engines(llava, models, captures):
    assert compare(llava, models / "llava-hf--llava-1.5-7b-hf", captures, "llava15-real.jsonl") == (8, 128)


def test_prompts_and_spans_of_the_real_llavanext_tokenizer_are_the_engines(llavanext, models, captures):
    model = models / "llava-hf--llava-v1.6-mistral-7b-hf"
    assert compare(llavanext, model, captures, "llavanext-real.jsonl") == (8, 279)


def test_prompts_and_spans_of_phi3_are_the_engines(phi3, models, captures):
    model = models / "microsoft--Phi-3-vision-128k-instruct"
    assert compare(phi3, model, captures, "phi3v-nosw.jsonl") == (8, 320)


def test_an_image_between_texts_has_the_prompt_length_of_the_hugging_face_processor(qwen2, qwen3):
    # models/README: one user message with a 640x480 image, then "What is this?".
    messages = [{"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "What is this?"}]}]
    for prompter, total in ((qwen2, 416), (qwen3, 314)):
        count = prompter.family.count(640, 480)
        expanded = prompter.expand(prompter.render(messages), [PromptImage(bytes(32), count)])
        assert len(expanded.ids) == total
        span = expanded.spans[0]
        assert list(expanded.ids[span.offset - 1 : span.offset + 1]) == [151652, 151655]
        assert list(expanded.ids[span.end - 1 : span.end + 1]) == [151655, 151653]
