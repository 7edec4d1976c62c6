"""Windows whose blocks are parts or multiples of full attention's: what the router promises is what the engine hits.

The engine is a model written from docs/engine-facts/vllm.md#cache-groups: one chain of hashes in units, of which every
group's blocks are multiples; a hit ends where blocks of all groups end. Against vLLM's own cache manager:
``tests/conformance/nomodel``.
"""

from array import array
from collections import Counter
from math import lcm
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from unit.conftest import examples
from unit.sidecar.conftest import Routed, batch, removed, seed, stored
from unit.sidecar.test_sliding_windows import SIZE, Prompt, chunks, mixed

from mmrouter_lib.block_keys import Span, block_keys
from mmrouter_lib.cache_layout import CHUNKS, CacheGroup, cache_layout, chunk_tokens
from mmrouter_lib.media_identity import foreign_identity
from mmrouter_sidecar.blocks.block_table import BlockTable
from mmrouter_sidecar.blocks.ledger import Ledger
from mmrouter_sidecar.blocks.ledger_ops import LedgerOp
from mmrouter_sim.core import requests as sim


class Group(NamedTuple):
    units: int  # per block
    window: int = 0  # tokens, 0 for full attention
    chunk: int = 0  # tokens, 0 for attention in no chunks

    @property
    def size(self) -> int:
        return self.units * SIZE

    @property
    def fields(self) -> dict[str, Any]:
        if self.window:
            return {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": self.window}
        return {"kv_cache_spec_kind": CHUNKS if self.chunk else "full_attention"}

    def needed(self, end: int) -> range:
        """The blocks that a hit of so many tokens needs."""
        blocks = end // self.size
        if self.window:
            return range(max(0, blocks + (1 - self.window) // self.size), blocks)
        return range(end // self.chunk * self.chunk // self.size if self.chunk else 0, blocks)


class Engine:
    def __init__(self, groups: list[Group], step: int) -> None:
        self.groups, self.step = groups, step
        self.align = lcm(*(group.size for group in groups))
        self.copies = [Counter[bytes]() for _ in groups]

    def hit(self, prompt: Prompt) -> int:
        """The longest hit in tokens, by trying every length."""
        ends = range(0, len(prompt.ids), self.align)
        return max(
            end
            for end in ends
            if all(
                copies[prompt.hashes[(block + 1) * group.units - 1]]
                for group, copies in zip(self.groups, self.copies, strict=True)
                for block in group.needed(end)
            )
        )

    def run(self, prompt: Prompt) -> list[bytes]:
        """Compute a prompt in steps; return a batch of events for each."""
        done, kept_for = self.hit(prompt), (len(prompt.ids) - 1) // self.align * self.align
        batches = []
        while done < len(prompt.ids):
            # Blocks are cached up to a multiple of all sizes.
            upto = min(len(prompt.ids), done // self.align * self.align + self.step * self.align)
            events = []
            for number, group in enumerate(self.groups):
                cached = upto // self.align * self.align
                first, last = done // group.size, cached // group.size
                if first == last:
                    continue
                held = range(first, last)
                if group.window:
                    held = [block for block in held if block in group.needed(kept_for)]
                names = [prompt.hashes[(block + 1) * group.units - 1] for block in held]
                parent = sim.published_int(prompt.hashes[first * group.units - 1]) if first else None
                ids = prompt.ids[first * group.size : last * group.size]
                more = {"group_idx": number, "size": group.size, **group.fields}
                if names:
                    more["extra_keys"] = [
                        self._extras(prompt, block * group.size, (block + 1) * group.size) for block in held
                    ]
                events.append(stored([sim.published_int(name) for name in names], parent, ids=ids, **more))
                self.copies[number].update(names)
            if upto == len(prompt.ids):
                events += self._end(prompt)
            batches.append(batch(*events))
            done = upto
        return batches

    def _end(self, prompt: Prompt) -> list[Any]:
        """The entry for the part of a block of full attention at a prompt's end, which no prompt hits."""
        end = (len(prompt.ids) - 1) // SIZE
        for number, group in enumerate(self.groups):
            if begun := 0 if group.window else end % group.units:
                parent = sim.published_int(prompt.hashes[end - begun - 1]) if end > begun else None
                ids, name = prompt.ids[(end - begun) * SIZE : end * SIZE], sim.published_int(prompt.hashes[end - 1])
                more = {"group_idx": number, "size": begun * SIZE, **group.fields}
                extras = self._extras(prompt, (end - begun) * SIZE, end * SIZE)
                return [stored([name], parent, ids=ids, extra_keys=[extras], **more)]
        return []

    def _extras(self, prompt: Prompt, begin: int, end: int) -> Any:
        return sim.published_keys(sim.extra_keys(begin, end, prompt.media, salt=prompt.salt))

    def drop(self, choice: int) -> bytes:
        held = [(number, name) for number, copies in enumerate(self.copies) for name in sorted(+copies)]
        if not held:
            return batch()
        number, name = held[choice % len(held)]
        self.copies[number][name] -= 1
        return batch(removed(sim.published_int(name), group_idx=number))


def promised(routed: Routed, prompt: Prompt, size: int, chunk: int) -> int:
    """The tokens that a router expects a prompt to hit."""
    spans = [Span(m.offset, m.length, foreign_identity(m.identifier)) for m in prompt.media]
    keys = block_keys(array("I", prompt.ids), size, spans, seed(salt=prompt.salt))
    return routed.overlap(keys[: (len(prompt.ids) - 1) // size], size, chunk) * size


parts = st.tuples(st.sampled_from([(2, 1), (4, 1), (4, 2), (1, 2), (1, 4), (2, 4)]), st.sampled_from([8, 9, 17]))
layouts = st.one_of(
    parts.map(lambda drawn: [Group(drawn[0][0]), Group(drawn[0][1], drawn[1])]),
    parts.map(lambda drawn: [Group(drawn[0][1], drawn[1]), Group(drawn[0][1], 16), Group(drawn[0][0])]),
    st.sampled_from([4, 8, 12]).map(lambda tokens: [Group(1), Group(1, chunk=tokens)]),
)
histories = st.lists(st.tuples(mixed, st.none() | st.integers(0, 50)), max_size=8)


@given(histories, layouts, chunks, st.integers(1, 20))
@settings(max_examples=examples(120))
def test_a_hit_ends_where_blocks_of_all_sizes_end(
    history: list[tuple[Prompt, int | None]], groups: list[Group], step: int, first: int
) -> None:
    """``first``: tokens of the first prompt, which may be too short for a block of some groups."""
    engine, routed = Engine(groups, step), Routed()
    size, chunk = next(each.size for each in groups if not each.window), max(each.chunk for each in groups)
    for length in (first, 40):  # after the second one, every group is known
        for each in engine.run(Prompt(list(range(100, 100 + length)))):
            routed.apply(each)
    for prompt, drop in history:
        layout = cache_layout(routed.ledger.groups, chunk=chunk)
        assert (layout.comparable, layout.bounds) == (True, ())
        assert promised(routed, prompt, size, chunk) == engine.hit(prompt)
        for each in engine.run(prompt):
            routed.apply(each)
        if drop is not None:
            routed.apply(engine.drop(drop))
    assert_redone(routed, routed.ops)
    assert_redone(routed, routed.ledger.dump())


def assert_redone(routed: Routed, ops: list[LedgerOp]) -> None:
    again = Ledger(seed)
    for op in ops:
        again.redo(op)
    for place, table in routed.ledger.tables.items():
        redone = again.tables.get(place, BlockTable())
        assert (redone.blocks, redone.copies, redone.aside) == (table.blocks, table.copies, table.aside)
        assert (redone.joined, redone.wholes_of) == (table.joined, table.wholes_of)


def test_blocks_of_sizes_that_do_not_divide_each_other_promise_nothing() -> None:
    full, window = CacheGroup(0, "full_attention", 0, 32), CacheGroup(1, "sliding_window", 512, 48)
    for groups in (
        [full, window],
        [full, CacheGroup(1, "mamba", 0, 64)],
        [full, CacheGroup(1, "mla_attention", 0, 64)],
    ):
        layout = cache_layout(groups)
        assert (layout.comparable, layout.bounds) == (False, ("block_size",))


def test_a_feed_of_an_older_sidecar_has_other_keys_in_windows_of_another_block_size() -> None:
    groups = [CacheGroup(0, "full_attention", 0, 32), CacheGroup(1, "sliding_window", 512, 16)]
    assert cache_layout(groups, keys_of_full=False).bounds == ("block_size",)
    assert cache_layout(groups, keys_of_full=True).bounds == ()
    assert cache_layout(groups, keys_of_full=True, drafter="drops").bounds == ("block_size", "drafter")


def test_a_repeat_hits_up_to_the_end_of_the_largest_block() -> None:
    full = CacheGroup(0, "full_attention", 0, 32)
    for size, missed in ((64, [0, 1, 1, 0, 1]), (16, [0] * 5)):
        layout = cache_layout([full, CacheGroup(1, "sliding_window", 512, size)])
        assert [layout.recomputed_blocks(tokens, 32) for tokens in (1, 33, 64, 65, 97)] == missed


def test_the_tokens_of_a_chunk_are_the_models_unless_its_engines_override_it() -> None:
    config = {"text_config": {"attention_chunk_size": 8192}}
    assert chunk_tokens(config, ["--max-model-len", "4096"]) == 8192
    assert chunk_tokens({"attention_chunk_size": 128}, []) == 128
    assert chunk_tokens(config, ['--hf-overrides={"text_config": {}}']) == 0
    assert chunk_tokens(config, ["--hf_overrides", "{}"]) == 0
    assert (
        chunk_tokens(config, ["--hf-config-path=/other"]) == chunk_tokens(config, ["--config-format", "mistral"]) == 0
    )
    for value in (None, 0, -1, True, "8192", 1.5):
        assert chunk_tokens({"text_config": {"attention_chunk_size": value}}, []) == 0
