"""What a router process adds: latency of a plain answer, and CPU per streamed token, against Rust routers.

The mmrouter process is the one of a frontend pod, with feeds from sidecars and the full request path including template
and tokenizer; its policy is round robin, as that of the peers. Engine and client are processes of their own. All
targets take turns in every round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.measured_process import Child
from bench.rows import Row, not_run, percentile, row
from bench.serving.router_processes import CpuCost, Process, ServingRig

ROUNDS = 4
PLAIN = 250
"""Requests per round and target, one after the other on one connection."""
CONNECTIONS = 64
PAUSE_MS = 10
PACED, BURST = 4, 12
"""Streams per connection, round and target."""
LATENCIES = ((0.5, "p50", "<= 0.6"), (0.99, "p99", "<= 1.0"))
"""Percentiles of added latency, with their names and goals."""
DIRECT, OURS = "direct", "mmrouter"


@dataclass
class TargetFigures:
    """Measurements of one target: microseconds of plain answers, paced streams, and streams at full speed."""

    us: list[float] = field(default_factory=list)
    paced: CpuCost = field(default_factory=CpuCost)
    burst: CpuCost = field(default_factory=CpuCost)


def run() -> list[Row]:
    """Measure all routers that can be run here."""
    with ServingRig() as rig:
        targets = {DIRECT: rig.engine, OURS: rig.start(rig.ours(policy="roundRobin"))}
        targets |= {str(peer): rig.start(rig.rust_router(peer)) for peer in rig.rust_routers()}
        figures = measure(rig.load_generator(), targets)
    return rows(figures, rig.missing)


def measure(load: Child, targets: Mapping[str, Process]) -> dict[str, TargetFigures]:
    """Let every target take its turn in every round."""
    figures = {name: TargetFigures() for name in targets}
    for _ in range(ROUNDS):
        for name, target in targets.items():
            figures[name].us += load.call("plain", **target.address, count=PLAIN)["us"]
        for name, target in targets.items():
            if name != DIRECT:
                stream(figures[name].paced, load, target, PACED)
                stream(figures[name].burst, load, target, BURST, None)
    return figures


def stream(
    cost: CpuCost, load: Child, target: Process, count: int, pause_ms: int | None = PAUSE_MS, repeats: int = 1
) -> None:
    """Add the cost of ``count`` streams on each of :data:`CONNECTIONS` connections."""
    before = target.cpu()
    shape = {"connections": CONNECTIONS, "count": count, "pause_ms": pause_ms, "repeats": repeats}
    tokens = load.call("streams", **target.address, **shape)["tokens"]
    cost.add(target.cpu() - before, tokens)


def rows(figures: dict[str, TargetFigures], missing: Sequence[str]) -> list[Row]:
    """Return our figures, and their ratios to the better peer."""
    result = latency_rows({name: each.us for name, each in figures.items()}, "1 connection", missing)
    for name, field_name, bound in ((f"paced {PAUSE_MS} ms", "paced", "<= 1.0"), ("burst", "burst", None)):
        us = {target: getattr(each, field_name).us for target, each in figures.items() if target != DIRECT}
        result += compare(f"proxy, {name}, {CONNECTIONS} connections: CPU per token", us, missing, bound)
    return result


def latency_rows(us: Mapping[str, Sequence[float]], connections: str, missing: Sequence[str]) -> list[Row]:
    """Return the latency that routers add to that of the engine alone; ``us`` by target."""
    result: list[Row] = []
    for share, name, goal in LATENCIES:
        floor = percentile(us[DIRECT], share)
        added = {target: percentile(values, share) - floor for target, values in us.items() if target != DIRECT}
        result += compare(f"proxy, plain JSON, {connections}: added {name}", added, missing, goal)
    return result


def compare(name: str, us: Mapping[str, float], missing: Sequence[str], goal: str | None) -> list[Row]:
    """Return our figure of microseconds and its ratio to the least of the peers'."""
    peers = {target: value for target, value in us.items() if target != OURS}
    ours = row(name, us[OURS], "us")
    ratio = f"{name}, over the better Rust router"
    if not peers:
        return [ours, not_run(ratio, "x", "; ".join(missing), goal=goal)]
    results = [f"{target}: {value:.4g} us" for target, value in peers.items()]
    results += [f"not run: {reason}" for reason in missing]
    return [ours, row(ratio, us[OURS] / min(peers.values()), "x", peer="; ".join(results), goal=goal)]
