"""What a kubelet would write into a pod's status. Pure: the pod and how its containers are doing in, a patch out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HOLD = "ContainerCreating"
"""Reason of a container that waits without anything being wrong."""


@dataclass(frozen=True, slots=True)
class ContainerState:
    """How one container is doing. ``waiting``: the reason that keeps it from running, empty while it runs."""

    name: str
    started: bool = True
    ready: bool = True
    restarts: int = 0
    waiting: str = ""
    message: str = ""


def names(pod: Mapping[str, Any]) -> tuple[list[str], list[str], list[str]]:
    init = pod["spec"].get("initContainers") or []
    ends = [c["name"] for c in init if c.get("restartPolicy") != "Always"]
    sidecars = [c["name"] for c in init if c.get("restartPolicy") == "Always"]
    return ends, sidecars, [c["name"] for c in pod["spec"]["containers"]]


def running(pod: Mapping[str, Any]) -> dict[str, ContainerState]:
    _, sidecars, containers = names(pod)
    return {name: ContainerState(name) for name in (*sidecars, *containers)}


def failing(pod: Mapping[str, Any], container: str, reason: str, message: str) -> dict[str, ContainerState]:
    _, sidecars, containers = names(pod)
    bad = container or containers[0]
    restarts = 3 if reason == "CrashLoopBackOff" else 0
    waiting = ContainerState(bad, started=False, ready=False, restarts=restarts, waiting=reason, message=message)
    return {**{name: ContainerState(name) for name in (*sidecars, *containers)}, bad: waiting}


def status_patch(
    pod: Mapping[str, Any], states: Mapping[str, ContainerState], ip: str, host: str, now: str
) -> dict[str, Any]:
    """Return the patch of ``status`` that a kubelet would write: the same again where nothing has changed. ``now``: RFC
    3339. Readiness gates are honoured; conditions that are not a kubelet's stay as they are.
    """
    old = pod.get("status") or {}
    ends, sidecars, containers = names(pod)
    staying = (*sidecars, *containers)
    begun = not any(states[name].waiting == HOLD for name in staying)
    up = begun and all(states[name].ready for name in staying)
    unready = [name for name in staying if not states[name].ready]
    has_run = any(not states[name].waiting or states[name].restarts for name in containers)
    status: dict[str, Any] = {"phase": "Running" if begun and has_run else "Pending", "hostIP": host}
    if begun:
        status |= {"podIP": ip, "podIPs": [{"ip": ip}], "startTime": old.get("startTime") or now}
    given = {c["type"]: c["status"] for c in old.get("conditions") or []}
    gates = [gate["conditionType"] for gate in pod["spec"].get("readinessGates") or []]
    closed = [gate for gate in gates if given.get(gate) != "True"]
    why = f"containers with unready status: [{' '.join(unready)}]"
    what = f"corresponding condition of pod readiness gate {closed[0]!r} is not True" if closed else ""
    unready_by = "ReadinessGatesNotReady" if up else "ContainersNotReady"
    started = begun and all(states[name].started for name in sidecars)
    status["conditions"] = [
        _condition(old, "Initialized", started, "ContainersNotInitialized", "", now),
        _condition(old, "ContainersReady", up, "ContainersNotReady", why, now),
        _condition(old, "Ready", up and not closed, unready_by, what or why, now),
    ]
    images = {
        c["name"]: c.get("image", "") for c in (*(pod["spec"].get("initContainers") or []), *pod["spec"]["containers"])
    }
    times = _times(old)
    ended = {"terminated": {"exitCode": 0, "reason": "Completed", "startedAt": None, "finishedAt": None}}
    status["initContainerStatuses"] = [
        *(_container(ContainerState(name, started=False, ready=True), images[name], now, ended) for name in ends),
        *(_container(states[name], images[name], times.get(name) or now) for name in sidecars),
    ]
    status["containerStatuses"] = [
        _container(states[name], images[name], times.get(name) or now) for name in containers
    ]
    return {"status": status}


def _condition(old: Mapping[str, Any], type: str, value: bool, reason: str, message: str, now: str) -> dict[str, str]:
    status = str(value)
    times = {(each["type"], each["status"]): each.get("lastTransitionTime") for each in old.get("conditions") or []}
    why = {"reason": "", "message": ""} if value else {"reason": reason, "message": message}
    return {"type": type, "status": status, **why, "lastTransitionTime": times.get((type, status)) or now}


def _times(old: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for status in (*(old.get("initContainerStatuses") or []), *(old.get("containerStatuses") or [])):
        if "running" in (status.get("state") or {}):
            found[status["name"]] = status["state"]["running"]["startedAt"]
    return found


def _container(state: ContainerState, image: str, since: str, how: Mapping[str, Any] | None = None) -> dict[str, Any]:
    if state.waiting:
        how = {"waiting": {"reason": state.waiting, "message": state.message}}
    return {
        "name": state.name,
        "image": image,
        "imageID": f"hollow://{image}",
        "ready": state.ready,
        "started": state.started,
        "restartCount": state.restarts,
        "state": how or {"running": {"startedAt": since}},
    }
