"""Pods as local processes: building one from its plan, bringing it up, and stopping it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp

from mmrouter_cli.local.folders import SHM, RunFolders
from mmrouter_cli.local.pods.container_process import Commands, expand, inherited_env, resolve_env, rewriter
from mmrouter_cli.local.pods.pod_processes import Container
from mmrouter_cli.local.pods.volumes import link_nested, make_volumes, mount_paths
from mmrouter_cli.local.process import Guard, LogSink
from mmrouter_cli.local.run_plan import ContainerPlan, PodPlan, Probe, RunPlan

MAX_GRACE = 10.0


@dataclass(slots=True)
class LocalPod:
    """A pod, with the folders of its volumes and its containers."""

    plan: PodPlan
    volumes: dict[str, Path]
    init: list[Container]
    containers: list[Container]
    log: Callable[[str], None]
    changed: Callable[[], None]
    was_ready: bool = False
    stopping: bool = False
    started: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all containers have started once."""

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def ip(self) -> str:
        return self.plan.ip

    @property
    def labels(self) -> dict[str, str]:
        return self.plan.labels

    @property
    def ready(self) -> bool:
        return all(container.ready for container in self._long_running)

    @property
    def _long_running(self) -> list[Container]:
        return [container for container in self.init if container.plan.sidecar] + self.containers

    @property
    def pids(self) -> dict[str, int | None]:
        """Container name -> process id, ``None`` while it is not running."""
        return {container.name: container.pid for container in self.init + self.containers}

    def container(self, name: str) -> Container:
        """Return a container by name. Raises ``KeyError``."""
        return {container.name: container for container in self.init + self.containers}[name]

    def container_changed(self) -> None:
        """React to a change of a container's readiness."""
        if self.ready != self.was_ready:
            self.was_ready = self.ready
            if not self.stopping:
                self.log("Ready" if self.ready else f"not Ready ({self.waiting_for()})")
        self.changed()

    def waiting_for(self) -> str:
        """Return what keeps the pod from being Ready."""
        return "; ".join(f"{c.name}: {c.trouble or c.waiting_for}" for c in self._long_running if not c.ready)

    def hopeless(self) -> str:
        """Return the containers that end repeatedly without ever being up; empty without any."""
        failing = (c for c in self.init + self.containers if c.hopeless)
        return "; ".join(f"{self.name}/{c.name} {c.trouble}" for c in failing)

    async def run(self, after: Sequence["LocalPod"]) -> None:
        """Start the pod. ``after``: pods whose containers have to start before this pod's."""
        for container in self.init:
            if container.plan.sidecar:
                container.start()
                await container.started.wait()
            else:
                await container.once()
        for pod in after:
            await pod.started.wait()
        for container in self.containers:
            container.start()
        for container in self.containers:
            await container.started.wait()
        self.started.set()

    async def stop(self) -> None:
        """Stop the containers, then the sidecars in reverse order, which relay the containers' last messages."""
        self.stopping = True
        grace = min(self.plan.grace_seconds, MAX_GRACE)
        await asyncio.gather(*(container.stop(grace) for container in self.containers))
        for container in reversed(self.init):
            await container.stop(grace)


@dataclass(frozen=True, slots=True)
class PodBuilder:
    """Builds the pods of a run. Relative host paths start at ``base_dir``."""

    folders: RunFolders
    base_dir: Path
    session: aiohttp.ClientSession
    commands: Commands
    guard: Guard
    log: LogSink

    def build(self, plan: PodPlan, objects: RunPlan, number: int, changed: Callable[[], None]) -> LocalPod:
        """Build pod ``number`` of the run, with its folders. Raises :class:`LocalError`.

        ``objects`` has the ConfigMaps and Secrets; ``changed`` is called when the pod's readiness changes.
        """
        # Numbers keep paths short (see folders.NAME_LENGTH).
        folder, tmpfs = self.folders.run / str(number), self.folders.tmpfs / str(number)
        folder.mkdir()
        volumes = make_volumes(plan, objects, folder=folder, tmpfs=tmpfs, base_dir=self.base_dir)
        pod = LocalPod(plan, volumes, [], [], partial(self.log, plan.name), changed)
        for container in (*plan.init, *plan.containers):
            made = self._container(container, pod, folder, objects)
            (pod.init if container in plan.init else pod.containers).append(made)
        return pod

    def _container(self, plan: ContainerPlan, pod: LocalPod, folder: Path, objects: RunPlan) -> Container:
        where = f"{pod.name}/{plan.name}"
        mounts = mount_paths(plan, pod.volumes, where)
        link_nested(mounts, (self.folders.run, self.folders.tmpfs))
        rewrite = rewriter(mounts)
        inside = resolve_env(plan.env, plan.env_from, pod.plan, objects)
        home = folder / "home" / plan.name
        home.mkdir(parents=True)
        temporary = mounts.get("/tmp", str(home))  # noqa: S108 - a path in the container
        env = {**inherited_env(), "HOME": str(home), "TMPDIR": temporary, "PYTHONUNBUFFERED": "1"}
        env |= {name: rewrite(value) for name, value in inside.items()}
        env["PATH"] = self.commands.path(env)

        def line(words: Sequence[str]) -> tuple[str, ...]:
            # Expanded from the unrewritten environment, so that a path is rewritten once.
            first, *rest = (rewrite(expand(word, inside)) for word in words)
            return (*self.commands.resolve(first, env), *rest)

        def resolved(probe: Probe | None) -> Probe | None:
            return probe and probe._replace(command=probe.command and line(probe.command))

        return Container(
            plan=plan._replace(startup=resolved(plan.startup), readiness=resolved(plan.readiness)),
            argv=line(plan.command),
            env=env,
            folder=Path(rewrite(plan.working_dir)) if plan.working_dir else home,
            home=home,
            ip=pod.ip,
            session=self.session,
            guard=self.guard,
            private_memory=str(SHM) in mounts,
            log=partial(self.log, where),
            changed=pod.container_changed,
        )
