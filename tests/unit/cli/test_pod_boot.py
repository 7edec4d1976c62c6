"""What a pod waited for until it was Ready, by its conditions, its containers and, where they are known, its events."""

import copy
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrouter_cli.status.pod_boot import longest, steps, summary, waits_for

MADE = datetime.fromisoformat("2026-11-21T10:00:00+00:00")
GATES = ("mmrouter.io/routable", "mmrouter.io/verified")
Object = dict[str, Any]


def at(seconds: float) -> str:
    return (MADE + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def holds(kind: str, seconds: float) -> Object:
    return {"type": kind, "status": "True", "lastTransitionTime": at(seconds)}


def event(reason: str, container: str, seconds: float, uid: str = "u") -> Object:
    about = {"kind": "Pod", "uid": uid, "fieldPath": f"spec.containers{{{container}}}"}
    return {"reason": reason, "firstTimestamp": at(seconds), "eventTime": None, "involvedObject": about}


def engine_pod(
    *, sidecar: float = 2, engine: float = 5, answers: float = 30, gates: tuple[float, ...] = (31, 33)
) -> Object:
    """A pod whose sidecar ran at ``sidecar`` seconds, its engine at ``engine``, and so on until Ready with the last."""
    conditions = [holds("PodScheduled", 1), holds("Initialized", engine), holds("ContainersReady", answers)]
    conditions += [holds(gate, seconds) for gate, seconds in zip(GATES, gates, strict=False)]
    if len(gates) == len(GATES):
        conditions.append(holds("Ready", max(gates)))
    else:
        conditions.append({"type": "Ready", "status": "False", "lastTransitionTime": at(0)})
    up = {"ready": True, "started": True, "restartCount": 0}
    return {
        "metadata": {"name": "p", "uid": "u", "creationTimestamp": at(0)},
        "spec": {
            "nodeName": "node-a",
            "initContainers": [{"name": "sidecar", "restartPolicy": "Always"}],
            "containers": [{"name": "engine"}],
            "readinessGates": [{"conditionType": gate} for gate in GATES],
        },
        "status": {
            "phase": "Running",
            "conditions": conditions,
            "initContainerStatuses": [{"name": "sidecar", "state": {"running": {"startedAt": at(sidecar)}}, **up}],
            "containerStatuses": [{"name": "engine", "state": {"running": {"startedAt": at(engine)}}, **up}],
        },
    }


def changed(pod: Object, container: str, **state: Any) -> Object:
    """The pod with another status of a container, before its containers are ready."""
    made = copy.deepcopy(pod)
    status = made["status"]
    for kind in ("initContainerStatuses", "containerStatuses"):
        for item in status[kind]:
            if item["name"] == container:
                item.update({"ready": False, **state})
    status["conditions"] = [c for c in status["conditions"] if c["type"] not in (*GATES, "ContainersReady", "Ready")]
    return made


def test_every_step_has_its_time_and_the_longest_is_named() -> None:
    pod = engine_pod()
    assert [(step.until, step.at) for step in steps(pod)] == [
        ("a node took it", 1),
        ("sidecar ran", 2),
        ("sidecar had started up and engine ran", 5),
        ("engine answered", 30),
        ("every frontend held its index", 31),
        ("a frontend had proved it", 33),
        ("the kubelet had seen it", 33),
    ]
    assert summary(pod) == "Ready after 33 s, 25 of them until engine answered"
    assert waits_for(pod) == ""


PULLS = [event("Pulled", "sidecar", 2), event("Pulling", "engine", 3), event("Pulled", "engine", 63)]
OTHERS = [event("Pulling", "engine", 9, uid="another"), event("Killing", "engine", 9)]


@pytest.mark.parametrize(
    ("pod", "events", "step"),
    [
        (engine_pod(engine=64, answers=70, gates=(71, 72)), PULLS + OTHERS, ("the image of engine was pulled", 63, 60)),
        (engine_pod(answers=6, gates=(60, 61)), [], ("every frontend held its index", 60, 54)),
    ],
    ids=["an image apart from the sidecar's start", "a gate by what it stands for"],
)
def test_the_longest_step_is_named(pod: Object, events: list[Object], step: tuple[str, float, float]) -> None:
    assert longest(steps(pod, events)) == step


def test_a_pod_that_was_there_at_once_waited_for_nothing() -> None:
    pod = engine_pod(sidecar=0, engine=0, answers=0, gates=(0, 0))
    pod["status"]["conditions"][0] = holds("PodScheduled", 0)
    assert longest(steps(pod)) is None
    assert summary(pod) == "Ready after 0 s"


WAITING = {"waiting": {"reason": "ImagePullBackOff"}}
MAKING = {"waiting": {"reason": "ContainerCreating"}}
RUNNING = {"running": {"startedAt": at(5)}}


@pytest.mark.parametrize(
    ("pod", "says"),
    [
        (changed(engine_pod(), "engine", state=WAITING), "engine: ImagePullBackOff"),
        (changed(engine_pod(), "engine", state=MAKING), "engine is being created: its image, volumes and network"),
        (changed(engine_pod(), "engine", state=RUNNING, started=False), "engine is starting up"),
        (changed(engine_pod(), "engine", state=RUNNING, started=True), "engine is not ready"),
        (changed(engine_pod(), "sidecar", state={"terminated": {"exitCode": 1}}), "sidecar ended with 1"),
        (engine_pod(gates=()), "not yet routable: not examined yet"),
        (engine_pod(gates=(31,)), "not yet verified: not examined yet"),
    ],
)
def test_what_a_pod_waits_for_now_is_the_first_thing_that_is_not_there(pod: Object, says: str) -> None:
    assert waits_for(pod) == says
    assert summary(pod).startswith(f"not Ready: {says}; so far ")


def test_what_the_operator_says_of_a_gate_is_repeated() -> None:
    pod = engine_pod(gates=(31,))
    condition = {"type": GATES[1], "status": "False", "message": "no frontend has proved it yet"}
    pod["status"]["conditions"].append(condition)
    assert waits_for(pod) == "not yet verified: no frontend has proved it yet"


@pytest.mark.parametrize(("reason", "says"), [("Unschedulable", "no node fits it"), ("", "it waits for the scheduler")])
def test_a_pod_without_a_node_has_no_step_behind_it(reason: str, says: str) -> None:
    scheduled = {"type": "PodScheduled", "status": "False", "reason": reason}
    pod = {
        "metadata": {"name": "p", "uid": "u", "creationTimestamp": at(0)},
        "spec": {"containers": [{"name": "engine"}]},
        "status": {"phase": "Pending", "conditions": [scheduled]},
    }
    assert steps(pod) == []
    assert summary(pod) == f"not Ready: {says}"


@given(st.lists(st.integers(0, 500), min_size=6, max_size=6))
def test_steps_never_go_back_and_add_up_to_the_whole(seconds: list[int]) -> None:
    sidecar, engine, answers, routable, verified, pulled = seconds
    pod = engine_pod(sidecar=sidecar, engine=engine, answers=answers, gates=(routable, verified))
    done = steps(pod, [event("Pulling", "engine", pulled), event("Pulled", "engine", pulled + 3)])
    assert all(step.took >= 0 for step in done)
    assert done[-1].at == pytest.approx(sum(step.took for step in done))
    assert done[-1].at >= max(sidecar, engine, answers, routable, verified)
