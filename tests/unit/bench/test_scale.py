"""The benchmark of large fleets counts what grows with engines, with routers, and with both."""

import pytest

from bench.cluster import scale
from bench.cluster.scale import Costs, Traffic

TRAFFIC = Traffic(requests=2.0, frames=40.0, blocks=300.0)


def test_more_routers_divide_placements_and_no_feed():
    feed_only, placing = Costs(10.0, 0.0, 0.0), Costs(0.0, 0.0, 500.0)
    assert feed_only.cores(TRAFFIC, 1000, 1) == feed_only.cores(TRAFFIC, 1000, 10) == pytest.approx(0.4)
    assert placing.cores(TRAFFIC, 1000, 10) == pytest.approx(placing.cores(TRAFFIC, 1000, 1) / 10)


def test_one_router_applies_no_load_of_others():
    costs = Costs(0.0, 5.0, 0.0)
    assert costs.cores(TRAFFIC, 1000, 1) == 0
    assert costs.cores(TRAFFIC, 1000, 2) == pytest.approx(1000 * 2.0 * scale.CHANGES * 5.0 / 1e6)


def test_every_frame_is_applied_in_order(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scale, "FRAMES", 300)
    monkeypatch.setattr(scale, "QUERIES", 2)
    costs = scale.applied(5, 4)
    assert min(costs.frame, costs.load, costs.placement) > 0
    seqs = [7, 0, 3]
    sent = scale.frames(seqs, 4)
    for worker, first in enumerate(seqs):
        numbers = [scale.feed.decode_published(payload).seq for each, payload in sent if each == worker]
        assert numbers == list(range(first + 1, first + 1 + len(numbers)))


def test_a_busy_engine_has_requests_and_stores_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scale, "SECONDS", 5.0)
    traffic = scale.simulated_traffic()
    assert traffic.requests > 0
    assert traffic.blocks > traffic.requests
