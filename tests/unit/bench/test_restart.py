"""A restarted router is exact when it holds what the sidecars hold, and not before."""

from array import array

import pytest

from bench.feed import router_restart
from bench.feed.fake_sidecars import Curve


def test_snapshots_hold_as_many_blocks_as_asked_for():
    held = router_restart.snapshots(3, 120)
    assert [len(set(keys)) for keys in held] == [120] * 3


def test_a_router_over_sidecars_with_blocks_becomes_exact():
    held = [array("Q", range(1, 50)), array("Q", range(20, 40))]
    assert 0 < router_restart.seconds(2, Curve.fresh(), held) < router_restart.LIMIT_SECONDS


def test_a_router_that_does_not_hold_what_it_should_is_no_figure(monkeypatch):
    monkeypatch.setattr(router_restart, "LIMIT_SECONDS", 0.0)
    monkeypatch.setattr(router_restart, "_held", lambda host: {"uid-0": 1})
    with pytest.raises(TimeoutError, match="uid-0"):
        router_restart.seconds(1, Curve.fresh(), [])
