"""What a run tells: how long each pod waited and for what, and everything that is known when something failed."""

from datetime import datetime
from typing import Any

from cluster.access import Access

STEPS = ("PodScheduled", "PodReadyToStartContainers", "Initialized", "ContainersReady", "Ready")
LINES = 40


def waited(cluster: Access, namespace: str) -> list[tuple[str, str]]:
    """Return pod -> the seconds from its creation to each step that took it any."""
    found = []
    for pod in cluster.request("GET", f"/api/v1/namespaces/{namespace}/pods").raise_for_status().json()["items"]:
        created = _time(pod["metadata"]["creationTimestamp"])
        steps = {
            each["type"]: (_time(each["lastTransitionTime"]) - created).total_seconds()
            for each in pod["status"]["conditions"]
            if each["status"] == "True" and each.get("lastTransitionTime")
        }
        started = {
            each["name"]: (_time(each["state"]["running"]["startedAt"]) - created).total_seconds()
            for each in _containers(pod)
            if "running" in each["state"]
        }
        gates = [gate["conditionType"] for gate in pod["spec"].get("readinessGates") or []]
        rows = [(name, steps[name]) for name in (*STEPS[:3], *gates, *STEPS[3:]) if name in steps]
        rows += [(f"container {name}", seconds) for name, seconds in started.items()]
        text = ", ".join(f"{name} {seconds:.0f}" for name, seconds in sorted(rows, key=lambda row: row[1]))
        found.append((pod["metadata"]["name"], f"seconds to: {text}"))
    return found


def _containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    status = pod["status"]
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def dump(cluster: Access, namespace: str) -> str:
    """Return the resources, pods, events and the end of every container's log of a namespace."""
    asked = [("get", "mmrouterdeployments", "-o", "yaml"), ("describe", "pods"), ("get", "events")]
    parts = [cluster.kubectl("-n", namespace, *arguments).stdout for arguments in asked]
    names = cluster.kubectl("-n", namespace, "get", "pods", "-o", "name").stdout.split()
    options = ("--all-containers", "--prefix", f"--tail={LINES}")
    parts += [cluster.kubectl("-n", namespace, "logs", name, *options).stdout for name in names]
    return "\n".join(parts)
