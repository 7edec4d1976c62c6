"""Statuses of cases that have a name: what is lacking, what is paused, what another release wrote."""

import dataclasses

import pytest
from unit.operator.rollout_stories import pool, standing, want, whole
from unit.operator.simulated_world import SECRETS, World, deployment
from unit.operator.test_status import conditions, judged

from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.model.problems import Problem
from mmrouter_operator.planning.planner import plan
from mmrouter_operator.planning.template_revisions import choose_templates
from mmrouter_operator.render import render
from mmrouter_operator.status.builder import status_of
from mmrouter_operator.status.condition_events import transitions

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


def test_an_image_of_the_operators_configuration_is_as_good_as_one_of_the_spec() -> None:
    spec = whole()
    spec["pools"] = [pool("g", accelerator={"kind": "gaudi"}, podTemplate={"metadata": {"labels": {"a": "b"}}})]
    del spec["pools"][0]["image"]
    dep = deployment(spec)
    config = OperatorConfig(engine_images={"vllm/gaudi": "registry.example/gaudi:1"})
    snapshot = dataclasses.replace(World(dep).snapshot(), config=config)
    desired, _ = choose_templates(render(dep, secrets=SECRETS, config=config), snapshot, False, dep)
    status = status_of(dep, snapshot, plan(desired, snapshot), (), {})
    assert conditions(status)["SpecValid"] == ("True", "Valid")
    assert conditions(status)["PodTemplateApplied"] == ("True", "Applied")


@pytest.mark.parametrize(
    "item", [{"status": "True", "reason": "Tomorrow", "message": "as ever"}, {"status": "Maybe"}, {"status": "True"}]
)
def test_a_condition_of_another_release_stays_or_is_dropped_while_paused(item: dict[str, str]) -> None:
    world = standing(whole())
    world.status = {"conditions": [{"type": "PodSecurityRestricted", **item}]}
    want(world, {**whole(), "paused": True})
    told = conditions(judged(world))
    assert told.get("PodSecurityRestricted") == (("True", "Tomorrow") if "message" in item else None)


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
