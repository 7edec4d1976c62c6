"""Memory of a router process with many clients at once, and CPU of a second one (docs/performance.md, *connections* and
*replicas*).
"""

import resource
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from bench.child_process import Child, ChildError
from bench.cluster import multiple_routers
from bench.feed.fake_sidecars import FRONTEND, address
from bench.report import Row, not_run, row
from bench.serving.router_processes import CpuCost, Server, ServingRig

IDLE, ACTIVE = 2000, 500
PAUSE_MS = 50
OPEN_FILES = 4 * (IDLE + ACTIVE)
SAMPLE_SECONDS = 0.25
ROUNDS = 6
CONNECTIONS = 32
PLAIN = 40
"""Requests per connection and round."""
PAIR = (FRONTEND, address(900))


@dataclass(frozen=True, slots=True)
class RouterUsage:
    """One router under the load of many clients: its largest memory in MiB, or its failure."""

    mib: float = 0.0
    error: str = ""


def connections() -> list[Row]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(OPEN_FILES, hard), hard))
    with ServingRig() as rig:
        usages = {"mmrouter": _usage(rig.ours(policy="roundRobin"))}
        for peer in rig.rust_routers():
            usages[str(peer)] = _usage(rig.rust_router(peer))
    return connection_rows(usages, rig.missing)


def _usage(target: Server) -> RouterUsage:
    generator = "bench.serving.load_generator"
    with target, Child.module(generator) as idle, Child.module(generator) as active:
        target.wait()
        samples, done = [0.0], threading.Event()

        def sample_memory() -> None:
            while not done.wait(SAMPLE_SECONDS):
                samples.append(target.resident() / 2**20)

        sampler = threading.Thread(target=sample_memory)
        try:
            idle.call("idle", **target.address, connections=IDLE)
            sampler.start()
            active.call("streams", **target.address, connections=ACTIVE, count=1, pause_ms=PAUSE_MS)
        except ChildError as error:
            return RouterUsage(error=str(error))
        finally:
            done.set()
            if sampler.is_alive():
                sampler.join()
        return RouterUsage(max(samples))


def connection_rows(usages: dict[str, RouterUsage], missing: Sequence[str]) -> list[Row]:
    """Return our figures, and our memory over that of the best peer without an error."""
    ours = usages["mmrouter"]
    name = f"connections, {IDLE:,} idle and {ACTIVE} active streams"
    failed = row(f"{name}: runs of ours with an error", float(bool(ours.error)), "", peer=ours.error, goal="<= 0")
    if ours.error:
        return [failed]
    peers = {peer: usage for peer, usage in usages.items() if peer != "mmrouter"}
    results = [f"{peer}: {usage.error or f'{usage.mib:.4g} MiB'}" for peer, usage in peers.items()]
    complete = [usage.mib for usage in peers.values() if not usage.error]
    figures = [failed, row(f"{name}: resident", ours.mib, "MiB")]
    ratio = f"{name}: resident, over the better Rust router"
    if not complete:
        return [*figures, not_run(ratio, "x", "; ".join([*results, *missing]), goal="<= 1.5")]
    results += [f"not run: {reason}" for reason in missing]
    return [*figures, row(ratio, ours.mib / min(complete), "x", peer="; ".join(results), goal="<= 1.5")]


def replicas() -> list[Row]:
    with ServingRig() as rig:
        alone = rig.enter_context(rig.ours(address(901), policy="kv"))
        pair: list[Server] = [rig.enter_context(rig.ours(host, policy="kv", peers=PAIR)) for host in PAIR]
        for router in (alone, *pair):
            router.wait()
        figures = replica_rows(*_replica_costs([rig.load_generator() for _ in pair], alone, pair))
    return [*figures, *multiple_routers.rows()]


def _replica_costs(loads: list[Child], alone: Server, pair: list[Server]) -> tuple[CpuCost, CpuCost]:
    """Return the CPU of one process and of two; the first round only fills caches."""
    single, double = CpuCost(), CpuCost()
    for number in range(ROUNDS + 1):
        turns = [(single, [alone]), (double, pair)]
        for figure, routers in turns if number % 2 else reversed(turns):
            with (figure if number else CpuCost()).of(CONNECTIONS * PLAIN, *routers):
                for load, router in zip(loads, routers * (len(loads) // len(routers)), strict=True):
                    load.begin("plain", **router.address, connections=CONNECTIONS // len(loads), count=PLAIN)
                for load in loads:
                    load.result()
    return single, double


def replica_rows(single: CpuCost, double: CpuCost) -> list[Row]:
    name = f"router replicas, {CONNECTIONS} connections: CPU per request"
    peer = f"1 process: {single.us:.4g} us"
    return [
        row(f"{name}, 2 processes", double.us, "us"),
        row(f"{name}, 2 processes over 1", double.us / single.us, "x", peer=peer, goal="<= 1.1"),
    ]
