"""Engines with several cache groups: what the router promises is what every group together can continue from.

The engine is a model written from docs/engine-facts/vllm.md: groups share one chain of hashes, full attention keeps
every block, a window and mamba keep the end of a prompt only. It hashes with the simulator's implementation.
"""

from collections import Counter
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from unit.conftest import examples
from unit.sidecar.conftest import CLEARED, Routed, batch, removed, seed, stored
from unit.sidecar.test_sliding_windows import SIZE, Prompt, chunks, mixed

from mmrouter_lib.cache_layout import cache_layout
from mmrouter_lib.engines.vllm.events import decode_batch
from mmrouter_sidecar.blocks.ledger import Ledger
from mmrouter_sim.core import requests as sim

FULL, MAMBA = "full_attention", "mamba"


class Group(NamedTuple):
    kind: str
    need: int  # blocks before a hit's end, 0 for all
    window: int = 0

    @property
    def fields(self) -> dict[str, Any]:
        window = {"kv_cache_spec_sliding_window": self.window} if self.window else {}
        return {"kv_cache_spec_kind": self.kind, **window}


def window(tokens: int) -> Group:
    return Group("sliding_window", max(1, -(-(tokens - 1) // SIZE)), tokens)


class Engine:
    """Several cache groups, in the order of their numbers."""

    def __init__(self, *groups: Group, chunk: int = 100) -> None:
        self.groups, self.chunk = groups, chunk
        self.copies = [Counter[bytes]() for _ in groups]

    def hit(self, prompt: Prompt) -> int:
        """The longest hit in blocks, by trying every length: each group must hold what a hit of that length needs."""
        most = min(prompt.blocks, (len(prompt.ids) - 1) // SIZE)

        def continues(n: int) -> bool:
            return all(
                all(copies[number] for number in prompt.hashes[0 if not group.need else max(0, n - group.need) : n])
                for group, copies in zip(self.groups, self.copies, strict=True)
            )

        return max(n for n in range(most + 1) if continues(n))

    def run(self, prompt: Prompt) -> list[Any]:
        """Compute a prompt; return the events, one batch."""
        done, end, events = self.hit(prompt), (len(prompt.ids) - 1) // SIZE, []
        while done < prompt.blocks:
            upto = min(prompt.blocks, done + self.chunk)
            parent = sim.published_int(prompt.hashes[done - 1]) if done else None
            for number, group in enumerate(self.groups):
                kept = [n for n in range(done, upto) if not group.need or end - group.need <= n < end]
                hashes, extras = [sim.published_int(prompt.hashes[n]) for n in kept], [prompt.extras[n] for n in kept]
                more = {"group_idx": number, **group.fields, **({"extra_keys": extras} if kept else {})}
                if prompt.lookahead:
                    more["lookahead_token_ids"] = [prompt.ahead[n] for n in kept]
                events.append(stored(hashes, parent, ids=prompt.ids[done * SIZE : upto * SIZE], size=SIZE, **more))
                self.copies[number].update(prompt.hashes[n] for n in kept)
            done = upto
        return events

    def drop(self, choice: int) -> list[Any]:
        held = [(number, name) for number, copies in enumerate(self.copies) for name in sorted(+copies)]
        if not held:
            return []
        number, name = held[choice % len(held)]
        self.copies[number][name] -= 1
        return [removed(sim.published_int(name), group_idx=number)]


MAMBA_GROUP, FULL_GROUP = Group(MAMBA, 1), Group(FULL, 0)
GEMMA_LIKE = (window(9), window(9), FULL_GROUP)
layouts = st.lists(st.sampled_from([FULL_GROUP, MAMBA_GROUP, window(5), window(9)]), min_size=1, max_size=4)


def test_what_parts_before_the_window_of_an_earlier_prompt_is_not_promised() -> None:
    """The windows keep the end of the first prompt, so full attention's blocks alone serve no hit."""
    engine, routed = Engine(*GEMMA_LIKE), Routed()
    first, parting = Prompt(list(range(41))), Prompt([*range(20), *range(100, 121)])
    routed.apply(batch(*engine.run(first)))
    assert routed.overlap(first.predicted, SIZE) == engine.hit(first) == 20
    assert engine.hit(parting) == 0
    assert routed.overlap(parting.predicted, SIZE) == 0


Run = tuple[list[tuple[Prompt, int | None]], list[Group], int]
runs = st.tuples(st.lists(st.tuples(mixed, st.none() | st.integers(0, 50)), max_size=8), layouts, chunks)


@given(runs, st.integers(0, 2))
@settings(max_examples=examples(60))
def test_case_45_beside_full_attention_images_and_salts_are_hit_as_predicted(run: Run, lookahead: int) -> None:
    """Nothing is recomputed: a block that another group names is one that full attention names, too."""
    history, others, chunk = run
    engine, routed = Engine(*others, FULL_GROUP, chunk=chunk), Routed()
    for drawn, drop in history:
        prompt = drawn.hashed_with(lookahead)
        assert routed.overlap(prompt.predicted, SIZE) == engine.hit(prompt)
        routed.apply(batch(*engine.run(prompt)))
        if drop is not None:
            routed.apply(batch(*engine.drop(drop)))
    assert routed.ledger.aside == len(routed.ledger.windows) == 0
    held = [{sim.published_int(name) for name, copies in group.items() if copies} for group in engine.copies]
    mine = {place.group: set(table.blocks) for place, table in routed.ledger.tables.items()}
    assert all(mine.get(number, set()) == names for number, names in enumerate(held))
    assert cache_layout(routed.ledger.groups).lookahead == (lookahead if any(engine.copies) else 0)


@given(runs, st.integers(0, 2))
@settings(max_examples=examples(40))
def test_without_full_attention_no_hit_is_over_estimated(run: Run, lookahead: int) -> None:
    history, groups, chunk = run
    engine, routed = Engine(*groups, chunk=chunk), Routed()
    for drawn, drop in history:
        prompt = drawn.hashed_with(lookahead)
        assert routed.overlap(prompt.predicted, SIZE) <= engine.hit(prompt)
        routed.apply(batch(*engine.run(prompt)))
        if drop is not None:
            routed.apply(batch(*engine.drop(drop)))


@given(runs, st.integers(0, 2))
@settings(max_examples=20)
def test_a_restarted_ledger_knows_the_groups_and_their_blocks(run: Run, lookahead: int) -> None:
    history, others, chunk = run
    engine, routed = Engine(*others, FULL_GROUP, chunk=chunk), Routed()
    for prompt, _ in history:
        routed.apply(batch(*engine.run(prompt.hashed_with(lookahead))))
    for ops in (routed.ops, routed.ledger.dump()):
        again = Ledger(seed)
        for op in ops:
            again.redo(op)
        assert again.groups == routed.ledger.groups
        assert {place: table.blocks for place, table in again.tables.items() if table.blocks} == {
            place: table.blocks for place, table in routed.ledger.tables.items() if table.blocks
        }


def test_a_clear_between_stores_of_one_batch_ends_what_was_before_it() -> None:
    ledger, near = Ledger(seed), {"group_idx": 0, **window(9).fields}
    full = {"group_idx": 1, "kv_cache_spec_kind": FULL}
    before = stored([1], **near), stored([1], **full)
    after = stored([], ids=[4, 6], **near), stored([2], **full)
    ledger.apply(decode_batch(batch(*before, CLEARED, *after)), 0)
    assert {place.group: len(table.blocks) for place, table in ledger.tables.items()} == {0: 0, 1: 1}


def test_a_kind_that_is_not_understood_has_to_hold_every_block_and_bounds_the_promise() -> None:
    """Chunked attention needs the blocks of the last chunk only, but no event tells how long a chunk is."""
    routed, prompt = Routed(), Prompt(list(range(20)))
    engine = Engine(Group("chunked_local_attention", 0), FULL_GROUP)
    routed.apply(batch(*engine.run(prompt)))
    assert routed.overlap(prompt.predicted, SIZE) == 9
    routed.apply(batch(removed(sim.published_int(prompt.hashes[4]))))
    assert routed.overlap(prompt.predicted, SIZE) == 4
    assert cache_layout(routed.ledger.groups).bounds == ("chunked_local_attention",)


def test_entries_for_parts_of_blocks_bound_the_promise() -> None:
    ledger = Ledger(seed)
    full, mamba = ({"group_idx": number, "kv_cache_spec_kind": kind} for number, kind in enumerate((FULL, MAMBA)))
    ledger.apply(decode_batch(batch(stored([1, 2], size=4, **full), stored([1, 2], size=4, **mamba))), 0)
    assert cache_layout(ledger.groups).bounds == ()
    ledger.apply(decode_batch(batch(stored([7], 2, size=2, **full))), 0)
    assert cache_layout(ledger.groups).bounds == ("parts",)
    assert ledger.counts["block_size"] == 1


def test_groups_of_different_block_sizes_promise_nothing() -> None:
    ledger, full = Ledger(seed), {"group_idx": 1, "kv_cache_spec_kind": FULL}
    ledger.apply(decode_batch(batch(stored([2], size=3, **window(9).fields), stored([1, 2], **full))), 0)
    layout = cache_layout(ledger.groups)
    assert (layout.comparable, layout.bounds) == (False, ("block_size",))
    assert (ledger.block_size, layout.primary) == (SIZE, 1)


def test_a_prompt_that_continues_otherwise_does_not_hit_the_block_before() -> None:
    """An equal block with another next token is another block, which an image that begins right after it shows, too."""
    engine, routed = Engine(FULL_GROUP), Routed()
    first = Prompt(list(range(9)), ("a", 4, 2), lookahead=1)
    routed.apply(batch(*engine.run(first)))
    for other, hit in [
        (first, 4),
        (Prompt([*range(8), 99], ("a", 4, 2), lookahead=1), 3),
        (Prompt(list(range(9)), ("b", 4, 2), lookahead=1), 1),
        (Prompt(first.ids, lookahead=1), 1),
    ]:
        assert routed.overlap(other.predicted, SIZE) == engine.hit(other) == hit


def test_a_groups_lookahead_is_known_from_its_first_hash_on() -> None:
    """An event without hashes shows no lookahead, so a group's first event may not."""
    ledger, near = Ledger(seed), {"group_idx": 0, **window(9).fields}
    ledger.apply(decode_batch(batch(stored([], ids=[4, 6], lookahead_token_ids=[], **near))), 0)
    assert [group.lookahead for group in ledger.groups] == [0]
    ledger.apply(decode_batch(batch(stored([2], lookahead_token_ids=[[7]], **near))), 0)
    ledger.apply(decode_batch(batch(stored([], ids=[4, 6], lookahead_token_ids=[], **near))), 0)
    assert [group.lookahead for group in ledger.groups] == [1]
