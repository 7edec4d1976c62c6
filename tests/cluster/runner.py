"""Pods of the API server as processes of this machine, by the project's own local substrate.

With it the hollow kubelet becomes a true one for the pods of a deployment: routers, sidecars and simulated engines run
at their pods' addresses, with the ConfigMaps, Secrets and ServiceAccount tokens that the API server gives.
"""

import asyncio
import base64
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import httpx
from cluster.controlplane import API_PORT, ControlPlane
from cluster.kubelet_status import ContainerState

from mmrouter_cli.local.folders import make_folders
from mmrouter_cli.local.loopback_network import AddressBlock, take_block
from mmrouter_cli.local.pods.container_process import engine_commands
from mmrouter_cli.local.pods.pod import LocalPod, PodBuilder
from mmrouter_cli.local.pods.pod_processes import Container
from mmrouter_cli.local.run_plan import RunPlan, make_plan

PORTS = {8000, 8001, 9090}
ACCOUNT_DIR = "/var/run/secrets/kubernetes.io/serviceaccount"
FAST_SECONDS = 1.0
"""The longest pause between readiness probes: tests wait for them."""


@dataclass
class Running:
    pod: LocalPod
    task: "asyncio.Task[None]"
    hooks: Mapping[str, Mapping[str, Any]]


class LocalRunner:
    """Turns pods into something that runs, in the kubelet's event loop. Relative host paths start at ``base_dir``.

    ``images``: image -> folder with the packages that its containers run, instead of this checkout's.
    """

    def __init__(self, plane: ControlPlane, base_dir: Path, images: Mapping[str, Path] = MappingProxyType({})) -> None:
        self._plane, self._base_dir, self._images = plane, base_dir, images
        self._block: AddressBlock = take_block(PORTS)
        self._folders = make_folders("cluster")
        for folder in {self._folders.run, self._folders.tmpfs}:
            plane.guard.send(str(folder))
        self._commands = engine_commands("sim", None, self._folders.run / "bin")
        self._numbers = itertools.count(1)
        self._running: dict[str, Running] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()
        self._maker: PodBuilder | None = None
        self._session: aiohttp.ClientSession | None = None
        self._client: httpx.AsyncClient | None = None
        self._changed: Callable[[str], None] = lambda uid: None
        self._log = plane.log_file("pods").open("a")

    def bind(self, changed: Callable[[str], None]) -> None:
        self._changed = changed

    async def start(self, pod: dict[str, Any]) -> str:
        maker, client = await self._open()
        metadata = pod["metadata"]
        namespace, uid = metadata["namespace"], metadata["uid"]
        objects = []
        for kind, plural in (("ConfigMap", "configmaps"), ("Secret", "secrets")):
            page = (await client.get(f"/api/v1/namespaces/{namespace}/{plural}")).raise_for_status().json()
            objects += [{**item, "kind": kind} for item in page["items"]]
        account = pod["spec"].get("serviceAccountName", "default")
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        bound = {"kind": "Pod", "apiVersion": "v1", "name": metadata["name"], "uid": uid}
        body = {"spec": {"expirationSeconds": 3607, "boundObjectRef": bound}}
        answer = await client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
        token = answer.raise_for_status().json()["status"]["token"]
        plan = _plan(pod, objects, token, self._plane.address, self._images)
        placed = replace(plan.pods[0], uid=uid, ip=self._block.next_pod(), node=pod["spec"]["nodeName"])
        local = maker.build(placed, plan, next(self._numbers), lambda: self._changed(uid))
        for container in local.init + local.containers:
            container.env["MMROUTER_DISCOVERY"] = "kubernetes"  # the substrate's own is by file
        hooks = {c["name"]: (c.get("lifecycle") or {}).get("preStop") or {} for c in pod["spec"]["containers"]}
        self._running[uid] = Running(local, asyncio.create_task(local.run(())), hooks)
        return local.ip

    def states(self, uid: str) -> dict[str, ContainerState] | None:
        """Return how a pod's containers are doing; ``None`` for one that is not running here."""
        running = self._running.get(uid)
        if running is None:
            return None
        return {container.name: _state(container) for container in running.pod.init + running.pod.containers}

    async def stop(self, uid: str, grace: float) -> None:
        running = self._running.pop(uid, None)
        if running is not None:
            # The waiting task may be cancelled; the pod is ended all the same.
            ending = asyncio.create_task(self._end(running, grace))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            await asyncio.shield(ending)

    async def _end(self, running: Running, grace: float) -> None:
        running.task.cancel()
        await asyncio.wait([running.task])
        if grace:
            # The containers' hooks, before any container gets a signal; a sidecar's would come after its engine's end.
            hooks = asyncio.create_task(self._hooks(running))
            closing = asyncio.create_task(self._closing.wait())
            await asyncio.wait([hooks, closing], return_when=asyncio.FIRST_COMPLETED)
            hooks.cancel()
            closing.cancel()
            await asyncio.gather(hooks, closing, return_exceptions=True)
        await running.pod.stop()

    async def _hooks(self, running: Running) -> bool:
        await asyncio.gather(*(self._before_stop(one, running.hooks) for one in running.pod.containers))
        return True

    async def _before_stop(self, container: Container, hooks: Mapping[str, Mapping[str, Any]]) -> None:
        hook = hooks.get(container.name, {})
        if "sleep" in hook:
            await asyncio.sleep(hook["sleep"]["seconds"])
        if "exec" in hook and container.child is not None:
            first, *rest = hook["exec"]["command"]
            argv = [*self._commands.resolve(first, container.env), *rest]
            process = await asyncio.create_subprocess_exec(*argv, env=container.env, cwd=container.folder)
            try:
                await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()

    async def close(self) -> None:
        self._closing.set()
        await asyncio.gather(*self._ending, *(self.stop(uid, 0.0) for uid in list(self._running)))
        if self._session is not None:
            await self._session.close()
        if self._client is not None:
            await self._client.aclose()
        self._block.close()
        self._log.close()

    async def _open(self) -> tuple[PodBuilder, httpx.AsyncClient]:
        # In the kubelet's event loop, whose things these are.
        if self._maker is None or self._client is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
            self._client = self._plane.async_client()
            guard = self._plane.guard
            self._maker = PodBuilder(self._folders, self._base_dir, self._session, self._commands, guard, self._write)
        return self._maker, self._client

    def _write(self, where: str, line: str) -> None:
        self._log.write(f"{where}: {line}\n")
        self._log.flush()


def _plan(
    pod: Mapping[str, Any], objects: list[dict[str, Any]], token: str, server: str, images: Mapping[str, Path]
) -> RunPlan:
    """Return the plan of one pod as the substrate knows it: a Deployment of one replica, and tokens as Secrets."""
    spec = json.loads(json.dumps(pod["spec"]))
    account = {"token": token, "namespace": pod["metadata"]["namespace"]}
    for volume in spec.get("volumes") or []:
        for source in (volume.get("projected") or {}).get("sources") or []:
            for kind, key in (("serviceAccountToken", "token"), ("downwardAPI", "namespace")):
                if kind in source:
                    where = source.pop(kind)
                    at = where["path"] if kind == "serviceAccountToken" else where["items"][0]["path"]
                    source["secret"] = {"name": "account token", "items": [{"key": key, "path": at}]}
    own = {
        **{"KUBERNETES_SERVICE_HOST": server, "KUBERNETES_SERVICE_PORT": str(API_PORT)},
        "MMROUTER_SERVICE_ACCOUNT_DIR": ACCOUNT_DIR,
    }
    for container in (*(spec.get("initContainers") or []), *spec["containers"]):
        added = {**own, "PYTHONPATH": f"{path}"} if (path := images.get(container["image"])) else own
        others = [each for each in container.get("env") or [] if each["name"] not in added]
        container["env"] = [*others, *({"name": name, "value": value} for name, value in added.items())]
        probe = container.get("readinessProbe")
        if probe is not None:
            probe["periodSeconds"] = min(probe.get("periodSeconds", 10), FAST_SECONDS)
    data = {key: base64.b64encode(value.encode()).decode() for key, value in account.items()}
    secret = {"kind": "Secret", "metadata": {"name": "account token"}, "data": data}
    template = {"metadata": pod["metadata"], "spec": spec}
    deployment = {"kind": "Deployment", "metadata": pod["metadata"], "spec": {"replicas": 1, "template": template}}
    plan = make_plan([*objects, secret, deployment])
    plan.pods[0] = replace(plan.pods[0], name=pod["metadata"]["name"])
    return plan


def _state(container: Container) -> ContainerState:
    if container.child is not None:
        return ContainerState(
            container.name,
            container.started.is_set(),
            container.ready and container.started.is_set(),
            container.restarts,
        )
    reason = "CrashLoopBackOff" if container.restarts or "restarts in" in container.waiting_for else "PodInitializing"
    return ContainerState(container.name, False, False, container.restarts, reason, container.waiting_for)
