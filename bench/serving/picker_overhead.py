"""What a gateway with an endpoint picker adds beside a frontend: latency, and CPU in router and Envoy, of the same
requests on the same engine (docs/performance.md, *picker*). All targets take turns in every round.
"""

import base64
import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.child_process import Child, Process
from bench.feed.fake_sidecars import FRONTEND, address
from bench.placing.workload import padded_png
from bench.report import Row, not_run, percentile, row
from bench.serving.proxy_overhead import DIRECT, IMAGE_BYTES
from bench.serving.router_processes import CpuCost, Server, ServingRig
from mmrouter_cli.local.envoy import GATEWAY_PORT, PICKER_PORT, envoy_config, find_envoy
from mmrouter_cli.local.folders import LocalError

ROUNDS = 4
CONNECTIONS = (1, 64)
COUNTS = {"2 kB": (200, 20), "1.4 MB": (20, 2)}
"""Requests per round and target on each connection, with one connection and with many."""
REPEATS = 5
"""Of the load generator's prompt: a body of 2 kB."""
FRONTEND_MODE, ENGINES, FRONTENDS = "frontend", "endpointPicker", "frontendPicker"
ROUTER, ENVOY = "router", "Envoy"
LATENCIES: Final = ((0.5, "p50"), (0.99, "p99"))


class Envoy(Server):
    """Envoy in front of one router's picker, as ``mmrouter up --gateway envoy`` configures it."""

    def __init__(self, host: str, picker: str) -> None:
        """``picker``: the router's address. Raises ``LocalError`` without Envoy."""
        program = find_envoy()
        self._config = Path(tempfile.mkdtemp(prefix="mmrouter-bench-"))
        config = envoy_config((host, GATEWAY_PORT), [(picker, PICKER_PORT)], admin=self._config / "a.sock", tls=True)
        (self._config / "envoy.json").write_text(json.dumps(config))
        options = ("--log-level", "error", "--concurrency", "1", "--disable-hot-restart")
        super().__init__("envoy", [program, "-c", str(self._config / "envoy.json"), *options], host, GATEWAY_PORT)

    def __exit__(self, *details: object) -> None:
        super().__exit__(*details)
        shutil.rmtree(self._config)


@dataclass(frozen=True, slots=True)
class Target:
    """Where clients connect, and the processes that their requests pass."""

    server: Server
    processes: Mapping[str, Process] = field(default_factory=dict)


@dataclass
class Figures:
    """Measurements of one target with one kind of request: microseconds of answers, and CPU by process."""

    us: list[float] = field(default_factory=list)
    cpu: defaultdict[str, CpuCost] = field(default_factory=lambda: defaultdict(CpuCost))

    @property
    def cpu_us(self) -> float:
        return sum(cost.us for cost in self.cpu.values())


Load = tuple[str, int]
"""Size of a body, and number of connections."""


def run() -> list[Row]:
    with ServingRig() as rig:
        try:
            targets = _targets(rig)
        except LocalError as error:
            return [not_run("picker", "us", str(error))]
        return rows(measure(rig.load_generator(), targets))


def _targets(rig: ServingRig) -> dict[str, Target]:
    """Start a router with each picker and an Envoy before it. The first router's client port is the frontend."""
    targets = {DIRECT: Target(rig.engine)}
    for number, mode in enumerate((ENGINES, FRONTENDS)):
        host = address(900 + number) if number else FRONTEND
        router = rig.start(rig.ours(host, policy="kv", mode=mode))
        envoy = rig.start(Envoy(address(910 + number), host))
        targets.setdefault(FRONTEND_MODE, Target(router, {ROUTER: router}))
        targets[mode] = Target(envoy, {ROUTER: router, ENVOY: envoy})
    return targets


def measure(load: Child, targets: Mapping[str, Target]) -> dict[Load, dict[str, Figures]]:
    image = "data:image/png;base64," + base64.b64encode(padded_png(IMAGE_BYTES)).decode()
    shapes: dict[str, dict[str, Any]] = {"2 kB": {"repeats": REPEATS}, "1.4 MB": {"image": image}}
    figures = {(size, many): {name: Figures() for name in targets} for size in shapes for many in CONNECTIONS}
    for _ in range(ROUNDS):
        for (size, many), by_target in figures.items():
            count = COUNTS[size][CONNECTIONS.index(many)]
            for name, target in targets.items():
                before = {part: process.cpu() for part, process in target.processes.items()}
                answer = load.call("plain", **target.server.address, connections=many, count=count, **shapes[size])
                by_target[name].us += answer["us"]
                for part, process in target.processes.items():
                    cost = by_target[name].cpu[part]
                    cost.cpu, cost.count = cost.cpu + process.cpu() - before[part], cost.count + many * count
    return figures


def rows(figures: Mapping[Load, Mapping[str, Figures]]) -> list[Row]:
    result: list[Row] = []
    for (size, many), by_target in figures.items():
        load = f"picker, {size}, {many} connection{'s' if many > 1 else ''}"
        for mode in (ENGINES, FRONTENDS):
            result += _latencies(f"{load}, {mode}", by_target, mode)
            result += _cpu(f"{load}, {mode}", by_target, mode)
    return result


def _latencies(name: str, by_target: Mapping[str, Figures], mode: str) -> list[Row]:
    result = []
    for share, title in LATENCIES:
        floor = percentile(by_target[DIRECT].us, share)
        added, base = (percentile(by_target[each].us, share) - floor for each in (mode, FRONTEND_MODE))
        result.append(row(f"{name}: added {title}", added, "us"))
        result.append(_over(f"{name}: added {title}, over the frontend", added, base))
    return result


def _cpu(name: str, by_target: Mapping[str, Figures], mode: str) -> Sequence[Row]:
    parts = [row(f"{name}: CPU per request, {part}", cost.us, "us") for part, cost in by_target[mode].cpu.items()]
    ratio = f"{name}: CPU per request of both, over the frontend"
    return [*parts, _over(ratio, by_target[mode].cpu_us, by_target[FRONTEND_MODE].cpu_us)]


def _over(name: str, value: float, base: float) -> Row:
    """Return the ratio to the frontend's figure, which on a busy machine may be no more than noise."""
    if base <= 0:
        return not_run(name, "x", f"the frontend's figure is {base:.4g} us")
    return row(name, value / base, "x", peer=f"the frontend: {base:.4g} us")
