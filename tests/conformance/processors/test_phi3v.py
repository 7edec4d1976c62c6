"""Phi-3 prompts of drawn text against vLLM's own class: ids, places, and what has none."""

import random
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance.conftest import Record
from conformance.processors.conftest import Ask

from mmrouter_lib import families
from mmrouter_lib.prompt import PlaceholderError, Prompter, PromptImage

PROMPTS = 3000
WORDS = [
    *(
        "a",
        " the",
        "naïve ",
        "図",
        "  ",
        "\n",
        "\t",
        "\u2581",
        " \u2581x",
        "é",
        "🎉",
        "<",
        "<|",
        "|>",
        "_1",
        "1",
        "<s",
        "s>",
    ),
    *("<s>", "</s>", "<unk>", "<|endoftext|>", "<|system|>", "<|user|>\n", "<|end|>\n", "<|assistant|>\n", "<|image|>"),
    *(
        "<s> ",
        "</s>  ",
        "<|end|> ",
        "<|user|> x",
        "<|placeholder3|> y",
        "<|image|> z",
        "<|image",
        "<|image_",
        "image_1|>",
    ),
    *("<|image_01|>", "<|image_0|>", "<|image_|>", "<|image_\u0661|>", "<| image_1|>", "<|image_12|>"),
]


def prompts() -> list[dict[str, Any]]:
    draw = random.Random(3)
    drawn = []
    for _ in range(PROMPTS):
        images = draw.choice((0, 1, 1, 1, 2, 2, 3))
        tags = [f"<|image_{number + 1}|>" for number in range(images)]
        if draw.random() < 0.3:
            tags += draw.choices(["<|image_1|>", "<|image_2|>", "<|image_3|>", "<|image_4|>"], k=draw.randint(1, 2))
        if draw.random() < 0.1:
            draw.shuffle(tags)
        pieces = ["".join(draw.choices(WORDS, k=draw.randint(0, 6))) for _ in range(len(tags) + 1)]
        text = pieces[0] + "".join(tag + piece for tag, piece in zip(tags, pieces[1:], strict=True))
        drawn.append({"text": text, "counts": [draw.randint(1, 9) for _ in range(images)]})
    return drawn


def test_case_34_phi3_prompts_of_drawn_text_are_those_of_vllms_own_class(
    ask: Ask, model: Callable[[str], Path], record: Record
) -> None:
    folder = model("microsoft--Phi-3-vision-128k-instruct")
    family = families.load_family(folder, None)
    assert family is not None
    prompter, drawn = Prompter.load(folder, family=family), prompts()
    equal, refused, wrong = 0, 0, []
    for prompt, theirs in zip(drawn, ask("vllm_phi3v.py", str(folder), prompts=drawn), strict=True):
        images = [PromptImage(number.to_bytes(32), count) for number, count in enumerate(prompt["counts"])]
        in_order = theirs is not None and [place[2] for place in theirs["places"]] == list(range(len(images)))
        try:
            expanded = prompter.expand(prompt["text"], images)
        except PlaceholderError:
            refused += 1
            if in_order:
                wrong.append(prompt)
            continue
        places = [[span.offset, span.length, int.from_bytes(span.identity)] for span in expanded.spans]
        if in_order and expanded.ids == array("I", theirs["ids"]) and places == theirs["places"]:
            equal += 1
        else:
            wrong.append(prompt)
    record("vLLM's Phi-3 class: prompts equal, refused, mismatches", [equal, refused, len(wrong)])
    assert not wrong, wrong[:5]
    assert equal > PROMPTS * 0.8
    assert refused > 20
