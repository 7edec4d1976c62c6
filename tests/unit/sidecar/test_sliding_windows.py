"""A sliding-window engine, its events, the ledger and the router's index: the predicted hit is the engine's.

The engine is a model written from the facts (4.5): it keeps only the blocks that a hit at the prompt's last block
needs, drops some of them, computes prompts in chunks, and hashes with the simulator's implementation, which shares
nothing with the product's.
"""

from array import array
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mmrouter_lib.block_keys import Span, block_keys, namespace_seed
from mmrouter_lib.engines.vllm.events import decode_batch
from mmrouter_lib.feed import deciding
from mmrouter_lib.media_identity import foreign_identity
from mmrouter_router.fleet.index import Index, window_blocks
from mmrouter_sidecar.blocks.ledger import Ledger, LedgerOp, Place
from mmrouter_sim.core.hashing import (
    Media,
    block_hash,
    extra_keys,
    first_parent,
    published_int,
    published_keys,
    sha256_cbor,
)

SIZE = 2
KEY = bytes(32)
GPU = Place(0, 0, "GPU")
IMAGE_ID = 99


def seed(lora: str | None = None, salt: str | None = None) -> int:
    return namespace_seed(KEY, model="m", lora=lora, salt=salt)


class Prompt:
    """Token ids with at most one image, and a salt."""

    def __init__(self, ids: list[int], image: tuple[str, int, int] | None = None, salt: str | None = None) -> None:
        self.ids = list(ids)
        self.media: list[Media] = []
        self.salt = salt
        if image is not None and image[1] < len(ids):
            name, offset, length = image[0], image[1], min(image[2], len(ids) - image[1])
            self.ids[offset : offset + length] = [IMAGE_ID] * length
            self.media = [Media(name, offset, length)]
        self.blocks = len(ids) // SIZE
        self.hashes: list[bytes] = []
        self.extras: list[Any] = []
        parent = first_parent(sha256_cbor, "vllm-none-hash")
        for start in range(0, self.blocks * SIZE, SIZE):
            keys = extra_keys(start, start + SIZE, self.media, salt=salt)
            parent = block_hash(sha256_cbor, parent, self.ids[start : start + SIZE], keys)
            self.hashes.append(parent)
            self.extras.append(published_keys(keys))

    @property
    def keys(self) -> Any:
        spans = [Span(m.offset, m.length, foreign_identity(m.identifier)) for m in self.media]
        return block_keys(array("I", self.ids), SIZE, spans, seed(salt=self.salt))


class Engine:
    """One sliding-window group."""

    def __init__(self, window: int, chunk: int) -> None:
        self.need = -(-(window - 1) // SIZE)
        self.window, self.chunk = window, chunk
        self.copies: Counter[bytes] = Counter()  # a block that lies behind a dropped one is computed and kept again

    @property
    def held(self) -> set[bytes]:
        return {number for number, copies in self.copies.items() if copies}

    def hit(self, prompt: Prompt) -> int:
        """Blocks of the longest hit: the largest n whose last ``need`` blocks are held."""
        most = (len(prompt.ids) - 1) // SIZE
        held = [self.copies[number] > 0 for number in prompt.hashes[:most]]
        return max(n for n in range(most + 1) if all(held[max(0, n - self.need) : n]))

    def run(self, prompt: Prompt) -> list[Any]:
        """Compute a prompt; return the events."""
        done = self.hit(prompt)
        end = (len(prompt.ids) - 1) // SIZE
        events = []
        while done < prompt.blocks:
            upto = min(prompt.blocks, done + self.chunk)
            kept = [n for n in range(done, upto) if end - self.need <= n < end]
            fields = {
                "type": "BlockStored",
                "block_hashes": [published_int(prompt.hashes[n]) for n in kept],
                "parent_block_hash": published_int(prompt.hashes[done - 1]) if done else None,
                "token_ids": prompt.ids[done * SIZE : upto * SIZE],
                "block_size": SIZE,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "group_idx": 0,
                "kv_cache_spec_kind": "sliding_window",
                "kv_cache_spec_sliding_window": self.window,
            }
            events.append(fields | ({"extra_keys": [prompt.extras[n] for n in kept]} if kept else {}))
            self.copies.update(prompt.hashes[n] for n in kept)
            done = upto
        return events

    def drop(self, choice: int) -> list[Any]:
        if not self.held:
            return []
        gone = sorted(self.held)[choice % len(self.held)]
        self.copies[gone] -= 1
        return [{"type": "BlockRemoved", "block_hashes": [published_int(gone)], "medium": "GPU", "group_idx": 0}]


class Routed:
    """A ledger that reads events, and an index that follows it."""

    def __init__(self) -> None:
        self.ledger, self.index = Ledger(seed), Index()
        self.slot = self.index.join()
        self.ops: list[LedgerOp] = []

    def take(self, kit: Any, events: list[Any]) -> None:
        self.ledger.apply(decode_batch(kit.batch(*events)), 0)
        taken = self.ledger.take()
        self.ops += taken.ops
        for change in taken.changes:
            self.index.remove(self.slot, change.removed)
            self.index.store(self.slot, change.stored)

    def overlap(self, prompt: Prompt) -> int:
        window = deciding(self.ledger.groups).window
        keys = prompt.keys[: (len(prompt.ids) - 1) // SIZE]
        return self.index.match_windows(keys, {self.slot: window_blocks(window, SIZE) if window else len(keys)})[
            self.slot
        ]


ids = st.lists(st.integers(0, 1), min_size=1, max_size=24)
texts = ids.map(Prompt)
mixed = st.builds(
    Prompt,
    ids,
    st.none() | st.tuples(st.sampled_from("ab"), st.integers(0, 12), st.integers(1, 12)),
    st.sampled_from([None, None, "s"]),
)
windows = st.integers(2, 30)
chunks = st.integers(1, 12)


@given(st.lists(st.tuples(texts, st.none() | st.integers(0, 50)), max_size=8), texts, windows, chunks)
@settings(max_examples=40)
def test_case_45_text_under_a_window_is_hit_as_predicted(
    kit: Any, history: list[tuple[Prompt, int | None]], asked: Prompt, window: int, chunk: int
) -> None:
    engine, routed = Engine(window, chunk), Routed()
    for prompt, drop in history:
        assert routed.overlap(prompt) == engine.hit(prompt)
        routed.take(kit, engine.run(prompt))
        assert set(routed.ledger.tables.get(GPU).blocks if engine.held else ()) == set(map(published_int, engine.held))
        if drop is not None:
            routed.take(kit, engine.drop(drop))
    assert routed.overlap(asked) == engine.hit(asked)
    assert not routed.ledger.counts["ragged_store"]
    assert not routed.ledger.counts["unknown_parent"]


@given(st.lists(st.tuples(mixed, st.none() | st.integers(0, 50)), max_size=8), mixed, windows, chunks)
@settings(max_examples=40)
def test_images_and_salts_before_a_window_are_never_over_estimated(
    kit: Any, history: list[tuple[Prompt, int | None]], asked: Prompt, window: int, chunk: int
) -> None:
    """What lies before the kept blocks is not told; where it cannot be recomputed, nothing is claimed."""
    engine, routed = Engine(window, chunk), Routed()
    for prompt, drop in [*history, (asked, None)]:
        assert routed.overlap(prompt) <= engine.hit(prompt)
        routed.take(kit, engine.run(prompt))
        if drop is not None:
            routed.take(kit, engine.drop(drop))
    cache = routed.ledger.tables.get(GPU)
    assert (len(cache.blocks) + len(cache.aside) if cache else 0) == len(engine.held)
    if window > 24:  # the window covers every prompt: all blocks are in the events
        assert not (cache and cache.aside)


@given(st.lists(mixed, min_size=1, max_size=6), windows, chunks)
@settings(max_examples=20)
def test_a_restarted_ledger_continues_blocks_that_were_never_stored(
    kit: Any, history: list[Prompt], window: int, chunk: int
) -> None:
    engine, routed, middle = Engine(window, chunk), Routed(), Routed()
    for number, prompt in enumerate(history):
        if number == len(history) // 2:
            for op in routed.ops:
                middle.ledger.redo(op)
        events = engine.run(prompt)
        routed.take(kit, events)
        if number >= len(history) // 2:
            middle.take(kit, events)
    for ops in (None, routed.ledger.dump()):
        ledger = middle.ledger if ops is None else Ledger(seed)
        for op in ops or ():
            ledger.redo(op)
        assert ledger.groups == routed.ledger.groups
        assert ledger.tables.get(GPU) is None or ledger.tables[GPU].blocks == routed.ledger.tables[GPU].blocks
        mine, theirs = ledger.windows.dump(), routed.ledger.windows.dump()
        assert sorted(mine[0]) == sorted(theirs[0])
        assert len(mine[1]) == len(theirs[1]) == 32 * len(mine[0])


def test_an_adapters_ragged_event_is_counted_and_not_indexed(kit: Any) -> None:
    """The hash of its blocks holds the path that the adapter was loaded from, which no event tells."""
    ledger = Ledger(seed)
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 9}
    event = kit.stored([1, 2], ids=list(range(6)), lora_name="l", extra_keys=[["l"], ["l"]], **window)
    ledger.apply(decode_batch(kit.batch(event)), 0)
    assert (ledger.held, ledger.aside, ledger.counts["ragged_store"]) == (0, 2, 2)
    whole = kit.stored([3], ids=[1, 2], lora_name="l", extra_keys=[["l"]], **window)
    ledger.apply(decode_batch(kit.batch(whole)), 0)
    assert ledger.held == 1, "one that names all of its blocks needs no recomputation"


def test_beside_full_attention_nothing_of_a_window_is_recomputed(kit: Any) -> None:
    ledger = Ledger(seed)
    full = kit.stored([1], ids=[1, 2], group_idx=1, kv_cache_spec_kind="full_attention")
    window = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 9}
    ledger.apply(decode_batch(kit.batch(full, kit.stored([5], ids=list(range(6)), **window))), 0)
    assert (ledger.counts["ragged_beside"], len(ledger.windows)) == (1, 0)
    assert [group.group for group in ledger.groups] == [0, 1]
    assert deciding(ledger.groups).group == 1
    assert ledger.block_size == SIZE
