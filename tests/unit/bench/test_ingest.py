"""Ingest figures stand only for blocks that are in the index afterwards."""

from dataclasses import replace

import pytest

from bench.feed import router_ingest
from bench.placing.block_workload import build, split

LOAD = build(workers=3, blocks_per_worker=120, queries=0)
CASE = router_ingest.Case("64-block events", LOAD, LOAD.events)


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
    missing = router_ingest._rows(CASE, [0.1], [0.2], 1.0, [], "no index")
    assert [item.value is None for item in missing] == [False, False, True, True]
    assert missing[2].peer == "not run: no index"
    rows = router_ingest._rows(CASE, [0.1], [0.2], 0.0, [1.6], "")
    assert [item.value for item in rows[2:]] == [8.0, 8.0]
    assert [item.met for item in rows[2:]] == [True, True]
