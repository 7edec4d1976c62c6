"""What the whole job costs: template, tokens, blocks, decision and forwarding, beside a Rust router that chooses an
engine by prefix and has the model's tokenizer (docs/performance.md, *job*). All targets take turns in every round.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from bench.child_process import Child
from bench.feed.fake_sidecars import FRONTEND
from bench.peer_routers import SMG, PeerMissingError
from bench.report import Row, percentile, row
from bench.serving.load_generator import Kind, requests_of
from bench.serving.proxy_overhead import DIRECT, OURS, TargetFigures, compare
from bench.serving.router_processes import MODEL, Server, ServingRig

ENGINES = 2
ROUNDS = 4
LABELS: Final[Mapping[Kind, str]] = {
    "1k": "1k new tokens",
    "8k": "8k new tokens",
    "conversation": "20 turns",
    "image": "new image of 1 MB",
}
COUNTS: Final[Mapping[int, Mapping[Kind, int]]] = {
    1: {"1k": 100, "8k": 50, "conversation": 5, "image": 50},
    64: {"1k": 6, "8k": 2, "conversation": 1, "image": 2},
}
"""Connections -> requests, or conversations, per connection, round and target."""
GOAL = "<= 0.8"
PEER_OPTIONS = ("--policy", "cache_aware", "--model-path", str(MODEL), "--tokenizer-cache-enable-l1")
LATENCIES = ((0.5, "p50", None), (0.99, "p99", GOAL))
"""Percentiles of added latency, with their names and goals."""


def run() -> list[Row]:
    with ServingRig(ENGINES) as rig:
        targets = {DIRECT: rig.engine, OURS: rig.start(rig.ours(FRONTEND, policy="kv"))}
        try:
            targets[str(SMG)] = rig.start(rig.rust_router(SMG, PEER_OPTIONS))
        except PeerMissingError as error:
            rig.missing.append(str(error))
        load = rig.load_generator()
        result: list[Row] = []
        for kind in LABELS:
            for connections in COUNTS:
                result += rows(kind, connections, measure(load, targets, kind, connections), rig.missing)
        return result


def measure(load: Child, targets: Mapping[str, Server], kind: Kind, connections: int) -> dict[str, TargetFigures]:
    figures = {name: TargetFigures() for name in targets}
    count = COUNTS[connections][kind]
    clients = connections * count
    for number in range(ROUNDS):
        # Every target receives the same requests, each once: a first number for each number of connections and round.
        first = (connections * ROUNDS + number) * clients
        for name, target in targets.items():
            with figures[name].cpu[kind].of(clients * requests_of(kind), target):
                answer = load.call(
                    "new", **target.address, kind=kind, connections=connections, count=count, first=first
                )
            figures[name].us += answer["us"]
    return figures


def rows(kind: Kind, connections: int, figures: Mapping[str, TargetFigures], missing: Sequence[str]) -> list[Row]:
    name = f"job, {LABELS[kind]}, {connections} connection{'s' if connections > 1 else ''}"
    routers = {target: each for target, each in figures.items() if target != DIRECT}
    cpu = {target: each.cpu[kind].us for target, each in routers.items()}
    result = compare(f"{name}: CPU per request", cpu, missing, GOAL)
    for share, label, goal in LATENCIES:
        floor = percentile(figures[DIRECT].us, share)
        added = {target: percentile(each.us, share) - floor for target, each in routers.items()}
        result += compare(f"{name}: added {label}", added, missing, goal)
    rates = {target: 1e6 / us for target, us in cpu.items() if us}  # no CPU time: less than a tick in a short run
    peers = "; ".join(f"{target}: {rate:.4g}" for target, rate in rates.items() if target != OURS)
    return [*result, row(f"{name}: requests per second and core", rates.get(OURS), "1/s", peer=peers or None)]
