"""LLaVA prompts: the beginning-of-text token and the placeholder."""

import pytest

from mmrouter_lib.prompt import PromptImage, render_arguments

BEGIN = 1
TEXT = [{"role": "user", "content": "hello"}]
PICTURE = [{"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "What is this?"}]}]


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
    for name, model in (
        ("llava15-real.jsonl", "llava-hf--llava-1.5-7b-hf"),
        ("llavanext-real.jsonl", "llava-hf--llava-v1.6-mistral-7b-hf"),
    ):
        prompts = [step.prompt for step in captures.steps(name, models / model) if step.prompt]
        assert len(prompts) == 8
        assert all(BEGIN not in prompt for prompt in prompts)


def test_an_image_between_texts_has_the_prompt_length_of_the_hugging_face_processor(llava, llavanext):
    # models/README: one user message with a 640x480 image, then "What is this?", special tokens included.
    for prompter, total in ((llava, 592), (llavanext, 2355)):
        count = prompter.family.count(640, 480)
        expanded = prompter.expand(prompter.render(PICTURE), [PromptImage(bytes(32), count)], add_special_tokens=True)
        assert len(expanded.ids) == total
