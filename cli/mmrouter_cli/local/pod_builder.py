"""A pod's plan -> a pod that can run: its folders, its volumes, and the command line of each container."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp

from mmrouter_cli.local.commands import Commands, inherited_env
from mmrouter_cli.local.expand import PodFacts, expand, resolve_env, rewriter
from mmrouter_cli.local.folders import SHM, RunFolders
from mmrouter_cli.local.logs import LogSink
from mmrouter_cli.local.pod import Container, LocalPod
from mmrouter_cli.local.probes import Target
from mmrouter_cli.local.process import Guard
from mmrouter_cli.local.run_plan import ContainerPlan, Plan, PodPlan
from mmrouter_cli.local.volumes import link_nested, make_volumes, mount_paths


@dataclass(frozen=True, slots=True)
class PodMaker:
    """What all pods of a run have in common. Relative host paths start at ``base_dir``."""

    folders: RunFolders
    base_dir: Path
    session: aiohttp.ClientSession
    commands: Commands
    guard: Guard
    log: LogSink
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of every container, over its own."""

    def make(self, plan: PodPlan, facts: PodFacts, objects: Plan, number: int, changed: Callable[[], None]) -> LocalPod:
        """Make the folders of a pod. ``objects`` has the ConfigMaps and Secrets that it names; ``number`` is its own
        in this run; ``changed`` is called when its readiness changes. Raises :class:`LocalError`.
        """
        # Numbers, not names: paths stay short (see folders.NAME_LENGTH).
        folder, tmpfs = self.folders.run / str(number), self.folders.tmpfs / str(number)
        folder.mkdir()
        volumes = make_volumes(plan, objects, folder=folder, tmpfs=tmpfs, base_dir=self.base_dir)
        pod = LocalPod(plan, facts, volumes, [], [], partial(self.log, plan.name), changed)
        for container in (*plan.init, *plan.containers):
            made = self._container(container, pod, folder, objects)
            (pod.init if container in plan.init else pod.containers).append(made)
        return pod

    def _container(self, plan: ContainerPlan, pod: LocalPod, folder: Path, objects: Plan) -> Container:
        where = f"{pod.name}/{plan.name}"
        mounts = mount_paths(plan, pod.volumes, where)
        link_nested(mounts, (self.folders.run, self.folders.tmpfs))
        rewrite = rewriter(mounts)
        inside = resolve_env(plan.env, plan.env_from, pod.facts, objects.config_maps, objects.secrets)
        inside |= self.env
        home = folder / "home" / plan.name
        home.mkdir(parents=True)
        temporary = mounts.get("/tmp", str(home))  # noqa: S108 - a path in the container
        env = {**inherited_env(), "HOME": str(home), "TMPDIR": temporary, "PYTHONUNBUFFERED": "1"}
        env |= {name: rewrite(value) for name, value in inside.items()}
        env["PATH"] = self.commands.path(env)

        def line(words: Sequence[str]) -> tuple[str, ...]:
            # Expanded from the container's own view, so that a path is rewritten once.
            first, *rest = (rewrite(expand(word, inside)) for word in words)
            return (*self.commands.resolve(first, env), *rest)

        probes = {"startup": plan.startup, "readiness": plan.readiness}
        return Container(
            plan=plan,
            argv=line(plan.command),
            env=env,
            folder=Path(rewrite(plan.working_dir)) if plan.working_dir else home,
            target=Target(pod.ip, plan.ports, env, str(home), self.session),
            probe_commands={n: line(p.command) for n, p in probes.items() if p is not None and p.command is not None},
            guard=self.guard,
            private_memory=str(SHM) in mounts,
            log=partial(self.log, where),
            changed=pod.container_changed,
        )
