"""Conditions that follow from the frontends' reports: the pipeline's stages and the nodes' shared memory."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from unit.operator.rollout_stories import finish, pair, pool, standing, whole
from unit.operator.simulated_world import World, deployment, role
from unit.operator.test_status import conditions, engines, judged, message, pods, silent

from mmrouter_operator.model.snapshot import SharedReport, Snapshot
from mmrouter_operator.status.builder import urgent
from mmrouter_operator.status.condition_events import transitions
from mmrouter_operator.status.frontend_conditions import MISSING_STAGES

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


def test_a_restarted_operator_keeps_the_last_pipeline_condition() -> None:
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


PRESSURE = "ShmPressure"
LIMIT = 8 << 30
Change = Callable[[Snapshot], Snapshot]


def sharing() -> World:
    spec = whole()
    spec["pools"] = [pool("work", replicas=3, sharedMemory={"scope": "node"})]
    return standing(spec)


def told(above: dict[str, bool], *, frontends: int = 2) -> Change:
    """Frontends say of the engine pods, in the order of their names, which node they are on and how full that is."""

    def change(snapshot: Snapshot) -> Snapshot:
        engines = sorted((pod for pod in snapshot.pods if pod.pool), key=lambda pod: pod.name)
        nodes = dict(zip((pod.uid for pod in engines), above, strict=False))
        pods = tuple(dataclasses.replace(pod, node=nodes.get(pod.uid, pod.node)) for pod in snapshot.pods)
        reports: dict[str, Any] = {}
        for number, (uid, report) in enumerate(snapshot.reports.items()):
            assert report is not None
            workers = {
                worker.uid: dataclasses.replace(worker, shared=SharedReport(above[nodes[worker.uid]], LIMIT))
                if worker.uid in nodes and number < frontends
                else worker
                for worker in report.workers.values()
            }
            reports[uid] = dataclasses.replace(report, workers=workers)
        return dataclasses.replace(snapshot, pods=pods, reports=reports)

    return change


def test_pods_that_share_nothing_have_no_such_condition() -> None:
    assert PRESSURE not in conditions(judged(standing(whole())))


def test_a_node_that_is_full_is_named_with_its_pod_and_limit_and_it_clears() -> None:
    world = sharing()
    world.status = before = judged(world, told({"n1": False, "n2": False, "n3": False}))
    assert conditions(before)[PRESSURE] == ("False", "BelowHighWaterMark")
    world.status = full = judged(world, told({"n1": False, "n2": True, "n3": False}))
    assert conditions(full)[PRESSURE] == ("True", "AboveHighWaterMark")
    second = sorted(pod.name for pod in world.snapshot().pods if pod.pool)[1]
    assert message(full, PRESSURE) == (
        "images travel inside requests until there is room again in the shared directory of "
        f"node n2, as pod {second} says, of 8192 MiB"
    )
    assert [(event.type, event.reason) for event in transitions(before, full)] == [("Warning", "AboveHighWaterMark")]
    again = judged(world, told({"n1": False, "n2": False, "n3": False}))
    assert conditions(again)[PRESSURE] == ("False", "BelowHighWaterMark")
    assert [(event.type, event.reason) for event in transitions(full, again)] == [("Normal", "Recovered")]


def test_requests_are_answered_meanwhile_so_nothing_else_says_that_something_is_wrong() -> None:
    world = sharing()
    world.status = judged(world, told({"n1": False, "n2": False, "n3": False}))
    status = judged(world, told({"n1": True, "n2": True, "n3": True}))
    assert status["phase"] == "Ready"
    assert conditions(status)["Degraded"] == ("False", "AsExpected")


def test_a_status_is_written_when_a_node_fills_and_not_again_while_it_stays_so() -> None:
    world = sharing()
    world.status = judged(world, told({"n1": False, "n2": False, "n3": False}))
    full = judged(world, told({"n1": True, "n2": False, "n3": False}))
    assert urgent(world.status, full)
    world.status = full
    # Another node besides, or one frontend alone that has heard it: words, at most.
    for change in (
        told({"n1": True, "n2": True, "n3": False}),
        told({"n1": True, "n2": False, "n3": False}, frontends=1),
    ):
        assert not urgent(full, judged(world, change))
    assert judged(world, told({"n1": True, "n2": False, "n3": False})) == full


def test_sidecars_that_have_not_looked_yet_are_no_proof() -> None:
    assert conditions(judged(sharing()))[PRESSURE] == ("Unknown", "NotMeasured")
    assert conditions(judged(sharing(), silent))[PRESSURE] == ("Unknown", "FrontendNotHeard")


def test_a_restarted_operator_keeps_the_last_pressure_condition() -> None:
    world = sharing()
    world.status = judged(world, told({"n1": True, "n2": True, "n3": True}))

    def started(snapshot: Snapshot) -> Snapshot:
        return dataclasses.replace(silent(snapshot), listening_since=snapshot.now - 1)

    assert conditions(judged(world, started))[PRESSURE] == ("True", "AboveHighWaterMark")
