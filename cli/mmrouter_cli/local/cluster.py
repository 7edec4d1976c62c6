"""Rendered objects as local processes: one address per pod, Services, discovery, and a clean end."""

import asyncio
import contextlib
import json
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from mmrouter_cli.local.devices import DeviceRequest, assign
from mmrouter_cli.local.envoy import GATEWAY_PORT, PICKER_PORT, PORT_TAKEN, envoy_config, start_envoy
from mmrouter_cli.local.folders import LocalError, RunFolders, make_folders, network_namespace
from mmrouter_cli.local.loopback_network import AddressBlock, Forwarder, can_bind, take_block
from mmrouter_cli.local.pods.container_process import Commands, Engines, engine_commands
from mmrouter_cli.local.pods.pod import LocalPod, PodBuilder
from mmrouter_cli.local.pods.pod_processes import VainError, log_failure
from mmrouter_cli.local.process import Child, Guard, LogSink, console_sink
from mmrouter_cli.local.run_plan import RunPlan, ServicePlan, ServicePort, make_plan
from mmrouter_lib.pod_paths import CONFIG_DIR
from mmrouter_operator.model.kinds import COMPATIBILITY, ENGINE_TLS, FRONTEND_ROLE, KV_LAYOUT, POOL_LABEL, ROLE_LABEL

NODE = "local"
UNPRIVILEGED_PORTS = [port for port in range(8000, 8100) if port != GATEWAY_PORT]
"""Where Services listen whose ports this user may not bind, in their order."""

RETRY_SECONDS = 1.0
TOKEN_FILE = "secrets/control.token"  # noqa: S105 - a file's name


class FrontendAddress(NamedTuple):
    """One frontend's own addresses, without the Service."""

    name: str
    url: str
    control: str


class LocalCluster:
    """A run in progress, from :func:`run_local`."""

    def __init__(
        self, plan: RunPlan, name: str, model: str, folders: RunFolders, block: AddressBlock, guard: Guard, log: LogSink
    ) -> None:
        self.name, self.model = name, model
        self.run_dir = folders.run
        self.pods: list[LocalPod] = []
        self.endpoint = ""
        self._plan, self._folders, self._block, self._guard, self._log = plan, folders, block, guard, log
        self._forwarders: list[Forwarder] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._roster = ""
        self._retry: asyncio.TimerHandle | None = None

    @property
    def frontends(self) -> tuple[FrontendAddress, ...]:
        return tuple(
            FrontendAddress(pod.name, *(f"http://{pod.ip}:{pod.plan.port(port)}" for port in ("http", "control")))
            for pod in filter(is_frontend, self.pods)
        )

    @property
    def control_token_path(self) -> Path | None:
        """File with the control token; ``None`` without a frontend."""
        return next((folder / TOKEN_FILE for folder in self._config_folders()), None)

    @property
    def control_token(self) -> str:
        path = self.control_token_path
        return path.read_text().strip() if path is not None else ""

    async def wait_ready(self, timeout: float) -> None:
        """Wait until every pod is Ready.

        Raises ``TimeoutError`` with the pods that are not and why, and :class:`VainError` where waiting cannot help.
        """

        def settled() -> bool:
            for pod in self.pods:
                if failure := pod.hopeless():
                    raise VainError(failure)
            return all(pod.ready for pod in self.pods)

        await self.wait_until(settled, timeout)

    def waiting(self) -> dict[str, str]:
        """Return what each pod waits for, by name; empty for one that is ready."""
        return {pod.name: "" if pod.ready else pod.waiting_for() or "its start" for pod in self.pods}

    async def wait_until(self, condition: Callable[[], bool], timeout: float) -> None:
        """Wait for a condition that depends on the pods' readiness. Raises ``TimeoutError``."""
        try:
            async with asyncio.timeout(timeout):
                while not condition():
                    await self._changed.wait()
        except TimeoutError:
            missing = "; ".join(f"{pod.name} ({pod.waiting_for()})" for pod in self.pods if not pod.ready)
            raise TimeoutError(f"not ready after {timeout:g} s: {missing or 'the condition does not hold'}") from None

    async def start(self, session: aiohttp.ClientSession, commands: Commands, base_dir: Path) -> None:
        """Create every pod's folders and start the pods.

        Pods start side by side, but those on one device one after the other: an engine measures the device's free
        memory during its start, so no other may take any meanwhile.
        """
        builder = PodBuilder(self._folders, base_dir, session, commands, self._guard, self._log)
        for number, plan in enumerate(self._plan.pods):
            placed = replace(plan, uid=str(uuid.uuid4()), ip=self._block.next_pod(), node=NODE)
            self.pods.append(builder.build(placed, self._plan, number, self._notify))
        addresses = f"{self._block.service} for Services"
        if self.pods:
            addresses += f", {self.pods[0].ip} to {self.pods[-1].ip} for pods"
        self._log(self.name, f"addresses: {addresses}")
        for service in self._plan.services:
            await self._serve(service)
        self._notify()
        self._describe()
        for number, pod in enumerate(self.pods):
            after = [other for other in self.pods[:number] if set(other.plan.devices) & set(pod.plan.devices)]
            if pod.plan.devices:
                pod.log(f"runs on {', '.join(pod.plan.devices)}" + (f" after {after[-1].name}" if after else ""))
            task = asyncio.create_task(pod.run(after), name=f"pod {pod.name}")
            task.add_done_callback(log_failure(pod.log))
            self._tasks.append(task)

    async def open_gateway(self, *, tls: bool) -> None:
        """Start Envoy in front of the routers, whose pickers serve ``tls`` or not; its address becomes the endpoint.
        It is started again when it ends, as pods are.

        Raises :class:`LocalError`.
        """
        if not can_bind(self._block.service, GATEWAY_PORT):
            raise LocalError(PORT_TAKEN)
        config = envoy_config(
            (self._block.service, GATEWAY_PORT),
            [(pod.ip, PICKER_PORT) for pod in filter(is_frontend, self.pods)],
            admin=self.run_dir / "envoy.sock",
            tls=tls,
        )
        envoy = await start_envoy(config, self.run_dir, self._guard, self._log)
        self.endpoint = f"http://{self._block.service}:{GATEWAY_PORT}"
        self._log("gateway", f"Envoy at {self.endpoint}")
        self._describe()
        task = asyncio.create_task(self._keep_envoy(envoy, config), name="gateway")
        task.add_done_callback(log_failure(partial(self._log, "gateway")))
        self._tasks.append(task)

    async def _keep_envoy(self, envoy: Child, config: dict[str, Any]) -> None:
        while True:
            self._log("gateway", f"Envoy ended with status {await envoy.wait()} and is started again")
            while True:
                try:
                    envoy = await start_envoy(config, self.run_dir, self._guard, self._log)
                    break
                except LocalError as error:
                    self._log("gateway", str(error))
                    await asyncio.sleep(RETRY_SECONDS)

    def _describe(self) -> None:
        """Write what other commands read about this run."""
        run = {
            "deployment": self.name,
            "model": self.model,
            "pid": os.getpid(),
            "network": network_namespace(),
            "endpoint": self.endpoint,
            "frontends": [frontend._asdict() for frontend in self.frontends],
            "control_token": str(self.control_token_path or ""),
        }
        write_atomically(self.run_dir / "run.json", json.dumps(run, indent=1))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.gather(*(pod.stop() for pod in self.pods))
        for forwarder in self._forwarders:
            await forwarder.close()
        if self._retry is not None:
            self._retry.cancel()

    async def _serve(self, service: ServicePlan) -> None:
        for port in service.ports:
            forwarder = Forwarder(partial(self._backends, service, port))
            ports = (port.port, *UNPRIVILEGED_PORTS)
            listen = next((each for each in ports if can_bind(self._block.service, each)), port.port)
            try:
                await forwarder.listen(self._block.service, listen)
            except OSError as error:
                raise LocalError(f"Service {service.name}: cannot listen on {self._block.service}:{listen}") from error
            self._forwarders.append(forwarder)
            url = f"{port.scheme}://{self._block.service}:{listen}"
            self.endpoint = self.endpoint or url
            self._log(service.name, f"Service port {port.port} at {url}")

    def _backends(self, service: ServicePlan, port: ServicePort) -> list[tuple[str, int]]:
        backends = []
        for pod in self.pods:
            number = pod.plan.port(port.target)
            if pod.ready and number is not None and service.selector.items() <= pod.labels.items():
                backends.append((pod.ip, number))
        return backends[:1] if service.one_backend else backends

    def _config_folders(self) -> Iterable[Path]:
        for pod in filter(is_frontend, self.pods):
            for container in pod.plan.containers:
                for mount in container.mounts:
                    if mount.path == CONFIG_DIR:
                        yield pod.volumes[mount.volume]

    def _notify(self) -> None:
        text = roster(self.pods)
        if text != self._roster:
            try:
                for folder in self._config_folders():
                    write_atomically(folder / "workers.json", text)
                self._roster = text
            except OSError as error:  # a full disk must not end the supervisor that reports a pod
                self._log(self.name, f"workers.json cannot be written, will retry: {error.strerror}")
                if self._retry is not None:
                    self._retry.cancel()
                self._retry = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._notify)
        self._changed.set()
        self._changed = asyncio.Event()


@asynccontextmanager
async def run_local(
    objects: Iterable[dict[str, Any]],
    *,
    base_dir: Path,
    name: str = "local",
    model: str = "",
    engines: Engines = "sim",
    engine_env: Path | None = None,
    devices: Mapping[str, DeviceRequest] | None = None,
    log: LogSink | None = None,
) -> AsyncIterator[LocalCluster]:
    """Run rendered objects as local processes until the block ends.

    Relative host paths start at ``base_dir``. ``model``: the name by which requests name the model; by default
    ``name``. ``devices``: pool -> the devices that its engines request.
    Enter it in the main thread: the processes die with the entering thread.
    Raises :class:`LocalError` for objects that cannot be run here.
    """
    plan = make_plan(objects)
    plan.pods = assign(plan.pods, devices or {})
    ports = {port for pod in plan.pods for port in pod.ports}
    async with AsyncExitStack() as stack:
        block = stack.enter_context(contextlib.closing(take_block(ports, len(plan.pods))))
        guard = Guard(uuid.uuid4().hex)
        stack.push_async_callback(guard.close)
        folders = make_folders(name)
        for folder in {folders.run, folders.tmpfs}:
            guard.send(str(folder))
        commands = engine_commands(engines, engine_env, folders.run / "bin")
        cluster = LocalCluster(plan, name, model or name, folders, block, guard, log or console_sink())
        connector = aiohttp.TCPConnector(force_close=True)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        stack.push_async_callback(cluster.stop)
        await cluster.start(session, commands, base_dir)
        yield cluster


def is_frontend(pod: LocalPod) -> bool:
    return pod.labels.get(ROLE_LABEL) == FRONTEND_ROLE


def roster(pods: Iterable[LocalPod]) -> str:
    """Return the text of ``workers.json``: every engine pod from its first moment, and the frontends."""
    workers, frontends = [], []
    for pod in pods:
        who = {"uid": pod.plan.uid, "name": pod.name, "ip": pod.ip}
        if is_frontend(pod):
            frontends.append({**who, "ready": pod.ready})
        elif POOL_LABEL in pod.labels:
            role = pod.labels.get(ROLE_LABEL, "worker")
            place = {"node": pod.plan.node, "pool": pod.labels[POOL_LABEL], "role": role}
            layout = (pod.labels.get(name) for name in (COMPATIBILITY, KV_LAYOUT))
            pairs = {"compatibility": "-".join(filter(None, layout))}
            state = {"ready": pod.ready, "draining": False, "tls": ENGINE_TLS in pod.labels}
            workers.append({**who, **place, **pairs, **state})
    return json.dumps({"workers": workers, "frontends": frontends}, indent=1)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file, so that a reader sees the old text or the new one."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.touch(mode=0o600)
    fresh.write_text(text)
    os.replace(fresh, path)
