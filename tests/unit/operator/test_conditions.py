"""The table of conditions and the document that people read; statuses of cases that have a name."""

import re
from pathlib import Path

import pytest
from unit.operator.simulated_world import World, deployment, standing, want, whole
from unit.operator.test_status import conditions, judged

from mmrouter_operator.model import snapshot
from mmrouter_operator.model.external_refs import EXTERNAL_KINDS
from mmrouter_operator.model.snapshot import Problem
from mmrouter_operator.status import conditions as c
from mmrouter_operator.status.builder import status_of
from mmrouter_operator.status.conditions import transitions

DOCUMENT = Path(__file__).parents[3] / "docs" / "conditions.md"


def test_the_page_names_every_reason_of_a_blocked_rollout_beside_the_table() -> None:
    sentence = (
        DOCUMENT.read_text().partition("Every other reason is one that blocks")[2].partition(" They are False")[0]
    )
    assert set(re.findall(r"`(\w+)`", sentence)) - {c.DEGRADED} == {*c.BLOCKS, "ChildRefused"}


def test_every_problem_of_writing_children_is_a_reason_of_degraded() -> None:
    reasons = [value for name, value in vars(snapshot).items() if name.isupper() and isinstance(value, str)]
    assert len(reasons) >= 5
    assert set(reasons) <= c.REASONS[c.DEGRADED].keys()


def test_every_kind_that_a_resource_can_name_has_a_reason_for_its_absence() -> None:
    assert set(c.MISSING) == set(EXTERNAL_KINDS)


def test_reasons_are_words_that_the_api_takes() -> None:
    for type_, reasons in c.REASONS.items():
        for reason in [type_, *reasons]:
            assert re.fullmatch(r"[A-Z][A-Za-z0-9]*", reason)


SERVICE = ("Service", "vl")


@pytest.mark.parametrize("reason", ["ChildNameTaken", "ChildRefused"])
def test_nothing_is_ready_without_the_service(reason: str) -> None:
    world = standing(whole())
    del world.others[SERVICE]
    status = judged(world, lambda s: s, Problem(reason, *SERVICE, "Service vl has another owner"))
    assert conditions(status)["Ready"] == ("False", "Blocked")
    assert conditions(status)["Progressing"] == ("False", reason)
    assert conditions(status)["Degraded"] == ("True", reason)
    assert status["phase"] == "Blocked"
    assert "endpoint" not in status, "it would be another owner's"


def test_a_refused_change_of_an_existing_service_is_reported_and_it_serves() -> None:
    world = standing(whole())
    status = judged(world, lambda s: s, Problem("ChildRefused", *SERVICE, "quota"))
    assert conditions(status)["Ready"] == ("True", "Serving")
    assert conditions(status)["Degraded"] == ("True", "ChildRefused")


@pytest.mark.parametrize(
    "item", [{"status": "True", "reason": "Tomorrow", "message": "as ever"}, {"status": "Maybe"}, {"status": "True"}]
)
def test_a_condition_of_another_release_stays_or_is_dropped_while_paused(item: dict[str, str]) -> None:
    world = standing(whole())
    world.status = {"conditions": [{"type": "PodSecurityRestricted", **item}]}
    want(world, {**whole(), "paused": True})
    shown = conditions(judged(world))
    assert shown.get("PodSecurityRestricted") == (("True", "Tomorrow") if "message" in item else None)


def test_a_deployment_that_is_paused_from_its_beginning_is_paused() -> None:
    world = World(deployment({**whole(), "paused": True}))
    status = status_of(world.dep, world.snapshot(), None, (), None)
    assert status["phase"] == "Paused"
    assert conditions(status) == {
        "Ready": ("False", "FrontendNotReady"),
        "SpecValid": ("True", "Valid"),
        "Progressing": ("False", "Paused"),
    }
    assert [event.reason for event in transitions(None, status)] == ["Paused"]
