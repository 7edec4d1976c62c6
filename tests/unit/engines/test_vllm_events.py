"""vLLM's recorded events decode completely in every encoding, and their keys equal the predicted ones."""

from array import array
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.engines.conftest import OWN, stored
from unit.engines.conftest import batch as payload

from mmrouter_lib.block_keys import Span, block_keys, chain, namespace_seed, span_extra
from mmrouter_lib.engines.base.events import Batch, Cleared, EventError, Ignored, Offloaded, Ragged, Removed, Stored
from mmrouter_lib.engines.vllm.events import decode_batch
from mmrouter_lib.media_identity import foreign_identity, to_wire

pytestmark = pytest.mark.usefixtures("form")

KEY = bytes(range(32))
BLOCKS = {  # blocks of each capture that the facts rebuilt by the engine's own hash
    OWN: 13,
    "llava15-real.jsonl": 128,
    "llavanext-real.jsonl": 279,
    "phi3v-nosw.jsonl": 320,
    "qwen2vl-real.jsonl": 23,
    "qwen2vl_core_uuid_clear.jsonl": 87,
    "qwen2vl_evict_byteshash.jsonl": 30,
    "qwen2vl_kvshare_lora.jsonl": 16,
    "qwen2vl_kwargs_byteshash.jsonl": 16,
    "qwen3vl-real.jsonl": 20,
}


def decoded(wire_event: Any) -> Any:
    (event,) = decode_batch(payload(wire_event)).events
    return event


def recoded(raw: bytes, change: Any) -> bytes:
    ts, events, rank = msgspec.msgpack.decode(raw)
    return msgspec.msgpack.encode([ts, [change(event) for event in events], rank])


def narrowed(event: dict[str, Any], signed_from: int = 2**64) -> dict[str, Any]:
    def low(value: Any) -> Any:
        number = int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value
        return number - 2**64 if number is not None and number >= signed_from else number

    hashes = {name: event[name] for name in ("block_hashes", "parent_block_hash") if name in event}
    return event | {name: [*map(low, h)] if isinstance(h, list) else low(h) for name, h in hashes.items()}


def signed(event: dict[str, Any]) -> dict[str, Any]:
    return narrowed(event, signed_from=2**63)


ORDER = {
    "BlockStored": "block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys group_idx "
    "kv_cache_spec_kind kv_cache_spec_sliding_window",
    "BlockRemoved": "block_hashes medium group_idx",
    "AllBlocksCleared": "",
}


def positional(event: dict[str, Any]) -> list[Any]:
    return [event["type"], *(event.get(name) for name in ORDER[event["type"]].split())]


def test_every_captured_frame_is_decoded(captures: Any) -> None:
    reasons, events = set(), 0
    for name in captures.names():
        payloads = [raw for _, raw in captures.frames(name)]
        payloads += [raw for _, parts in captures.replays(name) for _, raw in parts]
        for raw in payloads:
            for event in decode_batch(raw).events:
                events += 1
                if isinstance(event, Ignored):
                    reasons.add(event.reason)
    assert events > 200
    assert reasons == set()


@pytest.mark.parametrize("name", BLOCKS)
def test_case_50_event_keys_equal_the_keys_predicted_from_the_request(captures: Any, name: str) -> None:
    """Nothing is learned from the events: identities come from file bytes and uuids, ids from the answer."""
    key_of: dict[int, int] = {}
    equal = 0
    for step in captures.steps(name):
        seed = namespace_seed(KEY, model="m", lora=step.lora, salt=step.salt)
        predicted = list(block_keys(step.ids, 32, step.spans, seed))
        for raw in step.payloads:
            for event in decode_batch(raw).events:
                if not isinstance(event, Stored):
                    continue
                parent = (
                    namespace_seed(KEY, model="m", lora=event.lora, salt=event.salt)
                    if event.parent is None
                    else key_of[event.parent]
                )
                keys = list(chain(event.ids, event.block_size, len(event.hashes), event.extras, parent))
                key_of.update(zip(event.hashes, keys, strict=True))
                first = predicted.index(keys[0])
                assert keys == predicted[first : first + len(keys)], step.label
                equal += len(keys)
    assert equal == BLOCKS[name]


@pytest.mark.parametrize("change", [narrowed, signed, positional, lambda e: e | {"later_field": [1]}])
def test_case_40_every_encoding_of_the_same_events_reads_the_same(captures: Any, change: Any) -> None:
    for name in ("qwen2vl_evict_byteshash.jsonl", "qwen2vl_core_uuid_clear.jsonl", "qwen2vl_kvshare_lora.jsonl"):
        for _, raw in captures.frames(name):
            assert decode_batch(recoded(raw, change)) == decode_batch(raw)


def test_positional_events_of_older_releases_may_end_early() -> None:
    raw = msgspec.msgpack.encode([1.5, [["BlockStored", [-1], 7, [1, 2], 2, None], ["BlockRemoved", [5]]]])
    batch = decode_batch(raw)
    new, gone = batch.events
    assert isinstance(new, Stored)
    assert (new.hashes, new.parent, new.group, new.medium) == ((2**64 - 1,), 7, 0, "GPU")
    assert gone == Removed((5,), 0, "GPU")
    assert batch.rank == 0


def test_a_router_identity_is_recovered_and_a_foreign_one_stays_distinct() -> None:
    identity = bytes(range(32))
    event = decoded(stored(extra_keys=[[[to_wire(identity), 1]], [[to_wire(identity), -1], ["u-1", 1]]]))
    foreign = foreign_identity("u-1")
    assert event.spans == ((0, identity, 1), (1, identity, -1), (1, foreign, 1))
    assert event.extras == {0: span_extra(identity, 1), 1: span_extra(identity, -1) + span_extra(foreign, 1)}


def test_lora_name_and_salt_are_distinguished_even_when_equal() -> None:
    event = decoded(stored(lora_id=1, lora_name="same", extra_keys=[["same", "same"], ["same"]]))
    assert (event.lora, event.salt, event.extras) == ("same", "same", {})
    plain = decoded(stored(extra_keys=[["salt"], None]))
    assert (plain.lora, plain.salt, plain.extras) == (None, "salt", {})


def test_an_unnamed_lora_and_an_unexpected_text_equal_no_prediction() -> None:
    assert decoded(stored(lora_id=3)).lora not in (None, "3")
    later = decoded(stored(parent_block_hash=10, extra_keys=[["salt"], None]))
    assert later.salt is None
    assert later.extras[0]


def test_prompt_embeddings_make_blocks_of_equal_ids_distinct() -> None:
    zeros = {"token_ids": [0, 0, 0, 0]}
    first = decoded(stored(**zeros, extra_keys=[[b"\1" * 32], [b"\2" * 32]]))
    other = decoded(stored(**zeros, extra_keys=[[b"\3" * 32], [b"\2" * 32]]))
    plain = decoded(stored(**zeros))
    keys = [chain(e.ids, 2, 2, e.extras, 0).tolist() for e in (first, other, plain)]
    assert len({key for chained in keys for key in chained}) == 6


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (stored(block_hashes=[], token_ids=[1]), "empty_store"),
        (stored(locality="REMOTE"), "remote"),
        ({"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "locality": "REMOTE"}, "remote"),
        ({"type": "BlockRemoved", "block_hashes": [], "medium": "GPU"}, "empty_remove"),
        ({"type": "BlockMoved", "block_hashes": [1]}, "unknown_event"),
        (["BlockMoved", 1], "unknown_event"),
    ],
)
def test_events_that_cannot_be_indexed_are_ignored_with_a_reason(event: Any, reason: str) -> None:
    assert decoded(event) == Ignored(reason)


@pytest.mark.parametrize("kind", ["mamba", "chunked_local_attention", "sliding_window_mla", "of a later release"])
def test_case_45_groups_of_every_kind_keep_their_kind_and_what_recomputation_needs(kind: str) -> None:
    extras = [[["u-1", 0]], None]
    event = decoded(stored(kv_cache_spec_kind=kind, group_idx=2, extra_keys=extras))
    assert (event.group, event.kind, event.published) == (2, kind, extras)


@pytest.mark.parametrize("hashes", [[], [12]])
def test_fewer_blocks_than_tokens_are_ragged_and_keep_what_recomputation_needs(hashes: list[int]) -> None:
    published = [[["u-1", -1]]] if hashes else None
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 9, "group_idx": 1}
    event = decoded(stored(block_hashes=hashes, extra_keys=published, parent_block_hash=b"\1" * 32, **window))
    ids, parent = array("I", [1, 2, 3, 4]), 0x0101010101010101
    assert event == Ragged(tuple(hashes), parent, ids, 2, published, None, 1, "GPU", 9, "sliding_window")


def test_case_43_tokens_of_fewer_blocks_than_hashes_are_those_of_the_first_blocks() -> None:
    event = decoded(stored(token_ids=[1, 2, 3], extra_keys=[[["u-1", 0]], [["u-1", -2]]]))
    assert (event.hashes, event.ids) == ((11, 12), array("I", [1, 2, 3]))
    assert set(event.extras) == {0}


def test_case_41_only_a_pair_names_an_image_whatever_its_text() -> None:
    """A bare text says nothing of a place: it is the salt, the adapter's name, or makes its block equal nothing."""
    for text in ("a" * 63, "a" * 64, "x"):
        bare = decoded(stored(parent_block_hash=7, extra_keys=[[text], None]))
        assert (bare.spans, bare.salt) == ((), None)
        pair = decoded(stored(parent_block_hash=7, extra_keys=[[[text, 1]], None]))
        assert pair.spans == ((0, foreign_identity(text), 1),)
        assert bare.extras[0] != pair.extras[0]
    assert decoded(stored(lora_name="b" * 64, lora_id=1, extra_keys=[["b" * 64], ["b" * 64]])).extras == {}


def test_case_44_two_images_in_one_block_keep_their_own_places() -> None:
    event = decoded(stored(token_ids=list(range(32)), block_size=16, extra_keys=[[["a", -3], ["b", 9]], [["b", -7]]]))
    a, b = foreign_identity("a"), foreign_identity("b")
    assert event.spans == ((0, a, -3), (0, b, 9), (1, b, -7))
    # The same two images predicted from a prompt whose second block is this event's first one.
    ids = array("I", [*range(16), *range(32)])
    spans = [Span(13, 6, a), Span(25, 20, b)]
    before = block_keys(ids, 16, spans, 5)
    assert list(chain(event.ids, 16, 2, event.extras, before[0])) == list(before[1:])


@pytest.mark.parametrize("ahead", [[[3], [5]], [[3, 4], [5, 6]]])
def test_an_event_with_a_lookahead_has_the_keys_of_the_prompt_whose_next_tokens_it_names(ahead: Any) -> None:
    """The image begins right after the event's first block, in whose hash it is."""
    lookahead, image = len(ahead[0]), foreign_identity("a")
    extras = [[["a", 2]], [["a", 0]]]
    event = decoded(stored(token_ids=[1, 2, 3, 4], extra_keys=extras, lookahead_token_ids=ahead))
    assert (event.lookahead, event.spans) == (lookahead, ((1, image, 0),))
    ids = array("I", [1, 2, 3, 4, 5, 6])
    predicted = block_keys(ids, 2, [Span(2, 2, image)], 5, lookahead)
    assert chain(event.ids, 2, 2, event.extras, 5) == predicted[:2]


@pytest.mark.parametrize("ahead", [[[3]], [[3], [5], [7]], [[2**32], [5]]])
def test_lookaheads_that_are_not_of_the_events_blocks_are_errors(ahead: Any) -> None:
    with pytest.raises(EventError, match="lookahead"):
        decoded(stored(lookahead_token_ids=ahead))


@pytest.mark.parametrize(("tokens", "hashes"), [([1, 2, 3], 2), ([1, 2, 3, 4], 1), ([1, 2, 3, 4], 0)])
def test_blocks_with_a_lookahead_may_be_fewer_than_tokens_or_than_hashes(tokens: list[int], hashes: int) -> None:
    event = decoded(stored(block_hashes=[11, 12][:hashes], token_ids=tokens, lookahead_token_ids=[[3], [5]][:hashes]))
    assert (len(event.hashes), event.lookahead) == (hashes, int(hashes > 0))
    assert isinstance(event, Ragged) or event.extras.keys() == {0}


def test_an_event_with_a_window_keeps_its_published_extra_keys() -> None:
    published = [[["u-1", 0]], [["u-1", -2]]]
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 1024}
    event = decoded(stored(extra_keys=published, **window))
    assert (event.window, event.kind, event.published) == (1024, "sliding_window", published)
    assert decoded(stored(kv_cache_spec_kind="full_attention", extra_keys=published)).published is None


def test_groups_media_ranks_and_clears_are_kept_apart() -> None:
    raw = payload(
        {"type": "AllBlocksCleared"},
        stored(group_idx=2, medium="CPU", ownership="tier", session_id="s"),
        {"type": "BlockRemoved", "block_hashes": [b"\0" * 24 + b"\xff" * 8], "medium": "CPU", "group_idx": 2},
        rank=3,
    )
    batch = decode_batch(raw)
    assert (batch.rank, batch.sent) == (3, 1.5)
    cleared, new, gone = batch.events
    assert cleared == Cleared()
    assert new == Offloaded(new.hashes, 2, "CPU")
    assert gone == Removed((2**64 - 1,), 2, "CPU")


PLACEHOLDER = {"parent_block_hash": None, "token_ids": [], "block_size": 0, "lora_id": None, "lora_name": None}
"""What the offloading connector fills in where it does not describe a block."""


@pytest.mark.parametrize("medium", ["CPU", "STORAGE"])
def test_blocks_of_lower_tiers_are_named_by_their_hashes_whether_or_not_they_are_described(medium: str) -> None:
    bare = {"type": "BlockStored", "block_hashes": [7], "medium": medium, "group_idx": 0, **PLACEHOLDER}
    described = stored(medium=medium, group_idx=0)
    batch = decode_batch(payload(bare, described, bare | {"block_hashes": []}, bare | {"locality": "REMOTE"}))
    assert batch.events[0] == Offloaded((7,), 0, medium)
    assert batch.events[1] == Offloaded(decoded(stored()).hashes, 0, medium)
    assert batch.events[2:] == (Ignored("empty_store"), Ignored("remote"))


def test_removals_in_a_row_are_one_event_per_place_and_stay_in_order() -> None:
    def gone(number: int, **more: Any) -> dict[str, Any]:
        return {"type": "BlockRemoved", "block_hashes": [number], "medium": "GPU", "group_idx": 0} | more

    batch = decode_batch(
        payload(gone(1), gone(2), gone(3, group_idx=1), gone(4, medium="CPU"), stored(), gone(5), gone(6))
    )
    removed = [event for event in batch.events if isinstance(event, Removed)]
    assert removed[:2] == [Removed((1, 2), 0, "GPU"), Removed((3,), 1, "GPU")]
    assert removed[2:] == [Removed((4,), 0, "CPU"), Removed((5, 6), 0, "GPU")]
    assert isinstance(batch.events[3], Stored)


@pytest.mark.parametrize(
    "raw",
    [
        *[b"", b"\xc1", b"\x00" * 40, msgspec.msgpack.encode({"ts": 1}), msgspec.msgpack.encode([1.0])],
        *map(payload, ["BlockStored", [], [5], {"no": "type"}, ["BlockStored", [1]], {"type": "BlockRemoved"}]),
        *(payload(stored(token_ids=ids)) for ids in (None, [1, 2, 3, -4], [1, 2, 3, 2**32])),
        *(payload(stored(extra_keys=extra)) for extra in ([None], [[1.5], None], [[["id", 2**63]], None])),
        *(payload(stored(block_size=size)) for size in (0, 2**31, 2**64 - 1)),
        payload(stored(block_hashes=[b"short", 12])),
    ],
)
def test_malformed_batches_raise_event_error(raw: bytes) -> None:
    with pytest.raises(EventError, match=r"."):
        decode_batch(raw)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_no_other_error(raw: bytes) -> None:
    with suppress(EventError):
        assert isinstance(decode_batch(raw), Batch)


@given(st.data())
def test_a_damaged_frame_raises_no_other_error(data: st.DataObject) -> None:
    raw = bytearray(payload(stored(extra_keys=[["s", ["u-1", 1]], None]), {"type": "AllBlocksCleared"}))
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] = data.draw(st.integers(0, 255))
    with suppress(EventError):
        assert isinstance(decode_batch(bytes(raw)), Batch)
