"""The condition ChainComplete: the stages that the frontends miss, as the operator reports them."""

import dataclasses
from collections.abc import Callable, Sequence

import pytest
from unit.operator.rollout_stories import finish, pair, pool, standing, whole
from unit.operator.simulated_world import World, deployment, role
from unit.operator.test_status import conditions, engines, judged, message, pods, silent

from mmrouter_operator.model.snapshot import Snapshot
from mmrouter_operator.status.frontend_conditions import MISSING_STAGES
from mmrouter_operator.status.transitions import transitions

CHAIN = "ChainComplete"


def missing_stages(*each: Sequence[str] | None) -> Callable[[Snapshot], Snapshot]:
    """Return reports of frontends with these missing stages."""

    def change(snapshot: Snapshot) -> Snapshot:
        said = (None if words is None else tuple(words) for words in each)
        reports = {
            uid: dataclasses.replace(report, degraded=words) if report else None
            for (uid, report), words in zip(snapshot.reports.items(), said, strict=True)
        }
        return dataclasses.replace(snapshot, reports=reports)

    return change


def test_workers_alone_are_no_chain() -> None:
    spec = whole()
    spec["pools"] = [pool("work")]
    assert CHAIN not in conditions(judged(standing(spec)))


@pytest.mark.parametrize(("word", "reason"), [(word, reason) for word, (reason, _) in MISSING_STAGES.items()])
def test_a_stage_that_all_frontends_miss_is_the_reason_and_it_clears(word: str, reason: str) -> None:
    world = standing(pair())
    world.status = before = judged(world)
    assert conditions(before)[CHAIN] == ("True", "EveryStage")
    world.status = without = judged(world, missing_stages([word], [word]))
    assert conditions(without)[CHAIN] == ("False", reason)
    assert "frontends" not in message(without, CHAIN)
    assert [(event.type, event.reason) for event in transitions(before, without)] == [("Warning", reason)]
    again = judged(world)
    assert conditions(again)[CHAIN] == ("True", "EveryStage")
    assert [(event.type, event.reason) for event in transitions(without, again)] == [("Normal", CHAIN)]


def test_one_frontend_is_enough_and_the_worst_is_the_reason() -> None:
    status = judged(standing(pair()), missing_stages(["no_encoder"], ["no_encoder", "no_prefill"]))
    assert conditions(status)[CHAIN] == ("False", "NoPrefill")
    assert message(status, CHAIN) == (
        "1 of 2 frontends: no prefill pod can take work: prompts are computed where they are decoded; "
        "no encoder can take work: images are encoded where the prompt is computed, by SGLang they are refused"
    )


@pytest.mark.parametrize("change", [silent, missing_stages(None, None)])
def test_frontends_that_are_not_heard_or_too_old_to_tell_are_no_proof(change: Callable[[Snapshot], Snapshot]) -> None:
    world = standing(pair())
    world.status = judged(world)
    assert conditions(judged(world, change))[CHAIN] == ("Unknown", "FrontendNotHeard")


def test_a_frontend_that_is_too_old_to_tell_says_nothing_against_one_that_does() -> None:
    assert conditions(judged(standing(pair()), missing_stages(None, [])))[CHAIN] == ("True", "EveryStage")


def test_an_operator_that_has_just_started_keeps_what_was_said_last() -> None:
    world = standing(pair())
    world.status = judged(world, missing_stages(["no_decode"], ["no_decode"]))

    def started(snapshot: Snapshot) -> Snapshot:
        return dataclasses.replace(silent(snapshot), listening_since=snapshot.now - 1)

    assert conditions(judged(world, started))[CHAIN] == ("False", "NoDecode")


def with_frontends_only() -> World:
    world = World(deployment(pair()))
    world.reconcile()
    for name, child in world.children.items():
        world.control(name)
        if role(child) == "frontend":
            world.start(name)
    return world


NO_DECODE = missing_stages(["no_decode"], ["no_decode"])


def test_what_is_on_its_way_for_the_first_time_is_no_loss() -> None:
    world = with_frontends_only()
    world.status = first = judged(world, NO_DECODE)
    assert conditions(first)[CHAIN] == ("Unknown", "Starting")
    assert {event.reason for event in transitions(None, first)}.isdisjoint({"Starting", "NoDecode"})
    finish(world)
    assert conditions(judged(world))[CHAIN] == ("True", "EveryStage")


def test_a_stage_that_cannot_come_is_reported_from_the_start() -> None:
    def stuck(snapshot: Snapshot) -> Snapshot:
        return pods(engines, unschedulable="0/1 nodes are available")(NO_DECODE(snapshot))

    assert conditions(judged(with_frontends_only(), stuck))[CHAIN] == ("False", "NoDecode")
