"""What one client's large requests do to others: gaps between tokens of paced streams, short chats and health checks
(docs/performance.md, *stall*). All targets take turns beside every kind of neighbour.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from bench.child_process import Child
from bench.report import Row, not_run, percentile, row
from bench.serving.load_generator import KEY
from bench.serving.proxy_overhead import DIRECT, OURS
from bench.serving.router_processes import Server, ServingRig
from bench.serving.stall_clients import NEIGHBOUR

STREAMS, PAUSE_MS = 32, 10
ROUNDS, SECONDS = 2, 4.0
NEIGHBOURS = {
    "none": "no neighbour",
    "prompts": "new prompts of 32k tokens",
    "pictures": "pictures of 10 MB",
    "parts": "bodies of 300k parts",
    "connections": "64 new connections a second",
}
ADDED_MS = "<= 2"
MEASURES = {"gap": "token gap", "chat": "short chat", "health": "GET /health"}
Times = Mapping[str, Mapping[str, Sequence[float]]]
"""Microseconds by measure, of each target."""


def run() -> list[Row]:
    with ServingRig() as rig:
        ours = rig.start(rig.ours(policy="kv", api_keys=(KEY, NEIGHBOUR)))
        targets = {DIRECT: rig.engine, OURS: ours, **rig.started_rust_routers()}
        clients, neighbour = stall_clients(rig)
        by_kind: dict[str, dict[str, dict[str, list[float]]]] = {kind: {} for kind in NEIGHBOURS}
        for _ in range(ROUNDS):
            for kind in NEIGHBOURS:
                for name, target in targets.items():
                    into = by_kind[kind].setdefault(name, defaultdict(list))
                    for measure, times in beside(clients, neighbour, target, kind, SECONDS).items():
                        into[measure] += times
        return [row for kind, times in by_kind.items() for row in rows(NEIGHBOURS[kind], times, rig.missing)]


def stall_clients(rig: ServingRig) -> tuple[Child, Child]:
    """Return the process of the timed clients and that of the neighbour; they end with the rig."""
    first, second = (rig.enter_context(Child.module("bench.serving.stall_clients")) for _ in range(2))
    return first, second


def beside(clients: Child, neighbour: Child, target: Server, kind: str, seconds: float) -> dict[str, list[float]]:
    """Return the microseconds by measure that clients of a target have beside a neighbour."""
    neighbour.begin("disturb", **target.address, kind=kind, seconds=seconds)
    times = clients.call("gaps", **target.address, streams=STREAMS, pause_ms=PAUSE_MS, seconds=seconds)
    if not neighbour.result()["us"] and kind != "none":
        raise ValueError(f"no request of the neighbour ({kind}) was answered")
    return times


def rows(neighbour: str, times: Times, missing: Sequence[str]) -> list[Row]:
    """Return the rows of one kind of neighbour: each measure over that of the engine without a router."""
    result: list[Row] = []
    for measure, label in MEASURES.items():
        slow = {target: percentile(each[measure], 0.99) / 1000 for target, each in times.items()}
        others = [f"{target}: {ms:.4g} ms" for target, ms in slow.items() if target != OURS]
        others += [f"not run: {reason}" for reason in missing]
        name, peer = f"stall, {neighbour}: {label}, p99", "; ".join(others)
        result.append(row(f"{name}, over the engine's own", slow[OURS] / slow[DIRECT], "x", peer=peer))
        if measure == "gap":
            result.append(row(f"{name}, added", slow[OURS] - slow[DIRECT], "ms", peer=peer, goal=ADDED_MS))
            peers = [ms for target, ms in slow.items() if target not in (OURS, DIRECT)]
            best = f"{name}, over the better Rust router"
            if peers:
                result.append(row(best, slow[OURS] / min(peers), "x", peer=peer))
            else:
                result.append(not_run(best, "x", "; ".join(missing)))
    return result
