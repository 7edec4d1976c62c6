"""Assignment of this machine's devices to engine pods, as a device plugin does it on a node.

A pod gets as many devices as its pool's ``accelerator`` names, in turn over all devices. With more pods than devices
several share one, which no device plugin does by itself: their engines then split its memory.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from mmrouter_cli.local.folders import LocalError
from mmrouter_cli.local.run_plan import ContainerPlan, PodPlan
from mmrouter_lib.api import MMRouterDeployment
from mmrouter_lib.engines.base.launch import EngineLauncher, chosen_flags, flag
from mmrouter_lib.engines.launchers import LAUNCHERS
from mmrouter_operator.model.accelerators import ACCELERATORS
from mmrouter_operator.model.kinds import POOL_LABEL

ENGINE = "engine"
SPLIT_SHARE: Final = 0.9
"""Share of a device's memory that engines on it divide; the rest is for what they do not account for."""


@dataclass(frozen=True)
class DeviceRequest:
    """The devices that each engine of a pool needs. ``variable`` restricts an engine to its devices.

    ``devices``: ids of the machine's devices of this kind.
    """

    kind: str
    variable: str
    devices: tuple[str, ...]
    count: int
    launcher: EngineLauncher


def device_requests(deployment: MMRouterDeployment, find: Callable[[str], Sequence[str]]) -> dict[str, DeviceRequest]:
    """Return pool -> the devices that its engines request; without pools for which this machine shows no device.

    ``find`` returns the ids of a kind's devices. Raises :class:`LocalError` if an engine needs more than there are.
    """
    requests = {}
    for pool in deployment.spec.pools:
        kind = pool.accelerator.kind
        variable, devices = ACCELERATORS[kind].visible_variable, tuple(find(kind))
        if not variable or not devices or pool.role == "renderer":
            continue
        # A claim's number of devices is not in the resource: the ranks need one each.
        count = pool.accelerator.devices or pool.parallelism.tensor * pool.parallelism.data
        if count > len(devices):
            raise LocalError(
                f"pool {pool.name}: each engine needs {count} devices of kind {kind}, and this machine has "
                f"{', '.join(devices)}; {variable} names the ones to use"
            )
        requests[pool.name] = DeviceRequest(kind, variable, devices, count, LAUNCHERS[deployment.spec.engine.type])
    return requests


def find_devices(kind: str) -> list[str]:
    """Return the ids of this machine's devices: those that the environment names, else one for each device file.

    A variable that is set and empty names none.
    """
    row = ACCELERATORS[kind]  # type: ignore[index] # a kind of a pool
    if (named := os.environ.get(row.visible_variable)) is not None:
        return [each.strip() for each in named.split(",") if each.strip()]
    return [str(number) for number, _ in enumerate(Path("/").glob(row.device_files))] if row.device_files else []


def assign(pods: Iterable[PodPlan], requests: Mapping[str, DeviceRequest]) -> list[PodPlan]:
    """Return the pods with their devices: a variable of the engine's environment and, on a shared one, a flag.

    An engine whose ``podTemplate`` sets the variable keeps its own value.
    """
    pods, taken = list(pods), Counter[str]()
    held: dict[str, tuple[str, ...]] = {}
    for pod in pods:
        request = requests.get(pod.labels.get(POOL_LABEL, ""))
        engine = next((each for each in pod.containers if each.name == ENGINE), None)
        if request is None or engine is None or any(item["name"] == request.variable for item in engine.env):
            continue
        names = {id: f"{request.kind} {id}" for id in request.devices}
        free = sorted(request.devices, key=lambda id, names=names: taken[names[id]])  # type: ignore[misc] # a stable sort
        held[pod.name] = tuple(names[id] for id in sorted(free[: request.count], key=request.devices.index))
        taken.update(held[pod.name])
    earlier, assigned = Counter[str](), []
    for pod in pods:
        if devices := held.get(pod.name):
            sharers, before = max(taken[each] for each in devices), max(earlier[each] for each in devices)
            earlier.update(devices)
            request = requests[pod.labels[POOL_LABEL]]
            containers = [
                _placed(each, request, devices, sharers, before) if each.name == ENGINE else each
                for each in pod.containers
            ]
            pod = replace(pod, devices=devices, containers=tuple(containers))  # noqa: PLW2901
        assigned.append(pod)
    return assigned


def _placed(
    engine: ContainerPlan, request: DeviceRequest, devices: Sequence[str], sharers: int, before: int
) -> ContainerPlan:
    ids = ",".join(each.removeprefix(f"{request.kind} ") for each in devices)
    command, name = engine.command, request.launcher.memory_flag
    if sharers > 1 and not chosen_flags(command, {name}):
        command = (*command, *flag(name, memory_share(sharers, before, of_free=request.launcher.memory_of_free)))
    return engine._replace(command=command, env=(*engine.env, {"name": request.variable, "value": ids}))


def memory_share(sharers: int, before: int, *, of_free: bool) -> float:
    """Return the value of an engine's memory flag for an equal part of a device.

    ``before``: engines that hold their part already. ``of_free``: the flag is a share of the memory that is free at the
    engine's start, else of all memory.
    """
    part = SPLIT_SHARE / sharers
    return round(part / (1 - before * part) if of_free else part, 3)
