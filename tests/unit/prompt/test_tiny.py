"""The committed tiny model equals the script's output, and it is small."""

import runpy
from pathlib import Path

import pytest

from mmrouter_lib import families
from mmrouter_lib.prompt import PromptImage


@pytest.fixture(scope="module")
def made(tiny_folder, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    runpy.run_path(str(tiny_folder.parent / "make_tiny.py"))["write"](folder)
    return folder


def test_the_committed_folder_is_what_the_script_makes(made, tiny_folder):
    names = sorted(path.name for path in tiny_folder.iterdir())
    assert names == sorted(path.name for path in made.iterdir())
    for name in names:
        assert (made / name).read_bytes() == (tiny_folder / name).read_bytes(), (
            f"run examples/models/make_tiny.py: {name}"
        )


def test_it_is_small(tiny_folder):
    assert sum(path.stat().st_size for path in tiny_folder.iterdir()) < 300_000


def test_its_counts_are_those_of_qwen2(tiny_folder):
    family = families.load_family(tiny_folder, None)
    assert [family.count(*size) for size in ((224, 224), (640, 480), (1920, 1080))] == [64, 391, 2691]


def test_every_special_token_is_one_token_and_every_text_comes_back(tiny):
    for text in ("<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|vision_start|>", "<|endoftext|>"):
        assert len(tiny.expand(text, []).ids) == 1
    for text in ("What is in this picture?", "日本語 und Ünïcode 🎉\n\t x", "12,345.678"):
        assert tiny.tokenizer.decode(list(tiny.expand(text, []).ids)) == text


def test_ordinary_text_takes_few_tokens(tiny):
    text = "Describe the image in one sentence. How many people are in the photo?"
    assert len(tiny.expand(text, []).ids) < len(text) / 3


def test_a_conversation_with_tools_documents_and_images_is_laid_out_as_its_template_says(tiny):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Where? "}, {"type": "image_url"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "Bergen"}]},
    ]
    text = tiny.render(
        messages, tools=[{"type": "function", "function": {"name": "find"}}], documents=[{"title": "T", "text": "x"}]
    )
    head, tail = text.split("<|im_start|>user\n")
    assert '{"name": "find", "description": null, "parameters": null}\n' in head
    assert head.endswith("<|im_start|>system\nT:\nx<|im_end|>\n")
    assert tail == (
        "Where? <|vision_start|><|image_pad|><|vision_end|><|im_end|>\n"
        '<|im_start|>assistant\n\n<call>{"name": "find", "arguments": {"a": 1}}</call><|im_end|>\n'
        "<|im_start|>tool\nBergen<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(tiny.expand(text, [PromptImage(bytes(32), 64)]).spans) == 1
