"""Cost of a second router: CPU per request of two processes against one, and the effect on clients' latency.

The two are those of two frontend pods: each follows every feed and tells the other what it has in flight. The same
clients query a third one without a peer, or both, half of them each; the two ways take turns. What routers lose because
they learn late or never of each other's requests is simulated (:mod:`bench.cluster.multiple_routers`).
"""

from bench.cluster import multiple_routers
from bench.feed.fake_sidecars import FRONTEND, address
from bench.measured_process import Child
from bench.rows import Row, row
from bench.serving.router_processes import CpuCost, Process, ServingRig

ROUNDS = 6
CONNECTIONS = 32
PLAIN = 40
"""Requests per connection and round."""
PAIR = (FRONTEND, address(900))
GOAL = "<= 1.1"


def run() -> list[Row]:
    """Measure the processes and simulate the loss."""
    with ServingRig() as rig:
        alone = rig.enter_context(rig.ours(address(901), policy="kv"))
        pair: list[Process] = [rig.enter_context(rig.ours(host, policy="kv", peers=PAIR)) for host in PAIR]
        for router in (alone, *pair):
            router.wait()
        figures = rows(*measure([rig.load_generator() for _ in pair], alone, pair))
    return [*figures, *multiple_routers.rows()]


def measure(loads: list[Child], alone: Process, pair: list[Process]) -> tuple[CpuCost, CpuCost]:
    """Return the CPU of one process and of two; the first round only fills caches."""
    one, two = CpuCost(), CpuCost()
    for number in range(ROUNDS + 1):
        turns = [(one, [alone]), (two, pair)]
        for figure, routers in turns if number % 2 else reversed(turns):
            before = sum(router.cpu() for router in routers)
            for load, router in zip(loads, routers * (len(loads) // len(routers)), strict=True):
                load.begin("plain", **router.address, connections=CONNECTIONS // len(loads), count=PLAIN)
            for load in loads:
                load.result()
            if number:
                figure.add(sum(router.cpu() for router in routers) - before, CONNECTIONS * PLAIN)
    return one, two


def rows(one: CpuCost, two: CpuCost) -> list[Row]:
    """Return both figures and their ratio."""
    name = f"router replicas, {CONNECTIONS} connections: CPU per request"
    peer = f"1 process: {one.us:.4g} us"
    return [
        row(f"{name}, 2 processes", two.us, "us"),
        row(f"{name}, 2 processes over 1", two.us / one.us, "x", peer=peer, goal=GOAL),
    ]
