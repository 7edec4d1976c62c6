"""Several routers instead of one: CPU per request of two processes against one, and what it costs the clients' waiting.

The two are those of two frontend pods: each follows every feed, and tells the other one what it has under way. The same
clients ask a third one, which has no peer, or both, half of them each; both ways take turns. What routers lose because
they know of each other's work late or never is simulated (:mod:`bench.cluster.multiple_routers`).
"""

import sys
from contextlib import ExitStack
from dataclasses import dataclass

from bench.cluster import multiple_routers
from bench.command_child import Child
from bench.feed.fake_sidecars import FRONTEND, Curve, FeedEnds, address
from bench.rows import Row, row
from bench.serving.router_processes import Ours, Process

ROUNDS = 6
CONNECTIONS = 32
PLAIN = 40
"""Requests per connection and round."""
ENGINE_PORT = 8000
PAIR = (FRONTEND, address(900))
GOAL = "<= 1.1"


@dataclass
class Measured:
    """CPU seconds and requests."""

    cpu: float = 0.0
    requests: int = 0

    @property
    def us(self) -> float:
        """CPU microseconds per request."""
        return self.cpu / self.requests * 1e6


def run() -> list[Row]:
    """Measure both."""
    return [*processes(), *multiple_routers.rows()]


def processes() -> list[Row]:
    """Start two routers before one engine and ask them."""
    curve = Curve.fresh()
    with ExitStack() as stack:
        command = [sys.executable, "-m", "bench.serving.plain_engine", address(0), str(ENGINE_PORT)]
        stack.enter_context(Process("engine", command, address(0), ENGINE_PORT)).wait()
        stack.enter_context(FeedEnds(1, curve))
        alone = stack.enter_context(Ours(address(901), [address(0)], curve, policy="kv"))
        pair: list[Process] = [
            stack.enter_context(Ours(host, [address(0)], curve, policy="kv", peers=PAIR)) for host in PAIR
        ]
        loads = [
            stack.enter_context(Child("load generator", [sys.executable, "-m", "bench.serving.load_client"]))
            for _ in pair
        ]
        for router in (alone, *pair):
            router.wait()
        return rows(*measure(loads, alone, pair))


def measure(loads: list[Child], alone: Process, pair: list[Process]) -> tuple[Measured, Measured]:
    """Return what one process needed and what two did; the first round only fills caches."""
    one, two = Measured(), Measured()
    for number in range(ROUNDS + 1):
        seen = [(one, [alone]), (two, pair)]
        for measured, routers in seen if number % 2 else reversed(seen):
            before = sum(router.cpu() for router in routers)
            ask(loads, routers * (len(loads) // len(routers)))
            if number:
                measured.cpu += sum(router.cpu() for router in routers) - before
                measured.requests += CONNECTIONS * PLAIN
    return one, two


def ask(loads: list[Child], targets: list[Process]) -> None:
    """Have every load generator ask its router, all at once."""
    for load, target in zip(loads, targets, strict=True):
        load.begin("plains", host=target.host, port=target.port, connections=CONNECTIONS // len(loads), count=PLAIN)
    for load in loads:
        load.result()


def rows(one: Measured, two: Measured) -> list[Row]:
    """Return both and their ratio."""
    name = f"router replicas, {CONNECTIONS} connections: CPU per request"
    words = f"1 process: {one.us:.4g} us"
    return [
        row(f"{name}, 2 processes", two.us, "us"),
        row(f"{name}, 2 processes over 1", two.us / one.us, "x", peer=words, goal=GOAL),
    ]
