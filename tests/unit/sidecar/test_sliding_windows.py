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
from unit.conftest import examples
from unit.sidecar.conftest import Routed, batch, removed, seed, stored

from mmrouter_lib.block_keys import Span, block_keys
from mmrouter_lib.engines.vllm.events import decode_batch
from mmrouter_lib.media_identity import foreign_identity
from mmrouter_sidecar.blocks.ledger import Ledger
from mmrouter_sidecar.blocks.ledger_ops import Place
from mmrouter_sim.core import requests as sim

SIZE = 2
GPU = Place(0, 0, "GPU")
IMAGE_ID = 99


class Prompt:
    """Token ids with at most one image, and a salt. Hashes cover ``lookahead`` tokens after their blocks."""

    def __init__(
        self, ids: list[int], image: tuple[str, int, int] | None = None, salt: str | None = None, lookahead: int = 0
    ) -> None:
        self.ids = list(ids)
        self.media: list[sim.Media] = []
        self.image, self.salt, self.lookahead = image, salt, lookahead
        if image is not None and image[1] < len(ids):
            name, offset, length = image[0], image[1], min(image[2], len(ids) - image[1])
            self.ids[offset : offset + length] = [IMAGE_ID] * length
            self.media = [sim.Media(name, offset, length)]
        self.blocks = max(0, len(ids) - lookahead) // SIZE
        self.hashes: list[bytes] = []
        self.extras: list[Any] = []
        self.ahead: list[list[int]] = []
        parent = sim.first_parent(sim.sha256_cbor, "vllm-none-hash")
        for start in range(0, self.blocks * SIZE, SIZE):
            end = start + SIZE
            keys = sim.extra_keys(start, end + lookahead, self.media, salt=salt)
            self.ahead.append(self.ids[end : end + lookahead])
            hashed: Any = (keys or None, *self.ahead[-1]) if lookahead else keys
            parent = sim.block_hash(sim.sha256_cbor, parent, self.ids[start:end], hashed)
            self.hashes.append(parent)
            self.extras.append(sim.published_keys(keys))

    @property
    def predicted(self) -> Any:
        """Keys of the blocks that a request can hit: all but the one of its last token."""
        spans = [Span(m.offset, m.length, foreign_identity(m.identifier)) for m in self.media]
        keys = block_keys(array("I", self.ids), SIZE, spans, seed(salt=self.salt), self.lookahead)
        return keys[: (len(self.ids) - 1) // SIZE]

    def hashed_with(self, lookahead: int) -> "Prompt":
        return Prompt(self.ids, self.image, self.salt, lookahead)


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
            parent = sim.published_int(prompt.hashes[done - 1]) if done else None
            window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": self.window}
            extras = {"extra_keys": [prompt.extras[n] for n in kept]} if kept else {}
            hashes, ids = [sim.published_int(prompt.hashes[n]) for n in kept], prompt.ids[done * SIZE : upto * SIZE]
            events.append(stored(hashes, parent, ids=ids, size=SIZE, **window, **extras))
            self.copies.update(prompt.hashes[n] for n in kept)
            done = upto
        return events

    def drop(self, choice: int) -> list[Any]:
        if not self.held:
            return []
        gone = sorted(self.held)[choice % len(self.held)]
        self.copies[gone] -= 1
        return [removed(sim.published_int(gone))]


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
Run = tuple[list[tuple[Prompt, int | None]], Prompt, int, int]


def runs(prompts: st.SearchStrategy[Prompt]) -> st.SearchStrategy[Run]:
    """Prompts, each with what is dropped after it; the prompt asked about; an engine's window and chunk."""
    history = st.lists(st.tuples(prompts, st.none() | st.integers(0, 50)), max_size=8)
    return st.tuples(history, prompts, windows, chunks)


@given(runs(texts))
@settings(max_examples=examples(40))
def test_case_45_text_under_a_window_is_hit_as_predicted(run: Run) -> None:
    history, asked, window, chunk = run
    engine, routed = Engine(window, chunk), Routed()
    for prompt, drop in history:
        assert routed.overlap(prompt.predicted, SIZE) == engine.hit(prompt)
        routed.apply(batch(*engine.run(prompt)))
        assert set(routed.ledger.tables.get(GPU).blocks if engine.held else ()) == set(
            map(sim.published_int, engine.held)
        )
        if drop is not None:
            routed.apply(batch(*engine.drop(drop)))
    assert routed.overlap(asked.predicted, SIZE) == engine.hit(asked)
    assert not routed.ledger.counts["ragged_store"]
    assert not routed.ledger.counts["unknown_parent"]


@given(runs(mixed))
@settings(max_examples=examples(40))
def test_images_and_salts_before_a_window_are_never_over_estimated(run: Run) -> None:
    """What lies before the kept blocks is in no event; where it cannot be recomputed, nothing is claimed."""
    history, asked, window, chunk = run
    engine, routed = Engine(window, chunk), Routed()
    for prompt, drop in [*history, (asked, None)]:
        assert routed.overlap(prompt.predicted, SIZE) <= engine.hit(prompt)
        routed.apply(batch(*engine.run(prompt)))
        if drop is not None:
            routed.apply(batch(*engine.drop(drop)))
    cache = routed.ledger.tables.get(GPU)
    assert (len(cache.blocks) + len(cache.aside) if cache else 0) == len(engine.held)
    if window > 24:  # the window covers every prompt: all blocks are in the events
        assert not (cache and cache.aside)


@given(st.lists(mixed, min_size=1, max_size=6), windows, chunks)
@settings(max_examples=20)
def test_a_restarted_ledger_continues_blocks_never_stored(history: list[Prompt], window: int, chunk: int) -> None:
    engine, routed, middle = Engine(window, chunk), Routed(), Routed()
    for number, prompt in enumerate(history):
        if number == len(history) // 2:
            for op in routed.ops:
                middle.ledger.redo(op)
        events = engine.run(prompt)
        routed.apply(batch(*events))
        if number >= len(history) // 2:
            middle.apply(batch(*events))
    for ops in (None, routed.ledger.dump()):
        ledger = middle.ledger if ops is None else Ledger(seed)
        for op in ops or ():
            ledger.redo(op)
        assert ledger.groups == routed.ledger.groups
        assert ledger.tables.get(GPU) is None or ledger.tables[GPU].blocks == routed.ledger.tables[GPU].blocks
        mine, theirs = ledger.windows.dump(), routed.ledger.windows.dump()
        assert sorted(mine[0]) == sorted(theirs[0])
        assert len(mine[1]) == len(theirs[1]) == 32 * len(mine[0])


def test_an_adapters_ragged_event_is_counted_and_not_indexed() -> None:
    """The hash of its blocks holds the path that the adapter was loaded from, which no event tells."""
    ledger = Ledger(seed)
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 9}
    event = stored([1, 2], ids=list(range(6)), lora_name="l", extra_keys=[["l"], ["l"]], **window)
    ledger.apply(decode_batch(batch(event)), 0)
    assert (ledger.held, ledger.aside, ledger.counts["ragged_store"]) == (0, 2, 2)
    whole = stored([3], ids=[1, 2], lora_name="l", extra_keys=[["l"]], **window)
    ledger.apply(decode_batch(batch(whole)), 0)
    assert ledger.held == 1, "one that names all of its blocks needs no recomputation"
