"""The condition ShmPressure: what sidecars say of the memory that pods share, in the operator's words."""

import dataclasses
from collections.abc import Callable
from typing import Any

from unit.operator.rollout_stories import pool, standing, whole
from unit.operator.simulated_world import World
from unit.operator.test_status import conditions, judged, message, silent

from mmrouter_operator.model.snapshot import SharedReport, Snapshot
from mmrouter_operator.status.builder import urgent
from mmrouter_operator.status.transitions import transitions

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


def test_an_operator_that_has_just_started_keeps_what_was_said_last() -> None:
    world = sharing()
    world.status = judged(world, told({"n1": True, "n2": True, "n3": True}))

    def started(snapshot: Snapshot) -> Snapshot:
        return dataclasses.replace(silent(snapshot), listening_since=snapshot.now - 1)

    assert conditions(judged(world, started))[PRESSURE] == ("True", "AboveHighWaterMark")
