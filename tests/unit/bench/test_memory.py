"""What the index takes is told per block, and only for blocks that are in it."""

from bench.feed import index_memory
from bench.placing.block_workload import build

LOAD = build(workers=8, blocks_per_worker=1200, queries=0)


def test_the_feeds_half_grows_by_something_when_all_blocks_are_there():
    assert index_memory.ours(LOAD) >= 0  # it raises where blocks are missing


def test_a_block_of_many_workers_is_one_unique_block():
    unique = len({key for event in LOAD.events for key in event.keys})
    assert unique < LOAD.blocks == 9600
    rows = index_memory.rows(LOAD, 100 * unique, 200 * unique, "")
    assert [item.value for item in rows] == [100.0, float(f"{100 * unique / 9600:.4g}"), 0.5]
    assert [item.met for item in rows] == [None, None, True]


def test_without_the_peer_there_is_no_ratio_but_a_reason():
    rows = index_memory.rows(LOAD, 1000, None, "no index")
    assert (rows[-1].value, rows[-1].peer) == (None, "not run: no index")
