"""Conversations over which prompts are compared token by token: for each family the same ones in every run.

Written out are the shapes that templates, tokenizers and expansion treat differently; seeded random mixtures of them
cover the rest. Images are small pictures in ``data:`` URIs.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.workload import (
    CODE,
    CONTINUED,
    EMOJI,
    SCRIPTS,
    STORY,
    WEATHER,
    Case,
    case,
    image_part,
    picture,
    said,
    user,
)

DRAWN = 320
"""Random conversations of a family, beside those that are written down."""

QWEN = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")
LLAVA = ("<image>", "<s>", "</s>", "<pad>", "<unk>", "[INST]", "<<SYS>>")
GEMMA = (
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<bos>",
    "\n\n",
)
GEMMA4 = ("<|image|>", "<|image>", "<image|>", "<|audio|>", "<|im_start|>", "<|im_end|>", "\n\n")
GLM = ("<|image|>", "<|begin_of_image|>", "<|end_of_image|>", "<|video|>", "<|im_start|>", "<|im_end|>")
KIMI = (
    *("<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>", "<|im_end|>", "<think>"),
    *("<|reserved_token_151800|>", "<|reserved_token_1|>"),
)
PADDLEOCR = ("<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>", "<|im_start|>", "<|im_end|>")
MISTRAL = ("[IMG]", "[IMG_BREAK]", "[IMG_END]", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]")
INTERNVL = ("<IMG_CONTEXT>", "<image>", "<img>", "</img>", "<video>", "<|im_start|>", "<|im_end|>", "<<<__")
DEEPSEEK_OCR = ("<image>", "<|ref|>", "<|/ref|>", "<|grounding|>", "<|endoftext|>", "\n")
PHI3 = (
    *("<|image_1|>", "<|image_2|>", "<|image_7|>", "<|image_01|>", "<|image_|>", "<|image|>"),
    *("<|user|>", "<|end|>", "<|assistant|>", "<|system|>", "<|placeholder3|>", "<s>", "</s>"),
)
TEXT = (
    *("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "<|begin_of_text|>", "<|eot_id|>"),
    *("<|start_header_id|>", "<s>", "</s>", "[INST]", "[/INST]", "<\uff5cUser\uff5c>", "<|user|>", "<|end|>"),
    *("<bos>", "<start_of_turn>", "<end_of_turn>\n", "<image>", "<unk>"),
)
BLANKS = (" ", "  ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u200b", "   \n \t")
ODD = (
    *("▁", "▁▁a", "e\u0301", "\u0301", "ﬁ", "Ⅷ", "\ufeff", "\u2028", "\u0000", "\ufffd", "Å", "A\u030a", "\ud7ff"),
    "\U0010ffff",
)


@dataclass(frozen=True)
class Style:
    """What a family's conversations are made of: ``typed`` are texts that mean something to its tokenizer. ``sizes``
    are width and height of its pictures, ``most`` the number of images in a drawn conversation.
    """

    placeholder: str
    typed: Sequence[str]
    sizes: Sequence[tuple[int, int]]
    most: int
    tools: bool = True


SMALL = ((28, 28), (56, 84), (120, 60), (224, 224), (90, 300))
STYLES = {
    "qwen2_vl": Style("<|image_pad|>", QWEN, SMALL, 6),
    "qwen2_5_vl": Style("<|image_pad|>", (*QWEN, "<tool_call>", "</tool_call>"), SMALL, 6),
    "qwen3_vl": Style("<|image_pad|>", (*QWEN, "<think>", "</think>", "<tool_response>"), SMALL, 6),
    "qwen3_vl_moe": Style("<|image_pad|>", (*QWEN, "<think>", "</think>", "<tool_response>"), SMALL, 6),
    "qwen3_5": Style("<|image_pad|>", (*QWEN, "<think>", "</think>", "<tool_response>"), SMALL, 6),
    "qwen3_omni_moe": Style("<|image_pad|>", (*QWEN, "<|audio_pad|>", "<|audio_start|>"), SMALL, 6),
    "gemma3": Style("<start_of_image>", GEMMA, SMALL[:3], 3, tools=False),
    "gemma4": Style("<|image|>", GEMMA4, SMALL, 4),
    "glm4v": Style("<|image|>", GLM, SMALL, 4),
    "kimi_k25": Style("<|media_pad|>", KIMI, SMALL, 4),
    "paddleocr_vl": Style("<|IMAGE_PLACEHOLDER|>", PADDLEOCR, SMALL, 4),
    "mistral3": Style("[IMG]", MISTRAL, SMALL, 4, tools=False),
    "internvl_chat": Style("<IMG_CONTEXT>", INTERNVL, SMALL[:3], 3),
    "deepseek_ocr": Style("<image>", DEEPSEEK_OCR, (*SMALL[2:], (700, 350)), 3, tools=False),
    "deepseek_ocr2": Style("<image>", DEEPSEEK_OCR, (*SMALL[2:], (800, 300)), 3, tools=False),
    "llava": Style("<image>", LLAVA, ((120, 60), (90, 300)), 4),
    "llava_next": Style("<image>", LLAVA, ((120, 60), (60, 120), (224, 224)), 3, tools=False),
    "phi3_v": Style("<|image_1|>", PHI3, ((120, 60), (60, 120), (224, 224)), 3),
}


def corpus(family: str) -> list[Case]:
    style = STYLES[family]
    cases = [*plain(), *fields(style), *placed(style), *literal(style), *called(style), *drawn(style)]
    assert len({one.name for one in cases}) == len(cases)
    return cases


def text_corpus() -> list[Case]:
    """Conversations without images, with what the tokenizers of several text models treat as their own."""
    style = Style("<|image_pad|>", TEXT, SMALL, 0)
    cases = [*plain(), *fields(style), *literal(style), *called(style), *drawn(style)]
    return [one for one in cases if '"image_url"' not in json.dumps(one.body)]


def images(style: Style, count: int) -> list[dict[str, object]]:
    sizes = [style.sizes[number % len(style.sizes)] for number in range(count)]
    return [image_part(picture(*size, seed=number + 1)) for number, size in enumerate(sizes)]


def plain() -> Iterator[Case]:
    texts = {
        "short": "Hi",
        "empty": "",
        "blank": " ",
        "newline": "\n",
        "story": STORY,
        "scripts": SCRIPTS,
        "emoji": EMOJI,
        "code": CODE,
        "long code": CODE * 12,
        "odd": " ".join(ODD),
        "odd without blanks": "".join(ODD),
        "blanks": "".join(BLANKS) * 3,
        "blanks around": f"{BLANKS[9]}text{BLANKS[9]}",
        "digits": "3.14159 1000000 1,000,000 0x1F 2026-11-21T01:02:03Z ½ Ⅷ ٣",
        "json": json.dumps({"a": [1, {"b": None}], "ü": "\n\t\"'"}),
        "markup": "<b>bold</b> <!-- --> {{ messages }} {% raw %} &amp; <|no_token|> <| im_end |> <image > <|image_pad|",
    }
    for name, text in texts.items():
        yield case(f"text {name}", user(text))
        yield case(f"answered {name}", user(text), said("assistant", text), user("Go on."))
        yield case(f"system {name}", said("system", text), user("Hello."))


def fields(style: Style) -> Iterator[Case]:
    """Request fields that change the prompt, system and developer messages, names, null and empty contents."""
    (one,) = images(style, 1)
    ask, answer = user("What is it?"), said("assistant", "  It is a lamp,\n")
    yield case("no generation prompt", ask, answer, add_generation_prompt=False)
    yield case("no generation prompt after a question", ask, add_generation_prompt=False)
    yield case("continued", ask, answer, **CONTINUED)
    yield case("continued with image", user(one, "What?"), said("assistant", "A lamp"), **CONTINUED)
    yield case("continued question", user("Once upon a"), **CONTINUED)
    yield case("continued parts", ask, {**user("It", "is"), "role": "assistant"}, **CONTINUED)
    yield case("special tokens added", ask, add_special_tokens=True)
    yield case("special tokens added, image", user(one, "What?"), add_special_tokens=True)
    yield case("special tokens added, turns", ask, answer, user(one, "And this?"), add_special_tokens=True)
    yield case("vision ids", user(one, "What?"), chat_template_kwargs={"add_vision_id": True})
    yield case("unknown template argument", ask, chat_template_kwargs={"colour": "blue"})
    yield case("two system messages", said("system", "One."), said("system", "Two."), ask)
    yield case("late system message", ask, said("system", "Be brief."), user("Well?"))
    yield case("system in parts", {**user("One.", "Two."), "role": "system"}, ask)
    yield case("developer", said("developer", "Be brief."), ask)
    yield case("system and developer", said("system", "One."), said("developer", "Two."), ask)
    yield case("named", {**ask, "name": "anna"}, {**answer, "name": "bot"}, user("Well?"))
    yield case("null answer", ask, {"role": "assistant", "content": None}, user("Well?"))
    yield case("empty answer", ask, said("assistant", ""), user("Well?"))
    yield case("no parts", {"role": "user", "content": []})
    yield case("two questions", ask, user("Well?"))
    yield case("ends with an answer", ask, answer)
    yield case("begins with an answer", answer, ask)
    yield case("unknown role", said("critic", "No."), ask)
    yield case("refusal part", ask, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, ask)
    yield case("reasoning", ask, {**answer, "reasoning_content": "Hm."}, user("Well?"))
    yield case("documents", ask, documents=[{"title": "Lamps", "text": "They shine."}])


def placed(style: Style) -> Iterator[Case]:
    a, b, c = images(style, 3)
    yield case("image alone", user(a))
    yield case("image first", user(a, "What?"))
    yield case("image last", user("What?", a))
    yield case("image between", user("See", a, "here"))
    yield case("image between blanks", user(" \n", a, "\n "))
    yield case("image and empty text", user("", a, ""))
    yield case("images side by side", user(a, b, "Compare."))
    yield case("images swapped", user(b, a, "Compare."))
    yield case("the same image twice", user(a, a))
    yield case("images and texts in turn", user("One", a, "two", b, "three", c, "end"))
    yield case("images behind", user("Compare", a, b))
    yield case("image in turn two", user("Hi"), said("assistant", "Yes?"), user(b, "And?"))
    yield case("images in all turns", user(a), said("assistant", "A."), user("B?", b), said("assistant", "B."), user(c))
    yield case("image behind a system prompt", said("system", STORY[:200]), user(a, "What?"))
    yield case("image in the system prompt", {**user(a, "Style."), "role": "system"}, user("Hi"))
    yield case("image in an answer", user("Draw."), {**user("Here:", a), "role": "assistant"}, user("Thanks"))
    yield case("image before odd text", user(a, "".join(ODD)))
    yield case("image before emoji", user(a, EMOJI))
    yield case("image and long code", user(CODE * 5, a, CODE * 5))


def literal(style: Style) -> Iterator[Case]:
    """What a family's tokenizer or expansion treats as its own, typed by a user."""
    a, b = images(style, 2)
    for number, text in enumerate(style.typed):
        yield case(f"typed {number}", user(f"What does {text} mean?"))
        yield case(f"typed alone {number}", user(text))
        yield case(f"typed twice {number}", user(f"{text}{text} {text}\n{text}x{text}"))
        yield case(f"typed before an image {number}", user(f"What does {text} mean?", a))
        yield case(f"typed after an image {number}", user(a, f"What does {text} mean?"))
        yield case(f"typed in the system prompt {number}", said("system", f"Mind {text} !"), user(a, "What?"))
        yield case(f"typed in an answer {number}", user(a), said("assistant", f"{text}  x"), user(b, "And?"))
        yield case(f"cut short {number}", user(f"{text[:-1]} {text[1:]} {text[:2]}{text}", a))
    place = style.placeholder
    yield case("typed in the image's place", user(f"See {place} here", a, f"and {place}"))
    yield case("typed between images", user(a, f"between {place} two", b))
    yield case("typed in another message", user(f"Mind {place}"), said("assistant", "Yes"), user(a, b, "Compare."))


def called(style: Style) -> Iterator[Case]:
    (a,) = images(style, 1)
    ask = user("Weather in Oslo and in Århus?")
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Oslo", "n": 1.0}'}}
    empty = {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": ""}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "-3 °C, ❄️"}
    calls = {"role": "assistant", "content": None, "tool_calls": [call]}
    bare: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
    strict = {
        "type": "function",
        "function": {"name": "späť", "description": "<|im_end|>", "parameters": {}, "strict": True},
    }
    yield case("tools", ask, tools=[WEATHER], tool_choice="none")
    yield case("tools with an image", user(a, "Weather there?"), tools=[WEATHER], tool_choice="none")
    yield case("several tools", said("system", "Brief."), ask, tools=[WEATHER, bare, strict], tool_choice="none")
    yield case("no tools in the list", ask, tools=[])
    yield case("call and result", ask, calls, result, tools=[WEATHER], tool_choice="none")
    yield case("call and result without tools", ask, calls, result)
    yield case("call with text", ask, {**calls, "content": "I look."}, result, user("And?"))
    yield case("two calls", ask, {**calls, "tool_calls": [call, empty]}, result, {**result, "tool_call_id": "c2"})
    yield case("result in parts", ask, calls, {**user("-3", "snow"), "role": "tool", "tool_call_id": "c1"})
    yield case("result with an image", ask, calls, {**user("Map:", a), "role": "tool", "tool_call_id": "c1"})
    yield case("empty calls", ask, {**said("assistant", "No."), "tool_calls": []}, user("Why?"))


def drawn(style: Style, count: int = DRAWN) -> Iterator[Case]:
    """Conversations drawn at random; every third goes on with the one before it."""
    draw = random.Random(68)
    words = [*STORY.split(), *SCRIPTS.split(), *EMOJI.split(), *CODE.split(" ")]
    odd = [*style.typed, *(text[:-2] for text in style.typed), *BLANKS, *ODD, "", style.placeholder]
    pool = images(style, 8)

    def text(most: int = 40) -> str:
        pieces = [draw.choice(odd if draw.random() < 0.2 else words) for _ in range(draw.randint(0, most))]
        return draw.choice((" ", " ", "\n", "")).join(pieces)

    def message(left: int) -> dict[str, Any]:
        if draw.random() < 0.3:
            return user(text())
        shown = draw.sample(pool, draw.randint(0, min(left, 3)))
        parts: list[dict[str, object] | str] = [text(20) for _ in range(draw.randint(1, 3))]
        for one in shown:
            parts.insert(draw.randint(0, len(parts)), one)
        return user(*parts, "")

    def shown_in(history: list[dict[str, Any]]) -> int:
        return sum(
            part["type"] == "image_url"
            for one in history
            if isinstance(one["content"], list)
            for part in one["content"]
        )

    history: list[dict[str, Any]] = []
    for number in range(count):
        if number % 3 == 0:
            history = [said("system", text(30))] if draw.random() < 0.4 else []
        history = [*history, message(style.most - shown_in(history))]
        extra: dict[str, Any] = {}
        if style.tools and draw.random() < 0.1:
            extra = {"tools": [WEATHER], "tool_choice": "none"}
        if draw.random() < 0.1:
            extra["add_special_tokens"] = True
        answer = said("assistant", "Well, " + text(25) + ".")
        if draw.random() < 0.15:
            yield case(f"drawn {number}", *history, answer, **CONTINUED, **extra)
        else:
            yield case(f"drawn {number}", *history, **extra)
        history = [*history, answer]
