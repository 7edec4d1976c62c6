"""The ledger counts copies, reports exact net changes, and publishes no block without a key."""

import hashlib
from array import array
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.conftest import examples
from unit.sidecar.conftest import CLEARED, batch, removed, seed, stored

from mmrouter_lib.block_keys import Span, block_keys
from mmrouter_lib.cache_layout import CacheGroup
from mmrouter_lib.engines.sglang.events import decode_batch as decode_sglang
from mmrouter_lib.engines.vllm.events import decode_batch
from mmrouter_lib.media_identity import to_wire
from mmrouter_sidecar.blocks.block_table import BlockTable
from mmrouter_sidecar.blocks.ledger import Ledger
from mmrouter_sidecar.blocks.ledger_ops import Place

GPU, CPU = Place(0, 0, "GPU"), Place(0, 0, "CPU")
SIZE = 2


def engine_hash(prefix: tuple[int, ...]) -> int:
    return int.from_bytes(hashlib.sha256(repr(prefix).encode()).digest()[-8:], "big")


class Model:
    """An engine that stores chains of blocks in physical copies; what it holds is known by construction."""

    def __init__(self) -> None:
        self.copies: Counter[tuple[int, ...]] = Counter()

    def store(self, prompt: tuple[int, ...]) -> list[Any]:
        blocks = [prompt[: end + SIZE] for end in range(0, len(prompt), SIZE)]
        held = next((n for n, block in enumerate(blocks) if not self.copies[block]), 0)
        new = blocks[held:]  # a prompt that is held whole is stored in a second copy
        for block in new:
            self.copies[block] += 1
        parent = engine_hash(blocks[held - 1]) if held else None
        ids = [token for block in new for token in block[-SIZE:]]
        return [stored([engine_hash(block) for block in new], parent, ids=ids, size=SIZE)]

    def remove(self, choice: int) -> list[Any]:
        held = sorted(block for block, copies in self.copies.items() if copies)
        if not held:
            return []
        block = held[choice % len(held)]
        self.copies[block] -= 1
        return [removed(engine_hash(block))]

    def clear(self, _: None) -> list[Any]:
        self.copies.clear()
        return [CLEARED]

    def flush(self, _: None) -> list[Any]:
        return []

    @property
    def keys(self) -> set[int]:
        held = [block for block, copies in self.copies.items() if copies]
        return {block_keys(array("I", block), SIZE, [], seed())[-1] for block in held}


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(
    lambda blocks: tuple(b * 10 + n for b in blocks for n in range(SIZE))
)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("store"), prompts),
        st.tuples(st.just("remove"), st.integers(0, 50)),
        st.tuples(st.just("clear"), st.none()),
        st.tuples(st.just("flush"), st.none()),
    ),
    max_size=40,
)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(seed)


def offloaded(*hashes: int, medium: str = "CPU") -> Any:
    """An event of vLLM's offloading connector, which describes a block by its hash alone."""
    return stored(list(hashes), ids=[], size=0, medium=medium)


def apply(ledger: Ledger, *events: Any, rank: int = 0) -> None:
    ledger.apply(decode_batch(batch(*events, rank=rank)), rank)


def keys(ledger: Ledger, place: Place = GPU) -> set[int]:
    return set(ledger.tables[place].keys()) if place in ledger.tables else set()


def dumped(ledger: Ledger) -> Ledger:
    """A ledger rebuilt from the operations of another one's state."""
    again = Ledger(seed)
    for op in ledger.dump():
        again.redo(op)
    return again


@given(actions)
@settings(max_examples=examples(40))
def test_the_sum_of_net_changes_is_what_the_engine_holds(steps: list[tuple[str, Any]]) -> None:
    model, ledger, followed = Model(), Ledger(seed), set()
    for action, value in [*steps, ("flush", None)]:
        events = getattr(model, action)(value)
        if events:
            apply(ledger, *events)
        assert keys(ledger) == model.keys
        if action == "flush":
            for change in ledger.take().changes:
                if change.cleared:
                    followed.clear()
                assert not followed & set(change.stored)
                assert set(change.removed) <= followed
                assert not set(change.stored) & set(change.removed)
                assert len(set(change.stored)) == len(change.stored)
                followed = (followed - set(change.removed)) | set(change.stored)
            assert followed == model.keys
            assert not ledger.dirty


@given(actions)
@settings(max_examples=examples(40))
def test_the_journals_operations_and_a_dump_rebuild_the_ledger(steps: list[tuple[str, Any]]) -> None:
    model, ledger, redone = Model(), Ledger(seed), Ledger(seed)
    for action, value in steps:
        events = getattr(model, action)(value)
        if events:
            apply(ledger, *events)
        for op in ledger.take().ops:
            redone.redo(op)
    for other in (redone, dumped(ledger)):
        for place, cache in ledger.tables.items():
            if mine := other.tables.get(place):
                assert (mine.blocks, mine.copies, mine.owners) == (cache.blocks, cache.copies, cache.owners)
            assert mine or not cache.blocks
        assert not other.take().changes


def test_two_engine_hashes_of_one_key_are_one_block_until_both_are_gone(ledger: Ledger) -> None:
    """A LoRA adapter loaded again from another path: the engine's hash changes, what a request matches does not."""
    apply(ledger, stored([1], ids=[5, 6], lora_name="l", lora_id=1))
    apply(ledger, stored([9], ids=[5, 6], lora_name="l", lora_id=2))
    assert len(ledger.take().changes[0].stored) == 1
    assert dumped(ledger).tables[GPU] == ledger.tables[GPU]
    assert ledger.held == 1
    apply(ledger, removed(1))
    assert not ledger.take().changes
    apply(ledger, removed(9))
    assert len(ledger.take().changes[0].removed) == 1


def test_blocks_of_an_unknown_parent_are_not_published_but_their_copies_count(ledger: Ledger) -> None:
    apply(ledger, stored([2, 3], 1))
    assert ledger.take().changes == []
    assert (ledger.counts["unknown_parent"], ledger.aside, ledger.has_aside) == (2, 2, True)
    apply(ledger, stored([1]), stored([2, 3], 1))
    assert (len(keys(ledger)), ledger.has_aside) == (3, False)
    apply(ledger, removed(3))
    assert len(keys(ledger)) == 3, "the copy that was put aside is still held"
    apply(ledger, removed(3))
    assert len(keys(ledger)) == 2


def test_case_49_groups_media_and_ranks_are_separate_and_a_clear_empties_one_rank(ledger: Ledger) -> None:
    apply(ledger, stored([1]), stored([1], group_idx=1), offloaded(1))
    apply(ledger, stored([1]), rank=1)
    places = {GPU, Place(0, 1, "GPU"), Place(0, 0, "CPU"), Place(1, 0, "GPU")}
    assert {change.place for change in ledger.take().changes} == places
    apply(ledger, removed(1, medium="CPU"))
    assert keys(ledger) == {*keys(ledger, Place(0, 1, "GPU"))}
    assert not keys(ledger, Place(0, 0, "CPU"))
    ledger.take()
    apply(ledger, CLEARED)
    changes = ledger.take().changes
    assert [change.cleared for change in changes] == [True]
    assert changes[0].place.rank == 0
    assert len(keys(ledger, Place(1, 0, "GPU"))) == 1


@given(actions, st.lists(st.tuples(st.booleans(), st.integers(0, 50)), max_size=40))
@settings(max_examples=examples(40))
def test_a_lower_tier_holds_the_keys_of_the_blocks_copied_there(
    steps: list[tuple[str, Any]], copies: list[tuple[bool, int]]
) -> None:
    """Copies are announced up to one step after the device has dropped their block, and are removed one by one."""
    model, ledger = Model(), Ledger(seed)
    apply(ledger, stored([99]), offloaded(99), removed(99, medium="CPU"), removed(99))
    below: Counter[tuple[int, ...]] = Counter()
    for (action, value), (copy, choice) in zip(steps, copies, strict=False):
        there = sorted(block for block, number in model.copies.items() if number)
        events = getattr(model, action)(value)
        if action == "clear":
            below.clear()
        elif copy and there:
            block = there[choice % len(there)]
            below[block] += 1
            events += [offloaded(engine_hash(block))]
        elif gone := sorted(below.elements())[choice : choice + 1]:
            below[gone[0]] -= 1
            events += [removed(engine_hash(gone[0]), medium="CPU")]
        apply(ledger, *events)
        expected = {block_keys(array("I", block), SIZE, [], seed())[-1] for block in +below}
        assert keys(ledger) == model.keys
        assert keys(ledger, CPU) == expected
        assert keys(dumped(ledger), CPU) == expected
    assert not ledger.counts["unknown_below"]


def test_a_copy_below_has_the_images_and_the_salt_of_its_block(ledger: Ledger) -> None:
    image = {"extra_keys": [["salt", [to_wire(bytes(32)), 0]]]}
    apply(ledger, stored([1], **image), stored([1], medium="CPU"), offloaded(1, medium="STORAGE"))
    assert keys(ledger) == keys(ledger, CPU) == keys(ledger, Place(0, 0, "STORAGE"))
    assert ledger.lower_media == ("CPU", "STORAGE")


def test_a_page_of_sglangs_host_tier_has_its_own_content_and_a_parent_in_any_tier(ledger: Ledger) -> None:
    """With write-back a page is stored in host memory when the device has dropped it (``record_store`` of 0.5.23)."""

    def page(number: int, parent: int | None, medium: str) -> Any:
        more = {"parent_block_hash": parent, "cache_salt": "tenant", "lora_id": None, "block_size": SIZE}
        ids = [2**61 + abs(number), abs(number)]  # a sentinel and a token
        return {"type": "BlockStored", "block_hashes": [number], "token_ids": ids, "medium": medium, **more}

    def gone(number: int, medium: str) -> Any:
        return {"type": "BlockRemoved", "block_hashes": [number], "medium": medium}

    def publish(*events: Any) -> None:
        ledger.apply(decode_sglang(batch(*events)), 0)

    publish(page(-1, None, "GPU"), page(2, -1, "GPU"), page(-1, None, "CPU_PINNED"))
    held, seen = keys(ledger), len(ledger.take().sightings)
    publish(gone(2, "GPU"), gone(-1, "GPU"), page(2, -1, "CPU_PINNED"))
    assert not keys(ledger)
    assert keys(ledger, Place(0, 0, "CPU_PINNED")) == held
    assert (len(held), len(ledger.take().sightings), ledger.lower_media) == (2, 0, ("CPU_PINNED",))
    assert seen, "the sentinels of the device were observed"
    publish(page(-1, None, "GPU"), gone(2, "CPU_PINNED"))
    assert keys(ledger) < held
    assert keys(ledger, Place(0, 0, "CPU_PINNED")) == keys(ledger)


def test_a_copy_of_a_block_that_was_never_seen_is_held_without_a_key(ledger: Ledger) -> None:
    apply(ledger, offloaded(1), stored([2]))
    assert not keys(ledger, CPU)
    assert (ledger.counts["unknown_below"], ledger.aside, ledger.block_size) == (1, 1, SIZE)
    apply(ledger, removed(1, medium="CPU"))
    assert not ledger.aside


def test_a_copy_that_is_announced_after_a_clear_is_not_indexed(ledger: Ledger) -> None:
    apply(ledger, stored([1]), offloaded(1), CLEARED, offloaded(1))
    assert not keys(ledger, CPU)
    assert ledger.counts["unknown_below"] == 1


def test_salt_lora_and_images_separate_equal_tokens(ledger: Ledger) -> None:
    same = {"ids": [5, 6]}
    image = to_wire(bytes(32))
    apply(ledger, stored([1], **same))
    apply(ledger, stored([2], **same, extra_keys=[["salt"]]))
    apply(ledger, stored([3], **same, lora_name="l", extra_keys=[["l"]]))
    apply(ledger, stored([4], **same, extra_keys=[[[image, 0]]]))
    apply(ledger, stored([5], **same, extra_keys=[[[image, -1]]]))
    assert len(keys(ledger)) == 5


def test_an_image_is_observed_once_with_its_parent_place_and_length(ledger: Ledger) -> None:
    wire = to_wire(b"\1" * 32)
    event = stored([1, 2, 3], ids=[7, 8, 9, 50, 50, 60], extra_keys=[None, [[wire, 1]], [[wire, -1]]])
    apply(ledger, event, event)
    (sighting,) = ledger.take().sightings
    assert (sighting.offset, sighting.length, sighting.identity) == (1, 2, b"\1" * 32)
    assert sighting.parent == block_keys(array("I", [7, 8]), 2, [], seed())[0]
    apply(ledger, stored([4], ids=[50, 50], extra_keys=[[[to_wire(b"\2" * 32), 0]]]))
    (first_block,) = ledger.take().sightings
    assert (first_block.parent, first_block.offset, first_block.length) == (None, 0, 2)


def test_the_key_of_an_image_block_is_the_one_that_the_router_computes(ledger: Ledger) -> None:
    identity = b"\7" * 32
    apply(ledger, stored([1, 2], ids=[1, 2, 3, 4], extra_keys=[[[to_wire(identity), 1]], [[to_wire(identity), -1]]]))
    assert keys(ledger) == set(block_keys(array("I", [1, 2, 3, 4]), 2, [Span(1, 2, identity)], seed()))


def test_ignored_events_are_counted_by_reason(ledger: Ledger) -> None:
    apply(ledger, stored([1], locality="REMOTE"), stored([], ids=[]))
    apply(ledger, stored([1], ids=[1, 2]), rank=0)
    ledger.apply(decode_batch(batch(stored([2]), rank=3)), 0)
    assert ledger.counts["ignored_remote"] == ledger.counts["ignored_empty_store"] == 1
    assert ledger.counts["rank_mismatch"] == 1


def test_a_reset_drops_pending_changes(ledger: Ledger) -> None:
    apply(ledger, stored([1]))
    ledger.reset()
    assert (ledger.dirty, ledger.held) == (False, 0)
    assert ledger.take().changes == []


def test_case_42_an_event_of_another_block_size_is_counted_and_not_indexed(ledger: Ledger) -> None:
    apply(ledger, stored([1, 2], size=16))
    apply(ledger, stored([3], 2, size=32))
    assert (len(keys(ledger)), ledger.counts["block_size"], ledger.aside, ledger.block_size) == (2, 1, 1, 16)


def test_a_part_of_a_block_is_replaced_by_the_groups_blocks(ledger: Ledger) -> None:
    """A prompt shorter than a hybrid model's block leaves one entry of the finer hash's size (facts 2.4)."""
    apply(ledger, stored([7], ids=[1, 2], size=2))
    assert len(ledger.take().changes[0].stored) == 1
    apply(ledger, stored([1, 2], ids=list(range(8)), size=4))
    (change,) = ledger.take().changes
    assert (len(change.removed), len(change.stored), ledger.block_size, ledger.aside) == (1, 2, 4, 1)
    again = dumped(ledger)
    assert (again.held, again.aside, again.block_size) == (2, 1, 4)
    apply(ledger, removed(7))
    assert (ledger.counts["unknown_removed"], ledger.aside) == (0, 0)


def test_case_43_hashes_without_tokens_are_held_and_not_indexed(ledger: Ledger) -> None:
    apply(ledger, stored([1, 2, 3], ids=[5, 6, 7]))
    assert keys(ledger) == set(block_keys(array("I", [5, 6]), SIZE, [], seed()))
    assert (ledger.counts["short_store"], ledger.aside) == (2, 2)
    apply(ledger, removed(2), removed(3))
    assert (ledger.aside, ledger.counts["unknown_removed"]) == (0, 0)


def test_case_45_groups_of_every_kind_are_named_and_their_blocks_have_the_keys_of_full_attention(
    ledger: Ledger,
) -> None:
    apply(
        ledger,
        stored([1], group_idx=0, kv_cache_spec_kind="mamba"),
        stored([1], group_idx=1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=64),
        stored([1], group_idx=2, kv_cache_spec_kind="full_attention"),
        removed(1, group_idx=0),
    )
    assert ledger.counts == {"stored": 3, "removed": 1}
    full, mamba, window = ledger.groups
    assert full == CacheGroup(2, "full_attention", 0, SIZE)
    assert window == CacheGroup(1, "sliding_window", 64, SIZE)
    assert mamba == CacheGroup(0, "mamba", 0, SIZE)
    assert keys(ledger, Place(0, 1, "GPU")) == keys(ledger, Place(0, 2, "GPU"))
    assert not keys(ledger, Place(0, 0, "GPU"))
    assert dumped(ledger).groups == ledger.groups


def test_case_46_a_salted_child_of_an_unknown_parent_is_put_aside(ledger: Ledger) -> None:
    apply(ledger, stored([2], 1, ids=[7, 8]))  # only a prompt's first block shows the salt
    assert (ledger.held, ledger.counts["unknown_parent"]) == (0, 1)
    apply(ledger, stored([1, 2], ids=[5, 6, 7, 8], extra_keys=[["salt"], None]))
    salted = set(block_keys(array("I", [5, 6, 7, 8]), SIZE, [], seed(salt="salt")))
    assert keys(ledger) == salted
    assert not salted & set(block_keys(array("I", [5, 6, 7, 8]), SIZE, [], seed()))


def test_case_47_four_copies_of_a_block_go_one_by_one(ledger: Ledger) -> None:
    """Four concurrent equal requests store a block four times and later remove it as often (facts 2.7)."""
    apply(ledger, *[stored([1, 2])] * 4)
    for held, unknown in ((2, 0), (2, 0), (2, 0), (1, 0), (1, 1)):
        apply(ledger, removed(2))
        assert (len(keys(ledger)), ledger.counts["unknown_removed"]) == (held, unknown)


@pytest.mark.parametrize("keys", [(5, 6), (5, 6, 7, 8)])
def test_hashes_and_keys_of_different_counts_are_refused(keys: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="zip"):
        BlockTable().add((1, 2, 3), array("Q", keys))
