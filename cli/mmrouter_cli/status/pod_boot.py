"""The start of a pod in steps: how long each took until Ready, and what a pod still waits for. Pure.

Kubernetes records these times in whole seconds, so a step may be a second too long or too short.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

Object = Mapping[str, Any]

_GATES = {"mmrouter.io/routable": "every frontend held its index", "mmrouter.io/verified": "a frontend had proved it"}


class BootStep(NamedTuple):
    """One step. ``at``: seconds since the pod's creation; ``took``: since the step before."""

    until: str
    """The end of the wait: a clause after "until"."""
    at: float
    took: float


def steps(pod: Object, events: Iterable[Object] = ()) -> list[BootStep]:
    """Return a pod's completed steps in order. ``events``: of its namespace, if known.

    Without events, pulling an image counts as part of its container's start.
    """
    made = _time(pod["metadata"]["creationTimestamp"])
    result, last = [], 0.0
    uid = pod["metadata"].get("uid")
    about = [event for event in events if (event.get("involvedObject") or {}).get("uid") == uid]
    for until, moment in _moments(pod, about):
        at = max(last, moment - made)
        result.append(BootStep(until, at, at - last))
        last = at
    return result


def longest(done: Sequence[BootStep]) -> BootStep | None:
    """Return the step that took longest; ``None`` where none took a second."""
    return max((step for step in done if step.took >= 1), key=lambda step: step.took, default=None)


def summary(pod: Object, events: Iterable[Object] = ()) -> str:
    """Return a sentence on how long a pod took to Ready and why, or what it waits for."""
    done = steps(pod, events)
    most = longest(done)
    seconds = f"{done[-1].at:.0f} s" if done else "0 s"
    share = f", {most.took:.0f} of them until {most.until}" if most is not None else ""
    waiting = waits_for(pod)
    if waiting:
        return f"not Ready: {waiting}; so far {seconds}{share}" if done else f"not Ready: {waiting}"
    return f"Ready after {seconds}{share}"


def waits_for(pod: Object) -> str:
    """Return what keeps a pod from being Ready, empty for one that is."""
    status = pod.get("status") or {}
    conditions = _conditions(pod)
    if _holds(conditions.get("Ready", {})):
        return ""
    scheduled = conditions.get("PodScheduled", {})
    if not (pod.get("spec") or {}).get("nodeName") and not _holds(scheduled):
        return "no node fits it" if scheduled.get("reason") == "Unschedulable" else "it waits for the scheduler"
    if not _holds(conditions.get("ContainersReady", {})):
        return _of_containers(pod) or f"starting ({status.get('phase', 'Pending')})"
    for gate in _gates(pod):
        if not _holds(condition := conditions.get(gate, {})):
            return f"not yet {gate.rpartition('/')[2]}: {condition.get('message') or 'not examined yet'}"
    return "starting"


def _moments(pod: Object, events: Sequence[Object]) -> Iterator[tuple[str, float]]:
    conditions = _conditions(pod)
    scheduled = conditions.get("PodScheduled", {})
    if not _holds(scheduled):
        return
    yield "a node took it", _time(scheduled["lastTransitionTime"])
    spec, states = pod.get("spec") or {}, _states(pod)
    native = {c["name"] for c in spec.get("initContainers") or [] if c.get("restartPolicy") == "Always"}
    before = ""  # the native sidecar that must start before the next container
    for name, state in states.items():
        pulls, pulled = (_times(events, reason, name) for reason in ("Pulling", "Pulled"))
        began = (pulls or pulled)[:1]
        if before and began:
            yield f"{before} had started up", began[0]
            before = ""
        if pulls and pulled:
            yield f"the image of {name} was pulled", pulled[0]
        run = (state.get("state") or {}).get("running") or (state.get("state") or {}).get("terminated") or {}
        if not run.get("startedAt"):
            return
        yield f"{before} had started up and {name} ran" if before else f"{name} ran", _time(run["startedAt"])
        if run.get("finishedAt"):
            yield f"{name} was done", _time(run["finishedAt"])
        before = name if name in native else ""
    names = [container["name"] for container in spec.get("containers") or []]
    meanings = {"ContainersReady": f"{' and '.join(names)} answered"}
    meanings |= {gate: _GATES.get(gate, f"{gate} held") for gate in _gates(pod)} | {"Ready": "the kubelet had seen it"}
    later = [
        (words, _time(condition["lastTransitionTime"]))
        for kind, words in meanings.items()
        if _holds(condition := conditions.get(kind, {})) and condition.get("lastTransitionTime")
    ]
    yield from sorted(later, key=lambda item: item[1])


def _of_containers(pod: Object) -> str:
    for name, container in _states(pod).items():
        state = container.get("state") or {}
        if waiting := state.get("waiting"):
            reason = waiting.get("reason", "")
            if reason in ("", "ContainerCreating", "PodInitializing"):
                return f"{name} is being created: its image, volumes and network"
            return f"{name}: {reason}"
        if "running" not in state:
            if (state.get("terminated") or {}).get("exitCode"):
                return f"{name} ended with {state['terminated']['exitCode']}"
            continue
        if container.get("started") is False:
            return f"{name} is starting up"
        if not container.get("ready"):
            return f"{name} is not ready"
    return ""


def _states(pod: Object) -> dict[str, Object]:
    """Return the containers' states in the order in which they start."""
    status = pod.get("status") or {}
    kinds = ("initContainerStatuses", "containerStatuses")
    return {item["name"]: item for kind in kinds for item in status.get(kind) or []}


def _conditions(pod: Object) -> dict[str, Any]:
    return {item["type"]: item for item in (pod.get("status") or {}).get("conditions") or []}


def _gates(pod: Object) -> list[str]:
    return [gate["conditionType"] for gate in (pod.get("spec") or {}).get("readinessGates") or []]


def _holds(condition: Object) -> bool:
    return bool(condition.get("status") == "True")


def _times(events: Sequence[Object], reason: str, container: str) -> list[float]:
    """Return the times of a container's events, whose field is like ``spec.containers{engine}``."""
    about = (event for event in events if event.get("reason") == reason)
    mine = (e for e in about if e["involvedObject"].get("fieldPath", "").partition("{")[2].rstrip("}") == container)
    return [_time(event.get("firstTimestamp") or event["eventTime"]) for event in mine]


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
