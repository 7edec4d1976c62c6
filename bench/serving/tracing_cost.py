"""What spans cost: CPU per plain request of a router that traces nothing, the operator's share, or every request
(docs/performance.md, *tracing*). All take turns in every round.
"""

from collections.abc import Mapping

from bench.feed.fake_sidecars import FRONTEND, address
from bench.report import Row, row
from bench.serving.router_processes import CpuCost, ServingRig
from mmrouter_operator.render.frontend import TRACED_SHARE

ROUNDS, REQUESTS = 6, 400
OFF, SHARE, ALL = "none", f"a share of {TRACED_SHARE}", "every request"
SHARES = {OFF: "", SHARE: TRACED_SHARE, ALL: "1"}
GOAL = "<= 1.3"


def run() -> list[Row]:
    with ServingRig() as rig:
        hosts = (FRONTEND, address(900), address(901))
        targets = {
            name: rig.start(rig.ours(host, policy="roundRobin", traced_share=share))
            for host, (name, share) in zip(hosts, SHARES.items(), strict=True)
        }
        load, costs = rig.load_generator(), {name: CpuCost() for name in targets}
        for _ in range(ROUNDS):
            for name, target in targets.items():
                with costs[name].of(REQUESTS, target):
                    load.call("plain", **target.address, count=REQUESTS)
        return rows(costs)


def rows(costs: Mapping[str, CpuCost]) -> list[Row]:
    """Return the rows of each share of traced requests, as a ratio to none; the goal is that of the operator's."""
    base = costs[OFF].us
    result = [row(f"tracing {OFF}: CPU per request", base, "us")]
    for name in (SHARE, ALL):
        result.append(row(f"tracing {name}: CPU per request", costs[name].us, "us"))
        over = row(f"tracing {name}: CPU, over {OFF}", costs[name].us / base, "x", goal=GOAL if name == SHARE else None)
        result.append(over)
    return result
