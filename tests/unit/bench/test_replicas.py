"""Several routers: what two processes need over one, and what routers lose that know only their own work."""

from dataclasses import replace

import pytest

from bench.cluster import multiple_routers
from bench.cluster.multiple_routers import Routers, spread, summary
from bench.cluster.policy_comparison import Case, Outcome
from bench.cluster.simulation import simulate
from bench.cluster.virtual_engine import Machine
from bench.cluster.workloads import servegen
from bench.serving.router_replicas import Measured, rows

CASE = Case("servegen sessions", 2, 0.5)


@pytest.fixture(scope="module")
def load():
    return servegen(True, 2, 0.6, 6.0, Machine())


def run(load, routers, delay=None):
    policy = Routers(routers, 2, load.block_size, delay)
    done = simulate(load, 2, Machine(), policy, watch=policy.watch if delay is not None else None)
    return policy, done


def test_every_request_is_one_routers_and_every_router_has_the_same_index_in_the_end(load):
    policy, _ = run(load, 3)
    assert not policy._took
    assert all(not usage.requests for router in policy.routers for w in router.workers for usage in w.usage.values())
    for engine in range(2):
        assert policy.routers[0].holds(engine) == policy.routers[1].holds(engine) == policy.routers[2].holds(engine)


def test_one_router_loses_nothing_whether_it_hears_of_itself_or_not(load):
    assert run(load, 1)[1].chosen == run(load, 1, 0.01)[1].chosen


def test_what_is_heard_of_others_counts_while_one_chooses_and_not_beside_it(load):
    policy, heard = run(load, 2, 0.0)
    assert heard.chosen != run(load, 2)[1].chosen
    for router in policy.routers:
        assert all(abs(usage.active) < 1e-6 for worker in router.workers for usage in worker.usage.values())


def test_requests_of_one_time_are_spread_to_the_next_time_in_their_order(load):
    asks = tuple(replace(ask, at=float(n // 4)) for n, ask in enumerate(load.asks[:8]))
    moved = spread(replace(load, asks=asks)).asks
    assert [ask.at for ask in moved] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]
    assert [ask.tokens for ask in moved] == [ask.tokens for ask in asks]


def test_the_loss_is_over_one_router_in_the_same_case():
    found = {
        (CASE, (1, None)): Outcome(100, 200, 0.5),
        (CASE, (2, None)): Outcome(100, 260, 0.4),
        (CASE, (2, multiple_routers.HEARD)): Outcome(100, 202, 0.5),
    }
    told = {item.name: item for item in summary(found)}
    name = "2 routers before 2 engines"
    lost = told[f"{name}, if each knew of its own requests only: TTFT p95 over 1 router, mean"]
    assert (lost.value, lost.met) == (1.3, None)
    heard = told[f"{name}: TTFT p95 over 1 router, mean"]
    assert (heard.value, heard.met) == (1.01, True)
    assert told[f"{name}, if each knew of its own requests only: hits over 1 router's, mean"].value == 0.8


def test_cpu_per_request_is_over_that_of_one_process():
    found = rows(Measured(1.0, 1000), Measured(1.2, 1000))
    assert [(item.value, item.met) for item in found] == [(1200.0, None), (1.2, False)]
