"""The prompt of every conversation of the corpus, and of SGLang's own fields, against SGLang's own rendering."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from artefacts import Record, run_tool_or_skip
from conformance.conftest import Figure, model_folder
from conformance.corpus import STYLES, corpus, images
from conformance.engine_process import env_version
from conformance.own_code import answer_of
from conformance.prediction import image_places
from conformance.workload import WEATHER, Case, case, said, user
from long_form import IS_LONG

from mmrouter_lib import families
from mmrouter_lib.engines.prompters import PROMPTERS
from mmrouter_lib.engines.sglang.adapter import other_prompt
from mmrouter_lib.families import Expanded, Family
from mmrouter_lib.media_identity import Modality
from mmrouter_lib.prompt import AnyPrompter, NotModelledError, PlaceholderError, PromptImage
from mmrouter_lib.prompt.tokenizer import TokenizerCodec

FOLDERS = {
    "qwen2_vl": "Qwen--Qwen2-VL-2B-Instruct",
    "qwen2_5_vl": "Qwen--Qwen2.5-VL-7B-Instruct",
    "qwen3_vl": "Qwen--Qwen3-VL-2B-Instruct",
    "llava": "llava-hf--llava-1.5-7b-hf",
    "qwen3_vl_moe": "",
    "qwen3_5": "",
    "gemma3": "",
    "gemma4": "",
    "glm4v": "",
    "kimi_k25": "",
    "qwen3_omni_moe": "",
    "paddleocr_vl": "",
    "internvl_chat": "",
    "mistral3": "",
}
"""Family -> model folder, empty for one that ``hack/engines/unknown_families.py`` makes."""
OTHERS = ("qwen3_vl_moe", "qwen3_5", "gemma4", "glm4v", "kimi_k25", "mistral3", "qwen3_omni_moe")
LONG_FORM = () if IS_LONG else OTHERS
"""Families that have the template and the tokenizer of another one, or Kimi its words."""
COMPARED = [family for family in FOLDERS if family not in LONG_FORM]
EVERYTHING = """{# image #}{{ messages | tojson }}
{{ tools | tojson }} {{ documents | tojson }}
{{ [thinking, enable_thinking, reasoning_effort, colour] | map("string") | list | tojson }}\\n
{%- for message in messages if message.content is not string %}{% for part in message.content %}
{%- if part.type == "image" %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endfor %}
{{- add_generation_prompt }}

"""
"""Shows all that a template is given."""
TEXTS = """{% for m in messages %}{{ m.role }}: {{ m.content }}\\n{% endfor %}"""
PICKY = """{# image #}{% if tools %}{{ tools[0]['name'] + 'x' }}{% endif %}
{%- for message in messages %}{{ message.content }}{% endfor %}"""
"""Fails on tools in OpenAI's form: the engine then passes the functions alone."""
TEMPLATES = {"everything": EVERYTHING, "texts": TEXTS, "picky": PICKY}

NOW: dict[str, Any] = {
    "function": {
        "parameters": {
            "properties": {
                "at": {"type": "varchar(20)"},
                "n": {"type": ["INT", "integer", "null"]},
                "list": {"type": "list[str]", "items": {"type": "Float64"}},
                "odd": {"anyOf": [{"const": {"type": "int"}}, {"type": "dict<a>"}], "type": "Object"},
            },
            "type": "map",
        },
        "strict": False,
        "name": "now",
    },
    "type": "function",
}
MORE_THAN_PLACEHOLDERS = ("gemma3", "gemma4", "internvl_chat", "mistral3")
"""Families that write tokens around an image's own, of which the texts alone are compared here."""
REFUSED_BEFORE = {"unknown role"}
"""What the engine refuses for a reason that is not in the prompt, as the router does before."""


def own_fields(family: str) -> Iterator[Case]:
    ask, answer = user("What is it?"), said("assistant", "A lamp.")
    (one,) = images(STYLES[family], 1)
    shown = user(one, "Weather there?")
    tools = [WEATHER, NOW]
    named = {"type": "function", "function": {"name": "now"}}
    for name, choice in {
        "absent": None,
        "auto": "auto",
        "required": "required",
        "none": "none",
        "named": named,
    }.items():
        for where, message in {"text": ask, "image": shown}.items():
            yield case(f"tool choice {name}, {where}", message, tools=tools, tool_choice=choice)
    yield case("deferred tool", ask, tools=[{**WEATHER, "defer_loading": True}])
    for effort in ("none", "low", "max", 0.5, "0.25", "extreme", 1.5):
        yield case(f"effort {effort}", ask, reasoning_effort=effort)
        yield case(f"reasoning.effort {effort}", ask, reasoning={"effort": effort}, reasoning_effort="high")
    for enabled in (True, False, "yes", "no", None):
        yield case(f"reasoning.enabled {enabled}", ask, reasoning={"enabled": enabled})
    for at, given in enumerate(
        (
            {"reasoning_effort": "own", "enable_thinking": None, "colour": "auto"},
            {"documents": [{"text": "x"}], "thinking": 3},
            {"tools": []},
            {"add_generation_prompt": False},
            {"continue_final_message": True},
            {"continue_final_message": False},
            {"namespace": 1, "range": 2},
        )
    ):
        yield case(f"template arguments {at}", ask, chat_template_kwargs=given, reasoning_effort="low")
    for name, fields in {
        "continued alone": {"continue_final_message": True},
        "ended": {"add_generation_prompt": False},
    }.items():
        for text in ("  It is a lamp,\n", "", "<|im_end|>\n", " and", "1"):
            yield case(f"{name} {text!r}", ask, said("assistant", text), **fields)
            yield case(f"{name} {text!r}, image", shown, said("assistant", text), **fields)
        yield case(f"{name}, parts", ask, {**user("It", " is"), "role": "assistant"}, **fields)
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "now", "arguments": '{"n": 1.0}'}} for n in (1, 2)
    ]
    called = {"role": "assistant", "content": None, "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": f"at {n}"} for n in (2, 1)]
    yield case("results in another order", ask, called, *results)
    yield case("results in parts", ask, called, {**results[0], **user("a", "b"), "role": "tool"}, user("So?"))
    yield case("ends with calls", ask, called)
    yield case("ends with calls, continued", ask, {**called, "content": "So"}, continue_final_message=True)
    for arguments in (
        "",
        "[1]",
        '{"a": 1e400, "b": 18446744073709551616}',
        '{"a": NaN}',
        '{"\\ud800": 1}',
        {"a": None},
    ):
        call = {**calls[0], "function": {"name": "now", "arguments": arguments}}
        yield case(f"arguments {arguments}", ask, {**called, "tool_calls": [call]}, user("So?"))
    yield case("reasoning of an answer", ask, {**answer, "reasoning_content": "Hm.", "reasoning": "Ha."}, ask)
    yield case("name of a user", {**ask, "name": "anna"}, {**answer, "name": "bot"}, ask)


@dataclass(frozen=True)
class Rendering:
    """Chats to be rendered with a model's own template, or with a file."""

    folder: Path
    cases: Sequence[Case]
    template: Path | None = None
    text_only: bool = False


def folder_of(family: str) -> Path:
    name = FOLDERS[family]
    return model_folder(name) if name else Path(run_tool_or_skip("engines.unknown_families", family))


Kind = tuple[str, str | None]
KINDS: list[Kind] = [*((family, None) for family in COMPARED), *(("qwen3_vl", name) for name in TEMPLATES)]


@pytest.fixture(scope="module")
def renderings(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Rendering]:
    root, made = tmp_path_factory.mktemp("templates"), {}
    for family, template in KINDS:
        file = None
        if template is not None:
            file = root / f"{template}.jinja"
            file.write_text(TEMPLATES[template])
        cases = [*corpus(family), *own_fields(family)]
        made[family, template] = Rendering(folder_of(family), cases, file)
    return made


@pytest.fixture(scope="module")
def engines_prompts(sglang_env: Path, renderings: dict[Kind, Rendering]) -> dict[Kind, list[dict[str, Any]]]:
    return dict(zip(renderings, rendered(sglang_env, renderings.values()), strict=True))


@pytest.mark.adopts(engine="sglang", check="prompts")
@pytest.mark.parametrize(("family", "template"), KINDS)
def test_the_prompt_is_the_engines_own(
    family: str,
    template: str | None,
    sglang_env: Path,
    renderings: dict[Kind, Rendering],
    engines_prompts: dict[Kind, list[dict[str, Any]]],
    record: Record,
    figure: Figure,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, cases = renderings[family, template].folder, renderings[family, template].cases
    loaded = families.load_family(folder, None)
    assert loaded is not None
    prompter = PROMPTERS["sglang"].load(
        folder, family=loaded, chat_template=None if template is None else TEMPLATES[template]
    )
    compare_texts(family, prompter.family, monkeypatch)
    theirs = engines_prompts[family, template]
    release = env_version(sglang_env)
    kept = [not other_prompt(release, one.body) for one in cases]
    both, refused, different = compared(prompter, compress(cases, kept), compress(theirs, kept))
    by_affinity = kept.count(False)
    figure("equal", both)
    figure("refused by both", refused)
    figure("by affinity", by_affinity)
    figure("different", len(different))
    record(f"rendering, sglang {family} {template or 'own template'}", f"{both} equal, {refused} refused by both")
    assert "\n".join(different) == ""
    # A fifth of the chats types a placeholder beside images: no prompt is predicted, as the engine fails at it later.
    # Gemma 3's template refuses turns that do not alternate, too.
    least = 0.65 if family == "gemma3" else 0.7
    assert both + by_affinity > (100 if template in ("texts", "picky") else least * len(cases))


@pytest.mark.adopts(engine="sglang", check="prompts with videos")
@pytest.mark.parametrize("family", [family for family in COMPARED if family.startswith(("qwen2", "qwen3_vl"))])
def test_the_text_of_a_chat_with_videos_is_the_engines_own(family: str, sglang_env: Path, figure: Figure) -> None:
    """Behind it come the frames, which are not predicted: each video is one placeholder here."""
    folder = folder_of(family)
    loaded = families.load_family(folder, None)
    assert loaded is not None
    prompter = PROMPTERS["sglang"].load(folder, family=loaded)
    video = {"type": "video_url", "video_url": {"url": "data:,"}}
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    contents = [(video,), ("Look: ", video, "What?"), ("Two: ", video, "and", picture, video, ".")]
    chats = [
        [said("system", "Be brief."), user(*parts), said("assistant", "Fine."), user(*parts)] for parts in contents
    ]
    bodies = [{"model": "demo", "messages": messages} for messages in chats]
    (theirs,) = own_prompts(
        sglang_env, [{"folder": str(folder), "template": None, "text_only": False, "bodies": bodies}]
    )
    for body, parts, answer in zip(bodies, contents, theirs, strict=True):
        kinds: list[Modality] = ["image"] * 2 * parts.count(picture) + ["video"] * 2 * parts.count(video)
        media = [PromptImage(bytes([at]) * 32, 1, modality=kind) for at, kind in enumerate(kinds)]
        assert prompter.prompt(body, media).ids.tolist() == answer.get("ids"), answer
    figure("prompts", len(bodies))


class Compared(NamedTuple):
    """Numbers of equal prompts and of those that both sides refuse, and what differs."""

    equal: int
    refused: int
    different: list[str]


def compared(prompter: AnyPrompter, cases: Iterable[Case], theirs: Iterable[dict[str, Any]]) -> Compared:
    """Compare the prompts of chats with the engine's answers."""
    different, equal, refused = [], 0, 0
    for one, answer in zip(cases, theirs, strict=True):
        mine = ours(prompter, one)
        if isinstance(mine, list) and "ids" in answer:
            equal += 1
            if mine != answer["ids"]:
                different.append(f"{one.name}: {prompter.decode(mine)!r} for {answer}")
        elif isinstance(mine, list) and one.name not in REFUSED_BEFORE:
            different.append(f"{one.name}: refused by the engine alone: {answer['refused']}")
        elif "ids" in answer and not mine_is_stricter(mine):
            different.append(f"{one.name}: refused here alone: {mine}")
        else:
            refused += 1
    return Compared(equal, refused, different)


def compare_texts(family: str, loaded: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the images of a family out of its prompts that are more than their placeholders."""
    if family in MORE_THAN_PLACEHOLDERS:
        monkeypatch.setattr(type(loaded), "expand_text", text_alone)


def text_alone(
    family: Family, codec: TokenizerCodec, text: str, images: Sequence[PromptImage], *, add_special_tokens: bool
) -> Expanded:
    return Expanded(codec.encode(text, add_special_tokens=add_special_tokens), ())


def mine_is_stricter(mine: object) -> bool:
    """A prompt that the engine fails at later, or of which it drops an image without a place."""
    return isinstance(mine, NotModelledError | PlaceholderError)


def ours(prompter: AnyPrompter, one: Case) -> "list[int] | ValueError":
    shown = [PromptImage(number.to_bytes(32, "big"), 1) for number, _ in enumerate(image_places(one))]
    try:
        return prompter.prompt(one.body, shown).ids.tolist()
    except ValueError as error:
        return error


def rendered(env: Path, renderings: Iterable[Rendering]) -> list[list[dict[str, Any]]]:
    """Return the engine's answers, of one process: it takes longer to start than to answer."""
    return own_prompts(env, [_asked(rendering) for rendering in renderings])


def own_prompts(env: Path, asked: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return what ``own_prompts.py`` answers."""
    answers: list[list[dict[str, Any]]] = answer_of(env, [Path(__file__).with_name("own_prompts.py")], asked)
    return answers


def _asked(rendering: Rendering) -> dict[str, Any]:
    bodies = json.loads(json.dumps([one.body for one in rendering.cases]))
    for one, body in zip(rendering.cases, bodies, strict=True):
        for at, number, _ in image_places(one):
            body["messages"][at]["content"][number]["image_url"]["url"] = "data:,"
    template = None if rendering.template is None else str(rendering.template)
    return {"folder": str(rendering.folder), "template": template, "text_only": rendering.text_only, "bodies": bodies}
