"""The synthetic caches are caches, and their events are vLLM's."""

from bench.placing.block_workload import BLOCK_SIZE, build, split, steps, vllm_payload
from mmrouter_lib.block_keys import block_keys
from mmrouter_lib.engines.vllm.events import decode_batch

LOAD = build(workers=3, blocks_per_worker=200, queries=2)


def test_the_same_seed_gives_the_same_workload_and_another_seed_another():
    assert build(workers=3, blocks_per_worker=200, queries=2) == LOAD
    assert build(workers=3, blocks_per_worker=200, queries=2, seed=2) != LOAD


def test_every_worker_holds_as_many_blocks_as_it_should_each_once_and_after_its_parent():
    for worker in range(LOAD.workers):
        events = [event for event in LOAD.events if event.worker == worker]
        held: set[int] = set()
        for event in events:
            assert event.parent is None or event.parent in held
            assert not held & set(event.hashes)
            held.update(event.hashes)
        assert len(held) == 200


def test_an_event_reads_as_vllms_and_carries_the_keys_of_its_tokens():
    for event in LOAD.events:
        (stored,) = decode_batch(vllm_payload(event)).events
        assert (stored.hashes, stored.parent, stored.ids) == (tuple(event.hashes), event.parent, event.ids)
    first = next(event for event in LOAD.events if event.parent is None)
    assert block_keys(first.ids, BLOCK_SIZE, (), 0x6D6D) == first.keys


def test_split_events_store_the_same_blocks_in_the_same_order():
    small = list(split(LOAD.events, 1))
    assert all(len(event.hashes) == 1 and len(event.ids) == BLOCK_SIZE for event in small)
    assert [h for event in small for h in event.hashes] == [h for event in LOAD.events for h in event.hashes]
    known: set[tuple[int, int]] = set()
    for event in small:
        assert event.parent is None or (event.worker, event.parent) in known
        known.add((event.worker, event.hashes[0]))


def test_steps_hold_every_event_once_each_of_one_worker_and_each_workers_in_order():
    small = list(split(LOAD.events, 1))
    batches = list(steps(small, 16))
    assert {len(batch) for batch in batches} == {16, 200 % 16}
    assert all(event.worker == batch[0].worker for batch in batches for event in batch)
    for worker in range(LOAD.workers):
        mine = [event for batch in batches for event in batch if event.worker == worker]
        assert mine == [event for event in small if event.worker == worker]
    assert len(decode_batch(vllm_payload(*batches[0])).events) == 16
