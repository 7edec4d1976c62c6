"""What a run tells: how long each pod waited and for what, and everything that is known when something failed.

What is known goes into one folder per failed test, a folder per namespace in it; secrets are not among it.
"""

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from cluster.access import Access
from cluster.resources import Object, path

from mmrouter_cli.status.pod_boot import steps, summary, waits_for
from mmrouter_operator.model.kinds import RESOURCE

LOG_LINES = 5000
OPERATOR = "mmrouter-system"
KINDS = (
    *("mmrouterdeployments", "pods", "deployments.apps", "replicasets.apps", "services", "networkpolicies"),
    *("poddisruptionbudgets", "configmaps"),
)
LOOK = """\
import sys, urllib.request
token = open("/etc/mmrouter/secrets/control.token").read().strip()
asked = urllib.request.Request("http://127.0.0.1:8001" + sys.argv[1], headers={"authorization": "Bearer " + token})
print(urllib.request.urlopen(asked, timeout=10).read().decode())
"""
"""Asks a frontend's control API from within: that works on any cluster, and the token stays where it is."""
LOOKED_AT = {"decisions": "/control/decisions?count=1000", "state": "/control/state"}
SELECTOR = "app.kubernetes.io/part-of=mmrouter"
PAUSE_SECONDS = 0.5
"""Between two watches: a test may have left the API server ended."""


class Boots:
    """Keeps each pod as it was when it was Ready for the first time; one that never was, as it was last."""

    def __init__(self, cluster: Access) -> None:
        self._cluster = cluster
        self._pods: dict[str, Object] = {}
        self._ended = threading.Event()
        threading.Thread(target=self._follow, name="boots", daemon=True).start()

    def of(self, namespace: str) -> list[Object]:
        found = [pod for pod in self._pods.copy().values() if pod["metadata"]["namespace"] == namespace]
        return sorted(found, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))

    def end(self) -> None:
        self._ended.set()

    def _follow(self) -> None:
        options = {"watch": "true", "labelSelector": SELECTOR}
        while not self._ended.is_set():
            # Whatever ends a watch, the next one begins with all pods that there are.
            with suppress(Exception), self._cluster.http.stream("GET", "/api/v1/pods", params=options) as answer:
                for line in answer.iter_lines():
                    event = json.loads(line)
                    if event["type"] in {"ADDED", "MODIFIED"}:
                        self._see(event["object"])
            self._ended.wait(PAUSE_SECONDS)

    def _see(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        if uid not in self._pods or waits_for(self._pods[uid]):
            self._pods[uid] = pod


def waited(cluster: Access, namespace: str, seen: Iterable[Object] = ()) -> list[tuple[str, str]]:
    """Return pod -> how long it took to Ready and what for, with every step's seconds since its creation. ``seen``:
    pods that the namespace had, as they were then; deleted ones are reported as well.
    """
    events = _events(cluster, namespace)
    here = {pod["metadata"]["uid"]: pod for pod in cluster.pods(namespace)}
    pods = {**here, **{pod["metadata"]["uid"]: pod for pod in seen}}
    return [
        (pod["metadata"]["name"], _waited(pod, events) + ("" if uid in here else "; gone since"))
        for uid, pod in pods.items()
    ]


def _waited(pod: Object, events: list[Object]) -> str:
    each = ", ".join(f"{step.until} {step.at:.0f}" for step in steps(pod, events))
    return f"{summary(pod, events)} ({each})" if each else summary(pod, events)


def dump(cluster: Access, namespace: str) -> str:
    """Return in short what is wrong in a namespace: conditions, pods that wait, warnings. The folder has everything."""
    try:
        pods = [f"{pod['metadata']['name']}: {waits_for(pod) or 'Ready'}" for pod in cluster.pods(namespace)]
        conditions = [
            f"{resource['metadata']['name']}: {each['type']} is {each['status']}, {each['reason']}: {each['message']}"
            for resource in cluster.read(path(RESOURCE, namespace))["items"]
            for each in (resource.get("status") or {}).get("conditions") or []
        ]
        warnings = [_of_event(event) for event in _events(cluster, namespace) if event["type"] == "Warning"]
        return "\n".join([*conditions, *pods, *warnings])
    except httpx.HTTPError as error:
        return f"nothing can be read of {namespace}: {error!r}"


@dataclass
class Place:
    """A cluster that the report of a failed test covers."""

    logs: tuple[Path, ...]
    """Folders with logs of its node; they need not be there, and are not where the node is not ours."""
    cluster: Access | None = None
    """Asked while there is one; logs are there before and afterwards."""
    namespaces: tuple[str, ...] = (OPERATOR,)
    """Reported in addition to the clusters that tests hold."""


class Dumps:
    """Writes the folders. ``root``: where they are made."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.places: dict[str, Place] = {}
        """Folder in a test's folder -> what it tells of; the cluster that all tests share has none of its own."""
        self.folders: dict[str, Path] = {}
        self.booted: list[str] = []
        """A line for every pod of every namespace that was left."""

    @contextmanager
    def sharing(self, cluster: Access) -> Iterator[None]:
        """Tell of the cluster that all tests share, for as long as the block runs."""
        self.places.setdefault("", Place(())).cluster = cluster
        boots = Boots(cluster)

        def leaving(namespace: str, error: BaseException | None) -> None:
            self._boot(cluster, namespace, boots)
            # Other exceptions (a skip, ctrl-C) are no failures.
            if isinstance(error, Exception):
                test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
                write_namespace(cluster, namespace, self._folder(test) / namespace)

        cluster.leaving = leaving
        try:
            yield
        finally:
            self._boot(cluster, OPERATOR, boots)
            boots.end()

    def write(self, test: str) -> Path:
        """Write what is known now, for a test; what this run has written of it stays. Returns the folder."""
        folder = self._folder(test)
        for name, place in self.places.items():
            if place.cluster is not None:
                for namespace in [*place.cluster.namespaces, *place.namespaces]:
                    if not (folder / name / namespace).exists():
                        write_namespace(place.cluster, namespace, folder / name / namespace)
            write_node(place.logs, folder / name / "node")
        return folder

    def _folder(self, test: str) -> Path:
        folder = self._root / re.sub(r"[^\w.-]+", "_", test).strip("_")[-150:]
        if test not in self.folders:
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
            folder.mkdir(parents=True)
            self.folders[test] = folder
        return folder

    def _boot(self, cluster: Access, namespace: str, boots: Boots) -> None:
        try:
            waits = waited(cluster, namespace, boots.of(namespace))
            self.booted += [f"{namespace} {pod}: {text}" for pod, text in waits]
        except httpx.HTTPError as unread:
            self.booted.append(f"{namespace} cannot be read: {unread!r}")


def write_namespace(cluster: Access, namespace: str, folder: Path) -> None:
    """Write everything that is known of a namespace into a folder; what cannot be read has its reason in its file."""
    for name, text in _files(cluster, namespace):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            file.write_text(text())
        except (httpx.HTTPError, subprocess.SubprocessError, OSError) as error:
            file.write_text(f"cannot be read: {error!r}\n")


def write_node(logs: Iterable[Path], folder: Path) -> None:
    """Write the ends of the logs that lie in some folders: those of kubelet, containerd and control plane."""
    for log in sorted(file for each in logs for file in each.glob("*.log")):
        folder.mkdir(parents=True, exist_ok=True)
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        (folder / log.name).write_text("\n".join(lines))


def _files(cluster: Access, namespace: str) -> Iterator[tuple[str, Callable[[], str]]]:
    yield "summary.txt", lambda: dump(cluster, namespace)
    yield "events.txt", lambda: "\n".join(map(_of_event, _events(cluster, namespace)))
    yield "boot.txt", lambda: "\n".join(f"{pod}: {text}" for pod, text in waited(cluster, namespace))
    yield "pods.txt", lambda: _kubectl(cluster, namespace, "describe", "pods")
    yield "objects.yaml", lambda: _kubectl(cluster, namespace, "get", ",".join(KINDS), "--output=yaml")
    try:
        pods = cluster.pods(namespace)
    except httpx.HTTPError:
        return  # summary.txt says why
    for pod in pods:
        name = pod["metadata"]["name"]
        for container in statuses(pod):
            yield f"logs/{name}.{container['name']}.log", _log(cluster, namespace, name, container["name"])
            if container["restartCount"]:
                before = _log(cluster, namespace, name, container["name"], previous="true")
                yield f"logs/{name}.{container['name']}.previous.log", before
        if pod["metadata"].get("labels", {}).get("mmrouter.io/role") == "frontend":
            for what, where in LOOKED_AT.items():
                yield f"{what}/{name}.json", _asked(cluster, namespace, name, where)


def _log(cluster: Access, namespace: str, pod: str, container: str, **options: str) -> Callable[[], str]:
    where = f"/api/v1/namespaces/{namespace}/pods/{pod}/log"
    return lambda: cluster.request("GET", where, container=container, tailLines=str(LOG_LINES), **options).text


def _asked(cluster: Access, namespace: str, pod: str, where: str) -> Callable[[], str]:
    return lambda: _kubectl(cluster, namespace, "exec", pod, "-c", "router", "--", "python3", "-c", LOOK, where)


def _kubectl(cluster: Access, namespace: str, *arguments: str) -> str:
    done = cluster.kubectl("-n", namespace, *arguments)
    return done.stdout if done.returncode == 0 else f"{done.stdout}kubectl: {done.returncode}\n{done.stderr}"


def _events(cluster: Access, namespace: str) -> list[Object]:
    found: list[Object] = cluster.read(f"/api/v1/namespaces/{namespace}/events")["items"]
    return sorted(found, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime")))


def _of_event(event: Object) -> str:
    about = event["involvedObject"]
    times = f" x{event['count']}" if (event.get("count") or 1) > 1 else ""
    when = event.get("lastTimestamp") or event.get("eventTime")
    return f"{when} {event['type']} {event['reason']}{times} {about['kind']}/{about['name']}: {event['message']}"


def statuses(pod: Object) -> list[Object]:
    """Return the status of each container of a pod, sidecars first."""
    return [*(pod["status"].get("initContainerStatuses") or []), *(pod["status"].get("containerStatuses") or [])]
