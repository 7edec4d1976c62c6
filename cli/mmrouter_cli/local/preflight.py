"""What `mmrouter up` checks on this machine before it starts anything, so that all problems are shown at once."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mmrouter_cli.local.devices import device_requests, find_devices
from mmrouter_cli.local.envoy import GATEWAY_PORT, PORT_TAKEN
from mmrouter_cli.local.folders import LocalError
from mmrouter_cli.local.loopback_network import take_block
from mmrouter_cli.local.pods.container_process import ENGINE_COMMANDS, Engines, engine_commands, inherited_env
from mmrouter_cli.local.run_plan import RunPlan
from mmrouter_lib.api import MMRouterDeployment

CONFIGS = ("config.json", "params.json", "*.gguf")
TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "tekken.json", "*.tiktoken", "*.gguf")
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
LOADS_WEIGHTS = frozenset({"worker", "prefill", "decode"})
"""Roles whose engines load the whole model; an encoder loads a part."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """The checks of one run. Relative host paths start at ``base_dir``; ``gateway``: with Envoy in front."""

    deployment: MMRouterDeployment
    plan: RunPlan
    base_dir: Path
    engines: Engines
    engine_env: Path | None
    gateway: bool

    def check(self) -> None:
        """Raise :class:`LocalError` with every problem, one a line."""
        problems: list[str] = []
        checks: tuple[Callable[[], Iterator[str]], ...] = (self._model, self._commands, self._devices, self._ports)
        for each in checks:
            try:
                problems += each()
            except LocalError as error:
                problems.append(str(error))
        if problems:
            raise LocalError("\n".join(problems))

    def warning(self) -> str:
        """Return a sentence where the weights of all engines clearly exceed the free memory, otherwise nothing."""
        folder, free = self._folder(), available_memory()
        if self.engines == "sim" or folder is None or free is None:
            return ""
        pools = [p for p in self.deployment.spec.pools if p.role in LOADS_WEIGHTS and p.accelerator.kind == "cpu"]
        number, weights = sum(pool.replicas for pool in pools), _size(folder)
        if number * weights <= free:
            return ""
        return (
            f"{number} engines load {weights / 2**30:.1f} GiB of weights each, and this machine has "
            f"{free / 2**30:.1f} GiB of free memory: lower the replicas"
        )

    def _folder(self) -> Path | None:
        """Return the model's folder, ``None`` without a volume that is a folder of this machine."""
        path = ((self.deployment.spec.model.volume or {}).get("hostPath") or {}).get("path")
        return None if path is None else self.base_dir / str(path)

    def _model(self) -> Iterator[str]:
        """Yield what keeps engines and routers from reading the model's files."""
        write = "write `volume: {hostPath: {path: FOLDER}}`, where FOLDER is relative to the file of the deployment"
        folder, volume = self._folder(), self.deployment.spec.model.volume
        if volume is None and self.engines == "sim" and not self._has_hub():
            yield (
                "spec.model.volume is missing, and simulated engines need the model's configuration and tokenizer: "
                f"{write}, or set HF_ENDPOINT to the URL of a hub"
            )
        if volume is not None and "persistentVolumeClaim" in volume:
            yield f"spec.model.volume: a persistentVolumeClaim is in clusters only: {write}"
        if folder is None:
            return
        if not folder.is_dir():
            yield (
                f"spec.model.volume: there is no folder {folder}: correct hostPath.path, which is relative to the file "
                "of the deployment"
            )
            return
        wanted = {"config.json": CONFIGS, "tokenizer, such as tokenizer.json": TOKENIZERS}
        missing = [name for name, patterns in wanted.items() if not any(any(folder.glob(each)) for each in patterns)]
        if missing:
            names = " and no ".join(missing)
            yield f"spec.model.volume: {folder} has no {names}: name the folder with the model's files"

    def _has_hub(self) -> bool:
        """Whether a hub is named for the engines, by this environment or the resource."""
        containers = [each for pod in self.plan.pods for each in pod.containers]
        names = {item["name"] for each in containers for item in each.env}
        # What a ConfigMap or a Secret sets is not read here.
        return "HF_ENDPOINT" in {*names, *inherited_env()} or any(each.env_from for each in containers)

    def _commands(self) -> Iterator[str]:
        if self.engines == "sim" and self.engine_env is None:
            return  # installed with the run
        # Refuses an engine environment of simulated engines before it installs any.
        commands = engine_commands(self.engines, self.engine_env, Path())
        needed = {each.command[0] for pod in self.plan.pods for each in (*pod.init, *pod.containers)}
        for name in sorted(needed & set(ENGINE_COMMANDS)):
            try:
                commands.resolve(name, inherited_env())
            except LocalError as error:
                yield str(error)

    def _devices(self) -> Iterator[str]:
        if self.engines == "path":
            device_requests(self.deployment, find_devices)
        yield from ()

    def _ports(self) -> Iterator[str]:
        if self.gateway and any(port.port == GATEWAY_PORT for each in self.plan.services for port in each.ports):
            yield PORT_TAKEN
        ports = {port for pod in self.plan.pods for port in pod.ports}
        with contextlib.closing(take_block(ports, len(self.plan.pods))):
            pass


def _size(folder: Path) -> int:
    """Return the size in bytes of a model's weights, of the format of which there are most."""
    return max(sum(file.stat().st_size for file in folder.glob(pattern)) for pattern in WEIGHTS)


def available_memory() -> int | None:
    """Return the bytes that processes can still take without swapping, ``None`` where the kernel does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
