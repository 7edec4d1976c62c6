"""What the whole job costs: template, tokens, blocks, decision and forwarding, beside Dynamo's frontend and smg
(docs/performance.md, *job*). All targets take turns in every round.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from bench.child_process import Child, Process
from bench.feed.fake_sidecars import FRONTEND
from bench.peer_routers import DYNAMO_FRONTEND, SMG, PeerMissingError, ensure
from bench.report import Row, not_run, percentile, row
from bench.serving.load_generator import ANSWER, Kind, requests_of
from bench.serving.proxy_overhead import DIRECT, OURS, TargetFigures
from bench.serving.router_processes import MODEL, Server, ServingRig, free_port

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
SMG_OPTIONS = ("--policy", "cache_aware", "--model-path", str(MODEL), "--tokenizer-cache-enable-l1")
LATENCIES = ((0.5, "p50", None), (0.99, "p99", GOAL))
"""Percentiles of added latency, with their names and goals."""


def run() -> list[Row]:
    with ServingRig(ENGINES) as rig:
        targets = {DIRECT: rig.engine, OURS: rig.start(rig.ours(FRONTEND, policy="kv"))}
        for peer, start in ((SMG, _smg), (DYNAMO_FRONTEND, _dynamo)):
            try:
                targets[str(peer)] = start(rig)
            except PeerMissingError as error:
                rig.missing.append(str(error))
        load = rig.load_generator()
        result: list[Row] = []
        for kind in LABELS:
            for connections in COUNTS:
                result += rows(kind, connections, measure(load, targets, kind, connections), rig.missing)
        return result


def _smg(rig: ServingRig) -> Server:
    return rig.start(rig.rust_router(SMG, SMG_OPTIONS))


def _dynamo(rig: ServingRig) -> Server:
    """Start Dynamo's frontend with engines of its own protocol. Raises :class:`PeerMissingError`."""
    python, port = str(ensure(DYNAMO_FRONTEND) / "python"), free_port()
    store = rig.enter_context(TemporaryDirectory(prefix="mmrouter-bench-"))
    environment = {"DYN_FILE_KV": store, "DYN_LOG": "error"}
    worker = str(Path(__file__).with_name("dynamo_worker.py"))
    for _ in range(ENGINES):
        rig.enter_context(Process("Dynamo's engine", [python, "-P", worker, str(MODEL), ANSWER], environment))
    options = [
        *("--http-host", "127.0.0.1", "--http-port", str(port)),
        *("--router-mode", "kv", "--discovery-backend", "file", "--event-plane", "zmq"),
    ]
    command = [python, "-P", "-m", "dynamo.frontend", *options]
    return rig.start(Server(str(DYNAMO_FRONTEND), command, "127.0.0.1", port, environment))


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
    result = _compare(f"{name}: CPU per request", cpu, missing, GOAL)
    for share, label, goal in LATENCIES:
        floor = percentile(figures[DIRECT].us, share)
        added = {target: percentile(each.us, share) - floor for target, each in routers.items()}
        result += _compare(f"{name}: added {label}", added, missing, goal)
    rates = {target: 1e6 / us for target, us in cpu.items() if us}  # no CPU time: less than a tick in a short run
    peers = "; ".join(f"{target}: {rate:.4g}" for target, rate in rates.items() if target != OURS)
    return [*result, row(f"{name}: requests per second and core", rates.get(OURS), "1/s", peer=peers or None)]


def _compare(name: str, us: Mapping[str, float], missing: Sequence[str], goal: str | None) -> list[Row]:
    """Return our figure, beside those of all peers, and its ratio to Dynamo's, which does the whole job."""
    peers = "; ".join(f"{target}: {value:.4g} us" for target, value in us.items() if target != OURS)
    ours = row(name, us[OURS], "us", peer=peers or None)
    ratio, base = f"{name}, over Dynamo's frontend", us.get(str(DYNAMO_FRONTEND))
    if base is None:
        return [ours, not_run(ratio, "x", "; ".join(missing), goal=goal)]
    if base <= 0:  # of a short run: CPU time below a tick, or an added latency within the noise
        return [ours, not_run(ratio, "x", f"the peer's figure is {base:.4g} us", goal=goal)]
    return [ours, row(ratio, us[OURS] / base, "x", goal=goal)]
