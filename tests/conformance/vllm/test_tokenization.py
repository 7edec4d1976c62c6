"""The expanded prompt of every conversation of the corpus, token by token and span by span, against vLLM's own.

The engine's side is the rendered prompt that a serving vLLM returns.
"""

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from artefacts import Record
from conformance.corpus import corpus
from conformance.engine_process import Engine
from conformance.prediction import Predictor
from conformance.rendering import Rendered, Renderer
from conformance.vllm.conftest import Served
from conformance.workload import Case, case, image_part, picture, user

from mmrouter_lib.media_identity import to_wire
from mmrouter_lib.prompt import PlaceholderError

LEAST = 300
OUT_OF_ORDER = " before <|image_"
"""Phi-3: a text that names image 2 first. vLLM renders it, and serving it ends the engine.

See docs/engine-facts/vllm.md#requests-that-end-the-engine.
"""
REFUSED_BY_THE_ENGINE = {"no tools in the list"}
"""What the engine alone refuses, for a reason that is not in the prompt: ``tools`` must not be an empty list."""


@dataclass(frozen=True)
class Outcome:
    """One side's prompt: the ids and (identity, offset, length) of each image, or the reason of a refusal."""

    ids: list[int]
    images: list[tuple[str, int, int]]
    refused: str = ""


@dataclass(frozen=True)
class Run:
    predictor: Predictor
    answers: list[tuple[Case, Outcome, Outcome]]

    @property
    def both(self) -> list[tuple[Case, Outcome, Outcome]]:
        return [(one, mine, theirs) for one, mine, theirs in self.answers if not (mine.refused or theirs.refused)]


@pytest.fixture(scope="session")
def run(served: Served) -> Run:
    predictor, server = served.predictor, Renderer(served.engine.client)
    return Run(
        predictor,
        [(one, ours(predictor, one), engines(server.render(predictor.request(one)))) for one in corpus(served.family)],
    )


def test_the_expanded_prompt_is_the_engines_own(run: Run, record: Record) -> None:
    different = [f"{one.name}: {difference(mine, theirs)}" for one, mine, theirs in run.both if mine != theirs]
    refused = len(run.answers) - len(run.both)
    figures = f"conversations {len(run.both)}, mismatches {len(different)}, refused {refused}"
    record(f"tokenization, {run.predictor.family.name}", figures)
    assert different == []
    assert len(run.both) >= LEAST


def test_what_the_library_refuses_the_engine_refuses(run: Run) -> None:
    ours_alone = {one.name: mine.refused for one, mine, theirs in run.answers if mine.refused and not theirs.refused}
    theirs_alone = {one.name for one, mine, theirs in run.answers if theirs.refused and not mine.refused}
    assert {name: why for name, why in ours_alone.items() if OUT_OF_ORDER not in why} == {}
    assert bool(ours_alone) == (run.predictor.family.name == "phi3_v")
    assert theirs_alone <= REFUSED_BY_THE_ENGINE


def test_an_image_of_one_token_more_is_noticed(run: Run) -> None:
    shown = [(one, theirs) for one, _, theirs in run.both if theirs.images]
    assert len(shown) >= LEAST // 3
    for one, theirs in shown:
        assert ours(replace(run.predictor, more=1), one) != theirs


COMPLETED = (
    "The harbour lies still.",
    " blanks at both ends \n\n",
    "Zoë, 東京, 👩🏽‍🚀 and \u0000",
    "<s>[INST] <|im_start|>user\n<|image_pad|><image><|image_2|><|vision_start|> typed by a user <|im_end|></s>",
)


def test_the_text_of_a_completion_becomes_the_engines_own_tokens(served: Served) -> None:
    """With the tokenizer's beginning of a text, unless the request says otherwise."""
    predictor, begun = served.predictor, set[bool]()
    for text in COMPLETED:
        for special in (True, False):
            ours = predictor.prompter.completion(text, add_special_tokens=special).ids.tolist()
            for prompt in (text, ours):
                body = {"model": predictor.model, "prompt": prompt, "add_special_tokens": special, "max_tokens": 1}
                answer = served.engine.client.post("/v1/completions/render", json=body)
                assert answer.status_code == 200, answer.text
                (rendered,) = answer.json()
                assert rendered["token_ids"] == ours, (text, special)
            begun.add(special and ours[0] == predictor.prompter.codec.begin_id)
    assert (True in begun) == (not served.family.startswith("qwen"))


TAGS = case(
    "numbered tags out of order",
    user("<|image_2|> and <|image_1|>", image_part(picture(640, 480)), image_part(picture(800, 150))),
)
"""The pictures become runs of different lengths, each with the other one's features."""


@pytest.mark.usefixtures("run")
def test_numbered_tags_out_of_order_end_the_engine_and_are_refused_before_it(served: Served) -> None:
    """The last test here, because where images have numbers the engine is gone then."""
    if served.predictor.family.fragile:
        assert not outlives(served.engine, served.predictor.request(TAGS))
        with pytest.raises(PlaceholderError):
            served.predictor.predict(TAGS)
    else:  # where images have no numbers, such a text is a text like any other
        assert len(served.predictor.predict(TAGS).spans) == 2


def outlives(served: Engine, body: dict[str, Any], seconds: float = 60) -> bool:
    """Send a request; return whether the engine is still healthy when it has had time to fall over it."""
    with suppress(httpx.TransportError):
        served.post(body, headers={"connection": "close"})
    deadline = time.monotonic() + seconds
    while served.healthy():
        if time.monotonic() > deadline:
            return True
        time.sleep(0.2)
    return False


def ours(predictor: Predictor, one: Case) -> Outcome:
    try:
        predicted = predictor.predict(one)
    except ValueError as error:
        return Outcome([], [], f"{type(error).__name__}: {error}")
    spans = [(to_wire(span.identity), span.offset, span.length) for span in predicted.spans]
    return Outcome(predicted.ids.tolist(), spans)


def engines(answer: Rendered) -> Outcome:
    """Return what the engine answered. A status of 500 is a refusal too: it is one that the engine did not foresee."""
    if answer.status != 200:
        message = (answer.body.get("error") or {}).get("message", "")
        return Outcome([], [], f"{answer.status}: {str(message)[:200]}")
    return Outcome(answer.ids, answer.images)


def difference(mine: Outcome, theirs: Outcome) -> str:
    pairs = enumerate(zip(mine.ids, theirs.ids, strict=False))
    at = next((at for at, (a, b) in pairs if a != b), min(len(mine.ids), len(theirs.ids)))
    if mine.ids == theirs.ids:
        return f"spans {mine.images}, the engine has {theirs.images}"
    return (
        f"{len(mine.ids)} tokens, the engine has {len(theirs.ids)}; from token {at} on "
        f"{mine.ids[at - 2 : at + 6]}, the engine has {theirs.ids[at - 2 : at + 6]}"
    )
