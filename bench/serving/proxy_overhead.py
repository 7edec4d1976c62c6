"""What a router process adds: latency of plain answers, and CPU per streamed token or request, against Rust routers
(docs/performance.md, *proxy* and *requests*). All targets take turns in every round.
"""

import base64
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.child_process import Child
from bench.feed.fake_sidecars import address
from bench.peer_routers import SMG
from bench.placing.workload import padded_png
from bench.report import Row, not_run, percentile, row
from bench.serving.minimal_engine import TOKENS
from bench.serving.router_processes import CpuCost, Server, ServingRig

ROUNDS = 4
PLAIN, PLAIN_AT_ONCE = 250, 40
"""Plain requests per round and target, one after the other on each connection: on one, and on all."""
CONNECTIONS = 64
PAUSE_MS = 10
PACED = 4
"""Streams per connection, round and target."""
IMAGES, IMAGE_CONNECTIONS = 25, 4
IMAGE_BYTES = 1_050_000
"""1.4 MB as base64."""
NEW = 6
"""New prompts per connection and round."""
REPEATS = 11
"""Of the load generator's prompt: a thousand tokens of the benchmark's tokenizer."""
LATENCIES = ((0.5, "p50", "<= 0.6"), (0.99, "p99", "<= 1.0"))
"""Percentiles of added latency, with their names and goals."""
DIRECT, OURS, KV = "direct", "mmrouter", "mmrouter, policy kv"


@dataclass
class TargetFigures:
    """Measurements of one target: microseconds of plain answers, and CPU by kind of request."""

    us: list[float] = field(default_factory=list)
    cpu: defaultdict[str, CpuCost] = field(default_factory=lambda: defaultdict(CpuCost))


def run() -> list[Row]:
    with ServingRig() as rig:
        targets = {DIRECT: rig.engine, OURS: rig.start(rig.ours(policy="roundRobin")), **rig.started_rust_routers()}
        return rows(measure(rig.load_generator(), targets), rig.missing)


def run_large() -> list[Row]:
    with ServingRig() as rig:
        ours = {OURS: rig.start(rig.ours(policy="roundRobin")), KV: rig.start(rig.ours(address(900), policy="kv"))}
        targets = {DIRECT: rig.engine, **ours, **rig.started_rust_routers()}
        return large_rows(measure_large(rig.load_generator(), targets), rig.missing)


def measure(load: Child, targets: Mapping[str, Server]) -> dict[str, TargetFigures]:
    figures = {name: TargetFigures() for name in targets}
    for _ in range(ROUNDS):
        for name, target in targets.items():
            figures[name].us += load.call("plain", **target.address, count=PLAIN)["us"]
        for name, target in targets.items():
            if name != DIRECT:
                stream(figures[name].cpu["paced"], load, target)
    return figures


def measure_large(load: Child, targets: Mapping[str, Server]) -> dict[str, TargetFigures]:
    figures = {name: TargetFigures() for name in targets}
    image = "data:image/png;base64," + base64.b64encode(padded_png(IMAGE_BYTES)).decode()
    for number in range(ROUNDS):
        for name, target in targets.items():
            if name != KV:
                answer = load.call("plain", **target.address, connections=CONNECTIONS, count=PLAIN_AT_ONCE)
                figures[name].us += answer["us"]
        for name in (OURS, KV):
            stream(figures[name].cpu["short"], load, targets[name])
            stream(figures[name].cpu["long"], load, targets[name], repeats=REPEATS)
            shape = {"connections": CONNECTIONS, "count": NEW, "first": number * CONNECTIONS * NEW}
            with figures[name].cpu["new"].of(CONNECTIONS * NEW, targets[name]):
                load.call("new", **targets[name].address, kind="1k", **shape)
        for name, target in targets.items():
            if name != DIRECT:
                with figures[name].cpu["images"].of(IMAGE_CONNECTIONS * IMAGES, target):
                    load.call("plain", **target.address, connections=IMAGE_CONNECTIONS, count=IMAGES, image=image)
    return figures


def stream(cost: CpuCost, load: Child, target: Server, repeats: int = 1) -> None:
    """Add the cost of :data:`PACED` streams on each of :data:`CONNECTIONS` connections."""
    shape = {"connections": CONNECTIONS, "count": PACED, "pause_ms": PAUSE_MS, "repeats": repeats}
    with cost.of(CONNECTIONS * PACED * TOKENS, target):
        load.call("streams", **target.address, **shape)  # raises where tokens are missing


def rows(figures: Mapping[str, TargetFigures], missing: Sequence[str]) -> list[Row]:
    result = latency_rows(figures, "1 connection", missing)
    us = {target: each.cpu["paced"].us for target, each in figures.items() if target != DIRECT}
    name = f"proxy, paced {PAUSE_MS} ms, {CONNECTIONS} connections: CPU per token"
    return result + compare(name, us, missing, "<= 1.0")


def large_rows(figures: Mapping[str, TargetFigures], missing: Sequence[str]) -> list[Row]:
    latencies = {name: each for name, each in figures.items() if name != KV}
    result = latency_rows(latencies, f"{CONNECTIONS} connections", missing)
    base = figures[OURS].cpu["short"].us
    peer = f"the same process, policy roundRobin, short prompt: {base:.4g} us"
    for prompt, kind, goal in (("short prompt", "short", None), ("1k-token prompt", "long", "<= 1.3")):
        name = f"proxy, paced {PAUSE_MS} ms, {CONNECTIONS} connections: CPU per token, policy kv, {prompt}"
        us = figures[KV].cpu[kind].us
        result += [row(name, us, "us"), row(f"{name}, over roundRobin", us / base, "x", peer=peer, goal=goal)]
    for policy, each in (("roundRobin", OURS), ("kv", KV)):
        name = f"proxy, new 1k-token prompts, {CONNECTIONS} connections: requests per second and core, policy {policy}"
        result.append(row(name, 1e6 / figures[each].cpu["new"].us, "1/s"))
    smg = next((name for name in figures if name.startswith(SMG.package)), None)
    for ours, policy, bound in ((OURS, "roundRobin", "<= 1.0"), (KV, "kv", "<= 1.8")):
        name = f"proxy, 1.4 MB image, {IMAGE_CONNECTIONS} connections: CPU per request, policy {policy}"
        us = figures[ours].cpu["images"].us
        result.append(row(name, us, "us"))
        if smg is None:
            result.append(not_run(f"{name}, over smg", "x", "; ".join(missing), goal=bound))
            continue
        theirs = figures[smg].cpu["images"].us
        peer = f"{smg}: {theirs:.4g} us, without looking at the image"
        result.append(row(f"{name}, over smg", us / theirs, "x", peer=peer, goal=bound))
    return result


def latency_rows(figures: Mapping[str, TargetFigures], connections: str, missing: Sequence[str]) -> list[Row]:
    result: list[Row] = []
    for share, name, goal in LATENCIES:
        floor = percentile(figures[DIRECT].us, share)
        added = {target: percentile(each.us, share) - floor for target, each in figures.items() if target != DIRECT}
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
