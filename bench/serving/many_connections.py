"""Many clients at once: memory of a router with 2,000 idle streams and 500 that get a token every 50 ms.

Every stream must arrive complete, or the router has an error and no figure. The memory is the router process's largest
while all streams are open, against Rust routers.
"""

import resource
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from bench.measured_process import Child, ChildError
from bench.rows import Row, not_run, row
from bench.serving.router_processes import Process, ServingRig

IDLE, ACTIVE = 2000, 500
PAUSE_MS = 50
OPEN_FILES = 4 * (IDLE + ACTIVE)
SAMPLE_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class RouterUsage:
    """One router under the load: its largest memory in MiB, its CPU seconds, or its failure."""

    mib: float = 0.0
    cpu: float = 0.0
    error: str = ""


def run() -> list[Row]:
    """Measure all routers that can be run here, one after the other."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(OPEN_FILES, hard), hard))
    with ServingRig() as rig:
        usages = {"mmrouter": measure(rig.ours(policy="roundRobin"))}
        for peer in rig.rust_routers():
            usages[str(peer)] = measure(rig.rust_router(peer))
    return rows(usages, rig.missing)


def measure(target: Process) -> RouterUsage:
    """Put the load on a router and end it."""
    generator = "bench.serving.load_generator"
    with target, Child.module(generator) as idle, Child.module(generator) as active:
        target.wait()
        samples, done = [0.0], threading.Event()

        def sample_memory() -> None:
            while not done.wait(SAMPLE_SECONDS):
                samples.append(target.memory())

        sampler = threading.Thread(target=sample_memory)
        before = target.cpu()
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
        return RouterUsage(max(samples), target.cpu() - before)


def rows(usages: dict[str, RouterUsage], missing: Sequence[str]) -> list[Row]:
    """Return our figures, and our memory over that of the best peer without an error."""
    ours = usages["mmrouter"]
    name = f"connections, {IDLE:,} idle and {ACTIVE} active streams"
    failed = row(f"{name}: runs of ours with an error", float(bool(ours.error)), "", peer=ours.error, goal="<= 0")
    if ours.error:
        return [failed]
    peers = {peer: usage for peer, usage in usages.items() if peer != "mmrouter"}
    results = [f"{peer}: {usage.error or f'{usage.mib:.4g} MiB'}" for peer, usage in peers.items()]
    complete = [usage.mib for usage in peers.values() if not usage.error]
    figures = [failed, row(f"{name}: resident", ours.mib, "MiB"), row(f"{name}: CPU", ours.cpu, "s")]
    ratio = f"{name}: resident, over the better Rust router"
    if not complete:
        return [*figures, not_run(ratio, "x", "; ".join([*results, *missing]), goal="<= 1.5")]
    results += [f"not run: {reason}" for reason in missing]
    return [*figures, row(ratio, ours.mib / min(complete), "x", peer="; ".join(results), goal="<= 1.5")]
