"""Families without a published folder here, behind a router, a renderer and two real engines.

The renderer makes the prompts of families that the library has no code for, and is the second opinion on the others.
``hack/engines/unknown_families.py`` makes their model folders. The long form has the first one; ``MMROUTER_FAMILIES``,
which is ``all`` or names with commas, adds the others.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from artefacts import run_tool_or_skip
from conformance.conftest import Figure
from conformance.engine_process import context_length, engine_args, require_memory
from conformance.engines import deployed, histories, manifest, pool, send, wait_until_published
from conformance.setups import RENDERED
from conformance.workload import STORY, Case, image_part, picture, user
from local.rig import Deployment
from long_form import parameters
from scenarios import SCENARIOS, Chat, Folder, Message, Scenario, open_chat, title
from waiting import wait_for

from mmrouter_lib.families import family_names

pytestmark = pytest.mark.proves("vllm", "renderer, worker", "{family}")

SETTLE_SECONDS = 120
NAMED = os.environ.get("MMROUTER_FAMILIES", "")
FIRST = "llava_onevision"
OTHERS = [family for family in RENDERED if family != FIRST]
FAMILIES = [FIRST, *(family for family in OTHERS if NAMED == "all" or family in NAMED.split(","))]
WITHOUT_CODE = {"llava_onevision", "idefics3"}
NO_ADJACENT = {"gemma3"}
"""Families whose adjacent images are not modelled."""

WINDOW = 1024
"""Tokens of the windows of Gemma 3 and Gemma 4."""


@dataclass
class Exact(Chat):
    """Accepts only exact prompts, whose decisions have these ``reasons``. Images have texts around them: adjacent ones
    of Gemma 3 are not modelled, and Mistral's template puts an image before the only text beside it.
    """

    reasons: Sequence[str] = ()

    def messages(self, *content: str) -> list[Message]:
        (message,) = super().messages(*content)
        parts: list[Message] = []
        for part in message["content"]:
            if parts and part["type"] == parts[-1]["type"] == "image_url":
                parts.append({"type": "text", "text": "and"})
            parts.append(part)
        if parts[-1]["type"] == "image_url":
            parts.append({"type": "text", "text": "Go on."})
        return [{**message, "content": parts}]

    def decision(self, raw: Any) -> dict[str, Any]:
        found = super().decision(raw)
        assert (found["exactness"], found["reasons"]) == ("exact", list(self.reasons))
        return found


@pytest.fixture(scope="module", params=parameters(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def deployment(vllm_env: Path, family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = Path(run_tool_or_skip("engines.unknown_families", family))
    require_memory(engines=2)
    engine = {"type": "vllm", "args": engine_args(context_length(folder))}
    pools = [pool("worker", replicas=2), pool("renderer")]
    made = manifest(folder, engine, pools, repository=f"test/{family}")
    with deployed(vllm_env, tmp_path_factory.mktemp(family), made) as deployment:
        wait_for(deployment.settled, SETTLE_SECONDS, "both engines are verified")
        yield deployment


@pytest.fixture
def reasons(family: str) -> list[str]:
    """The reasons of an exact decision: a renderer made the prompt, or nothing weakens it."""
    return [f"renderer:{family}"] if family in WITHOUT_CODE else []


@pytest.fixture
def chat(deployment: Deployment, reasons: list[str]) -> Iterator[Chat]:
    with open_chat(deployment, max_retries=0) as chat:
        yield Exact(chat.model, chat.client, chat.controls, reasons=reasons)


def test_the_library_knows_the_families_with_code_only(family: str) -> None:
    assert (family in family_names()) is (family not in WITHOUT_CODE)


def test_the_gate_passes(deployment: Deployment, family: str) -> None:
    state = deployment.state()
    assert len(state["workers"]) == 2
    assert [renderer["verified"] for renderer in state["renderers"]] == [True]
    deployment.assert_gate_passes()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=title)
def test_scenario(scenario: Scenario, chat: Chat, web: Folder) -> None:
    scenario(chat, web)


def test_the_engines_hold_the_predicted_blocks_of_a_chat_and_no_others(
    deployment: Deployment, family: str, chat: Chat, figure: Figure
) -> None:
    keys: set[str] = set()
    for images in ("", "a", "ab"):
        body = {"messages": chat.messages(*map(chat.image, images), "compare")}
        seen = send(deployment, Case(f"images {images}", body), max_tokens=1)  # one token of answer is in no block
        wait_until_published(deployment, seen)
        keys.update(seen.keys)
    held: dict[str, str] = {}
    for truth in histories(deployment, f"test/{family}"):
        held |= truth.roots()
    roots = {held[key] for key in keys}
    assert {key for key, root in held.items() if root in roots} == keys
    figure("blocks predicted", len(keys))


def test_other_images_behind_a_text_longer_than_the_window_hit_what_is_promised(deployment: Deployment) -> None:
    """Gemma's windows keep the end of the first prompt; the second on an engine leaves what the third hits."""
    text, answers = f"A long story. {STORY * 4}", []
    for seed in range(50, 56):  # three at least on one of the two engines
        image = image_part(picture(224, 224, seed=seed))
        answers.append(send(deployment, Case(f"long {seed}", {"messages": [user(text, image, "Who is shown?")]})))
        wait_until_published(deployment, answers[-1])
    assert [answer.cached for answer in answers] == [answer.promised for answer in answers]
    assert max(answer.overlap for answer in answers) == answers[0].before_image > WINDOW // answers[0].block_size


def test_adjacent_images_are_exact_or_served_by_affinity_with_the_reason(
    deployment: Deployment, family: str, reasons: list[str]
) -> None:
    images = [image_part(picture(224, 224, seed=40 + number)) for number in range(2)]
    seen = send(deployment, Case("adjacent", {"messages": [user("Two pictures.", *images, "Which one is older?")]}))
    if family in NO_ADJACENT:
        assert (seen.exactness, seen.decision["reasons"]) == ("affinity", ["not_modelled:messages"])
    else:
        assert (seen.exactness, seen.decision["reasons"]) == ("exact", reasons)
        assert seen.predicted_tokens == seen.tokens


def test_the_index_equals_what_both_engines_published(deployment: Deployment, family: str, figure: Figure) -> None:
    held = [len(truth.keys()) for truth in histories(deployment, f"test/{family}")]
    assert all(held)
    figure("blocks compared", sum(held))
    figure("mismatches", 0)
