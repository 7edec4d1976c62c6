"""Benchmarks of the feed: figures count only for blocks that are in the index."""

from array import array
from dataclasses import replace

import pytest

from bench.feed import index_memory, router_ingest, router_restart
from bench.feed.fake_sidecars import Curve
from bench.placing.block_workload import build, split

SHARED = build(workers=8, blocks_per_worker=1200, queries=0)
LOAD = build(workers=3, blocks_per_worker=120, queries=0)
CASE = router_ingest.IngestCase("64-block events", LOAD, LOAD.events)


def test_every_block_is_in_the_index_after_the_deltas_of_either_size():
    assert router_ingest.apply(CASE, CASE.deltas()) > 0
    small = replace(CASE, events=tuple(split(LOAD.events, 1)))
    assert len(small.deltas()) == LOAD.blocks
    assert small.held == CASE.held == [120] * 3
    assert router_ingest.apply(small, small.deltas()) > 0
    stepped = replace(small, step=50)
    assert len(stepped.deltas()) == 3 * 3
    assert router_ingest.apply(stepped, stepped.deltas()) > 0


def test_a_delta_that_is_lost_makes_the_run_fail():
    with pytest.raises(RuntimeError, match="instead of 360"):
        router_ingest.apply(CASE, CASE.deltas()[:-1])


def test_real_sockets_carry_the_same_blocks():
    assert router_ingest.receive(CASE, CASE.deltas()) > 0


def test_rows_name_the_missing_peer_or_the_ratio_to_it():
    missing = router_ingest.rows(CASE, [0.1], [0.2], 1.0, [], "no index")
    assert [item.value is None for item in missing] == [False, False, True, True]
    assert missing[2].peer == "not run: no index"
    rows = router_ingest.rows(CASE, [0.1], [0.2], 0.0, [1.6], "")
    assert [item.value for item in rows[2:]] == [8.0, 8.0]
    assert [item.met for item in rows[2:]] == [True, True]


def test_the_feeds_half_grows_by_something_when_all_blocks_are_there():
    assert index_memory.index_growth(SHARED) >= 0  # it raises where blocks are missing


def test_a_block_of_many_workers_is_one_unique_block():
    unique = len({key for event in SHARED.events for key in event.keys})
    assert unique < SHARED.blocks == 9600
    rows = index_memory.rows(SHARED, 100 * unique, 200 * unique, "")
    assert [item.value for item in rows] == [100.0, float(f"{100 * unique / 9600:.4g}"), 0.5]
    assert [item.met for item in rows] == [None, None, True]


def test_without_the_peer_there_is_no_ratio_but_a_reason():
    rows = index_memory.rows(SHARED, 1000, None, "no index")
    assert (rows[-1].value, rows[-1].peer) == (None, "not run: no index")


def test_snapshots_hold_as_many_blocks_as_asked_for():
    held = router_restart.snapshots(3, 120)
    assert [len(set(keys)) for keys in held] == [120] * 3


def test_a_router_over_sidecars_with_blocks_becomes_exact():
    held = [array("Q", range(1, 50)), array("Q", range(20, 40))]
    assert 0 < router_restart.seconds(2, Curve.fresh(), held) < router_restart.LIMIT_SECONDS


def test_a_router_that_does_not_hold_what_it_should_is_no_figure(monkeypatch):
    monkeypatch.setattr(router_restart, "LIMIT_SECONDS", 0.0)
    monkeypatch.setattr(router_restart, "held_blocks", lambda host: {"uid-0": 1})
    with pytest.raises(TimeoutError, match="uid-0"):
        router_restart.seconds(1, Curve.fresh(), [])
