"""A hollow kubelet: nodes that run nothing, and the status of the pods that the real scheduler put on them.

Pods become Running and, by default, ready at once; a test holds some of them back or lets them fail. With a runner
(``runner.py``) the containers are local processes and their own probes say how they are doing.
"""

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

import httpx
from cluster.controlplane import ControlPlane
from cluster.kubelet_status import HOLD, failing, running, status_patch
from cluster.runner import LocalRunner
from waiting import wait_for

STRATEGIC = "application/strategic-merge-patch+json"
RECONNECT_SECONDS = 0.2


@dataclass(eq=False)
class Rule:
    namespace: str
    labels: Mapping[str, str]
    reason: str
    message: str
    container: str

    def holds(self, pod: Mapping[str, Any]) -> bool:
        metadata = pod["metadata"]
        labels = metadata.get("labels") or {}
        return metadata["namespace"] == self.namespace and self.labels.items() <= labels.items()


@dataclass
class Seen:
    """A pod as it was seen last, and its address once it has one."""

    pod: dict[str, Any]
    ip: str = ""
    ending: "asyncio.Task[None] | None" = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def learn(self, pod: dict[str, Any]) -> None:
        """Take the pod unless a newer one is known: answers and the watch overtake each other."""
        if _version(pod) > _version(self.pod):
            self.pod = pod


class Hollow:
    """The kubelet of any number of nodes; :func:`hollow` makes and ends it. Its methods are for the test's thread."""

    def __init__(
        self, plane: ControlPlane, runner: LocalRunner | None = None, client: httpx.AsyncClient | None = None
    ) -> None:
        self._plane, self._runner = plane, runner
        self._nodes: set[str] = set()
        self._rules: list[Rule] = []
        self._seen: dict[str, Seen] = {}
        self._addresses = itertools.count(1)
        self._client = client or plane.async_client()
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures: list[BaseException] = []
        self._closing = False
        if runner is not None:
            runner.bind(self._look)
        self._thread = threading.Thread(target=self._run, name="hollow kubelet")
        self._thread.start()

    # -- for tests ---------------------------------------------------------------------------------------------------

    def node(
        self, name: str, labels: Mapping[str, str] | None = None, capacity: Mapping[str, str] | None = None
    ) -> None:
        """Register a node and wait until pods may be put on it. ``capacity``: over the default's."""
        resources = {"cpu": "64", "memory": "512Gi", "pods": "1000", "ephemeral-storage": "1Ti"}
        resources |= capacity or {}
        names = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {**names, **(labels or {})}}}
        self._nodes.add(name)
        self._plane.request("POST", "/api/v1/nodes", body).raise_for_status()
        now = _now()
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": now}
        addresses = {"InternalIP": self._plane.address, "Hostname": name}
        status = {
            "capacity": resources,
            "allocatable": resources,
            "conditions": [{**ready, "lastTransitionTime": now}],
            "addresses": [{"type": type, "address": address} for type, address in addresses.items()],
        }
        path = f"/api/v1/nodes/{name}"
        self._plane.request("PATCH", f"{path}/status", {"status": status}, STRATEGIC).raise_for_status()
        read = partial(self._plane.request, "GET", path)
        wait_for(lambda: not read().json()["spec"].get("taints"), 10, f"node {name} takes pods")

    def hold(
        self, namespace: str, labels: Mapping[str, str], reason: str = HOLD, message: str = "", container: str = ""
    ) -> Rule:
        """Keep pods from becoming ready: those with ``labels``, now and later, until :meth:`release`. ``reason``: of
        the waiting container (``ImagePullBackOff``, ``CrashLoopBackOff``), by default none that is bad.
        """
        rule = Rule(namespace, labels, reason, message, container)
        self._in_loop(self._change(rule, add=True))
        return rule

    def release(self, rule: Rule) -> None:
        self._in_loop(self._change(rule, add=False))

    def close(self) -> None:
        """End the kubelet and what it runs, and delete its nodes, on which no pod would ever run. Pods stay in the API.
        Raises what went wrong in its thread.
        """
        self._in_loop(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._failures:
            raise self._failures[0]

    # -- in the kubelet's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._spawn(self._follow())
        self._loop.run_forever()

    def _in_loop(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failures.append(error)

    async def _close(self) -> None:
        self._closing = True
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._runner is not None:
            await self._runner.close()
        for name in self._nodes:
            with contextlib.suppress(httpx.HTTPError):  # the API server may have ended
                await self._client.delete(f"/api/v1/nodes/{name}")
        await self._client.aclose()

    async def _change(self, rule: Rule, *, add: bool) -> None:
        (self._rules.append if add else self._rules.remove)(rule)
        for uid, seen in self._seen.items():
            if rule.holds(seen.pod):
                self._look(uid)

    def _look(self, uid: str) -> None:
        if not self._closing:  # what the runner ends then has no kubelet any more
            self._spawn(self._sync(uid))

    def _look_again(self, uid: str) -> None:
        self._loop.call_later(RECONNECT_SECONDS, self._look, uid)

    async def _follow(self) -> None:
        """Watch all pods for good; a broken watch begins anew with a list, as a test may restart the API server."""
        while True:
            try:
                page = (await self._client.get("/api/v1/pods")).raise_for_status().json()
                for uid in self._seen.keys() - {pod["metadata"]["uid"] for pod in page["items"]}:
                    await self._forget(uid)
                for pod in page["items"]:
                    self._take(pod)
                await self._watch(page["metadata"]["resourceVersion"])
            except (httpx.HTTPError, OSError):
                await asyncio.sleep(RECONNECT_SECONDS)

    async def _watch(self, version: str) -> None:
        query = {"watch": "1", "resourceVersion": version, "allowWatchBookmarks": "true"}
        timeout = httpx.Timeout(10, read=None)
        async with self._client.stream("GET", "/api/v1/pods", params=query, timeout=timeout) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                event = json.loads(line)
                match event["type"]:
                    case "ERROR":
                        return
                    case "DELETED":
                        await self._forget(event["object"]["metadata"]["uid"])
                    case "ADDED" | "MODIFIED":
                        self._take(event["object"])

    def _take(self, pod: dict[str, Any]) -> None:
        if pod["spec"].get("nodeName") not in self._nodes:
            return
        uid = pod["metadata"]["uid"]
        if uid in self._seen:
            self._seen[uid].learn(pod)
        else:
            self._seen[uid] = Seen(pod)
        self._look(uid)

    async def _forget(self, uid: str) -> None:
        seen = self._seen.pop(uid, None)
        if seen is not None and self._runner is not None and seen.ending is None:
            self._spawn(self._runner.stop(uid, 0.0))

    async def _sync(self, uid: str) -> None:
        seen = self._seen.get(uid)
        if seen is None:
            return
        async with seen.lock:
            pod = seen.pod
            if "deletionTimestamp" in pod["metadata"] and seen.ending is None:
                seen.ending = self._spawn(self._end(uid, seen))
            if seen.ending is not None and not seen.ip:
                return  # what has not begun does not begin any more
            rule = next((rule for rule in self._rules if rule.holds(pod)), None)
            if not seen.ip and (rule is None or rule.reason != HOLD):
                try:
                    seen.ip = await self._address(pod)
                except httpx.HTTPError:  # the server is away, or the namespace on its way out
                    self._look_again(uid)
                    return
            if rule is not None:
                states = failing(pod, rule.container, rule.reason, rule.message)
            else:
                states = (self._runner.states(uid) if self._runner is not None else None) or running(pod)
            patch = status_patch(pod, states, seen.ip, self._plane.address, _now())
            if patch is not None and not await self._write(seen, patch):
                self._look_again(uid)

    async def _address(self, pod: dict[str, Any]) -> str:
        if self._runner is not None:
            return await self._runner.start(pod)
        number = next(self._addresses)
        # Loopback, so that a connection to a pod that runs nothing is refused at once.
        return f"127.{64 + (number >> 16)}.{number >> 8 & 255}.{number & 255}"

    async def _write(self, seen: Seen, patch: dict[str, Any]) -> bool:
        metadata = seen.pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/status"
        patch = {"metadata": {"uid": metadata["uid"]}, **patch}
        try:
            answer = await self._client.patch(path, content=json.dumps(patch), headers={"content-type": STRATEGIC})
        except httpx.HTTPError:
            return False
        if answer.is_success:
            seen.learn(answer.json())  # its event may come later than the next reason to look
            return True
        if answer.status_code == 404:
            return True  # the watch tells
        if answer.status_code in {409, 429} or answer.is_server_error:
            return False
        raise AssertionError(f"the status of {metadata['name']} was refused: {answer.text}")

    async def _end(self, uid: str, seen: Seen) -> None:
        """Do what a kubelet does with a deleted pod: end it, then remove the object."""
        metadata = seen.pod["metadata"]
        if self._runner is not None:
            await self._runner.stop(uid, float(metadata.get("deletionGracePeriodSeconds") or 0))
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        body = json.dumps({"gracePeriodSeconds": 0, "preconditions": {"uid": uid}})
        while True:
            with contextlib.suppress(httpx.HTTPError):
                headers = {"content-type": "application/json"}
                answer = await self._client.request("DELETE", path, content=body, headers=headers)
                if answer.is_success or answer.status_code in {404, 409}:
                    return
            await asyncio.sleep(RECONNECT_SECONDS)


def _version(pod: Mapping[str, Any]) -> int:
    return int(pod["metadata"]["resourceVersion"])


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


@contextmanager
def hollow(
    plane: ControlPlane, runner: LocalRunner | None = None, client: httpx.AsyncClient | None = None
) -> Iterator[Hollow]:
    """Play the kubelet until the block ends. ``client``: of the API server, by default one that nothing disturbs."""
    kubelet = Hollow(plane, runner, client)
    try:
        yield kubelet
    finally:
        kubelet.close()
