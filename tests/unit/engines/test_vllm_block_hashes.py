"""vLLM's block hashes, recomputed from events: every published one is aligned, and overlaps are predicted exactly."""

import re
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.engines.conftest import OWN, WINDOWED
from unit.sidecar.conftest import Routed, seed

from mmrouter_lib.block_keys import block_keys
from mmrouter_lib.cache_layout import CacheGroup
from mmrouter_lib.engines.vllm.block_hashes import Tagged, align, block_digest, root, short, tagged

SIZE = 4
BLOCKS = {  # stored blocks per capture, ragged events included; a LoRA's hash does not follow from events
    OWN: 13,
    "llava15-real.jsonl": 128,
    "llavanext-real.jsonl": 279,
    "phi3v-nosw.jsonl": 320,
    "phi3v-real_sw131072_edge.jsonl": 215,
    "phi3v-real_sw131072_probes.jsonl": 85,
    "qwen2vl-real.jsonl": 23,
    "qwen2vl_core_uuid_clear.jsonl": 87,
    "qwen2vl_evict_byteshash.jsonl": 30,
    "qwen2vl_kwargs_byteshash.jsonl": 16,
    "qwen2vl_prompt_embeds.jsonl": 5,
    "qwen2vl_render_generate.jsonl": 6,
    "qwen3vl-real.jsonl": 20,
}


def events(captures: Any, name: str) -> list[dict[str, Any]]:
    batches = [msgspec.msgpack.decode(raw)[1] for _, raw in captures.frames(name)]
    return [event for batch in batches for event in batch if event["type"] == "BlockStored"]


def low(value: Any) -> int:
    return short(value) if isinstance(value, bytes) else value


@pytest.mark.parametrize("name", BLOCKS)
def test_case_50_every_published_hash_is_aligned(captures: Any, name: str) -> None:
    """What is known of a parent is only what earlier events let us compute: nothing comes from the requests."""
    known: dict[int, bytes] = {}
    explained = 0
    for event in events(captures, name):
        parent = event["parent_block_hash"]
        digest = root() if parent is None else known[low(parent)]
        hashes = [low(value) for value in event["block_hashes"]]
        ids = array("I", event["token_ids"])
        found = align(hashes, ids, event["block_size"], event.get("extra_keys"), digest, first=parent is None)
        assert len(found.blocks) == len(hashes), "unexplained"
        for number, value in zip(found.blocks, event["block_hashes"], strict=True):
            assert found.digests[number] == value if isinstance(value, bytes) else short(found.digests[number]) == value
        known.update((short(digest), digest) for digest in found.digests)
        explained += len(hashes)
    assert explained == BLOCKS[name]


class Prompt:
    """Some blocks of a prompt with images of one repeated id, and their true digests."""

    def __init__(self, ids: list[int], images: list[tuple[str, int, int]], salt: str | None) -> None:
        self.ids = array("I", ids)
        for _, offset, length in images:
            self.ids[offset : offset + length] = array("I", [99]) * length
        self.published: list[Any] = []
        self.digests: list[bytes] = []
        for start in range(0, len(ids) - SIZE + 1, SIZE):
            entry: list[Any] = [[i, o - start] for i, o, n in images if o < start + SIZE and o + n > start]
            if salt and not start:
                entry.append(salt)
            parent = self.digests[-1] if self.digests else root()
            keys: Tagged = tagged(entry, first=not start)
            self.digests.append(block_digest(parent, self.ids[start : start + SIZE], keys))
            self.published.append(entry or None)

    def align(self, stored: list[int]) -> Any:
        hashes = [short(self.digests[number]) for number in stored]
        return align(hashes, self.ids, SIZE, [self.published[n] for n in stored], root(), first=True)


texts = st.lists(st.integers(0, 50), min_size=1, max_size=40)
subsets = st.lists(st.booleans(), min_size=10, max_size=10)


@given(texts.filter(lambda ids: len(ids) >= 8), st.integers(0, 6), st.integers(1, 20), st.integers(0, 9), st.data())
def test_a_prefix_or_suffix_with_an_image_and_a_salt_is_aligned(
    ids: list[int], offset: int, length: int, cut: int, data: st.DataObject
) -> None:
    """A suffix that starts after the image's first block still shows it; one that starts after the image does not."""
    length = min(length, len(ids) - offset)
    total = len(ids) // SIZE
    prefix = data.draw(st.booleans())
    prompt = Prompt(ids, [("a", offset, length)], "salt" if prefix else None)
    cut = min(cut, total)
    stored = list(range(cut)) if prefix else list(range(cut, total))
    found = prompt.align(stored)
    image_is_over = cut * SIZE >= offset + length
    if prefix or not image_is_over:
        assert found.blocks == stored
        assert found.digests[: len(stored)] == prompt.digests[: len(stored)] or not prefix
    elif stored:
        assert found.blocks == []


@given(texts, st.lists(st.integers(0, 2**64 - 1), max_size=5), subsets)
def test_any_subset_of_a_texts_blocks_is_aligned_and_a_hash_of_other_tokens_is_not(
    ids: list[int], strange: list[int], kept: list[bool]
) -> None:
    prompt = Prompt(ids, [], None)
    stored = [number for number, keep in zip(range(len(prompt.digests)), kept, strict=False) if keep]
    hashes = [short(prompt.digests[number]) for number in stored]
    found = align([*hashes, *strange], prompt.ids, SIZE, None, root(), first=True)
    assert found.blocks == stored[: len(found.blocks)]
    if not strange:
        assert (found.blocks, found.digests) == (stored, prompt.digests)


def test_another_seed_or_an_adapter_aligns_nothing() -> None:
    prompt = Prompt(list(range(8)), [], None)
    hashes = [short(digest) for digest in prompt.digests]
    assert align(hashes, prompt.ids, SIZE, None, root("another seed"), first=True).blocks == []
    with pytest.raises(ValueError, match="unknown kind"):
        align(hashes, prompt.ids, SIZE, [["adapter"], ["adapter"]], root(), first=False)


ENGINE_SIZE = 32  # of the captures


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("name", [name for name in BLOCKS if re.match("tiny|llava|phi3v|.*-real", name)])
def test_case_50_predicted_keys_and_predicted_hits_are_the_engines_step_by_step(captures: Any, name: str) -> None:
    routed, compared = Routed(), 0
    for step in captures.steps(name):
        predicted = block_keys(step.ids, ENGINE_SIZE, step.spans, seed(step.lora, step.salt))
        overlap = routed.overlap(predicted[: (step.prompt - 1) // ENGINE_SIZE], ENGINE_SIZE)
        # The probes begin in the middle of an engine's life; an image that it held from before is unknown to us.
        if not (name.endswith("probes.jsonl") and step.label == "report mode full, image"):
            assert overlap * ENGINE_SIZE == step.cached, step.label
        for payload in step.payloads:
            assert routed.apply(payload) <= set(predicted), step.label
        compared += 1
    assert compared >= 4
    assert not routed.ledger.counts["ragged_store"]
    assert not routed.ledger.counts["unknown_parent"]
    assert routed.ledger.aside == 0
    window, kind = (131072, "sliding_window") if "sw131072" in name else (0, "full_attention")
    assert routed.ledger.groups == (CacheGroup(0, kind, window, ENGINE_SIZE),)


@pytest.mark.usefixtures("form")
def test_case_45_a_narrow_windows_blocks_are_predicted_or_counted_and_no_hit_is_over_estimated(captures: Any) -> None:
    """The window is 1,024 tokens and prompts have up to 2,123: many parents were never stored, some images never named.

    What follows an image before the window is not predicted, and a hit there is bounded from below, by nothing here.
    """
    routed, hits = Routed(), {}
    for step in captures.steps(WINDOWED):
        predicted = block_keys(step.ids, ENGINE_SIZE, step.spans, seed(step.lora, step.salt))
        overlap = routed.overlap(predicted[: (step.prompt - 1) // ENGINE_SIZE], ENGINE_SIZE)
        hits[step.label] = (overlap * ENGINE_SIZE, step.cached)
        for payload in step.payloads:
            assert routed.apply(payload) <= set(predicted), step.label
    published = sum(len(event["block_hashes"]) for event in events(captures, WINDOWED))
    assert routed.ledger.groups == (CacheGroup(0, "sliding_window", 1024, ENGINE_SIZE),)
    assert routed.ledger.counts == {"stored": 108, "ragged_store": 38, "unknown_parent": 58}
    assert published == routed.ledger.counts.total() == 204
    assert all(promised <= cached for promised, cached in hits.values())
    differing = {label: hit for label, hit in hits.items() if hit[0] != hit[1]}
    assert differing == {"image before the window again": (0, 1664)}
    assert hits["text beyond the window, longer"] == (1792, 1792)
    assert hits["image inside the window again"] == (1184, 1184)


def test_the_narrow_windows_stream_has_empty_events_and_parents_that_were_never_stored(captures: Any) -> None:
    """Otherwise the test above would prove little."""
    seen: set[int] = set()
    empty = orphans = 0
    for event in events(captures, WINDOWED):
        empty += not event["block_hashes"]
        orphans += event["parent_block_hash"] not in {None, *seen}
        seen.update(event["block_hashes"])
    assert (empty, orphans) == (3, 3)
