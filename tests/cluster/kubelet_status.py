"""What a kubelet would write into a pod's status. Pure: the pod and how its containers are doing in, a patch out."""

from collections.abc import Iterable, Mapping
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
) -> dict[str, Any] | None:
    """Return the patch of ``status`` that a kubelet would write, ``None`` when it would write nothing. ``now``: RFC
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
    status["conditions"] = _changed(
        old.get("conditions") or [],
        [
            _condition(
                "Initialized", begun and all(states[name].started for name in sidecars), "ContainersNotInitialized", ""
            ),
            _condition("ContainersReady", up, "ContainersNotReady", why),
            _condition(
                "Ready", up and not closed, "ReadinessGatesNotReady" if up else "ContainersNotReady", what or why
            ),
        ],
        now,
    )
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
    return {"status": status} if _differs(old, status) else None


def _condition(type: str, value: bool, reason: str, message: str) -> dict[str, str]:
    if value:
        return {"type": type, "status": "True", "reason": "", "message": ""}
    return {"type": type, "status": "False", "reason": reason, "message": message}


def _changed(old: Iterable[Mapping[str, Any]], new: Iterable[dict[str, str]], now: str) -> list[dict[str, str]]:
    before = {c["type"]: c for c in old}
    made = []
    for condition in new:
        was = before.get(condition["type"])
        same = was is not None and was["status"] == condition["status"]
        since = was["lastTransitionTime"] if same and was is not None else now
        made.append({**condition, "lastTransitionTime": since})
    return made


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


def _differs(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    conditions = {c["type"]: _plain(c) for c in old.get("conditions") or []}
    if any(conditions.get(c["type"]) != _plain(c) for c in new["conditions"]):
        return True
    return any(_bare(old.get(name)) != _bare(value) for name, value in new.items() if name != "conditions")


def _plain(condition: Mapping[str, Any]) -> tuple[str, str, str]:
    return condition["status"], condition.get("reason", ""), condition.get("message", "")


def _bare(value: Any) -> Any:
    """Drop what the server leaves out of an object, or puts into it: empty values."""
    if isinstance(value, dict):
        parts = {name: _bare(part) for name, part in value.items()}
        return {name: part for name, part in parts.items() if part is not None} or None
    if isinstance(value, list):
        return [_bare(part) for part in value] or None
    return value or None
