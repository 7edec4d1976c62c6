"""vLLM events: what real engines sent is understood whole, in every encoding, and gives the predicted keys."""

from array import array
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrouter.blocks import block_keys, chain, namespace_seed, span_extra
from mmrouter.engines.events import Batch, Cleared, Ignored, Removed, Stored
from mmrouter.engines.vllm import IGNORED_REASONS, EventError, decode_batch
from mmrouter.identity import foreign_identity, to_wire

KEY = bytes(range(32))
BLOCKS = {  # blocks of each capture that the facts rebuilt by the engine's own hash
    "llava15-real.jsonl": 128,
    "llavanext-real.jsonl": 279,
    "phi3v-nosw.jsonl": 320,
    "qwen2vl-real.jsonl": 23,
    "qwen2vl_core_uuid_clear.jsonl": 87,
    "qwen2vl_evict_byteshash.jsonl": 30,
    "qwen2vl_kvshare_lora.jsonl": 16,
    "qwen3vl-real.jsonl": 20,
}


def stored(**changes: Any) -> dict[str, Any]:
    event = {
        "type": "BlockStored",
        "block_hashes": [11, 12],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return event | changes


def payload(*events: Any, rank: int = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


def one(*events: Any) -> Any:
    (event,) = decode_batch(payload(*events)).events
    return event


def recoded(raw: bytes, change: Any) -> bytes:
    ts, events, rank = msgspec.msgpack.decode(raw)
    return msgspec.msgpack.encode([ts, [change(event) for event in events], rank])


def narrowed(event: dict[str, Any]) -> dict[str, Any]:
    def low(value: Any) -> Any:
        return int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value

    event = dict(event)
    for name in ("block_hashes", "parent_block_hash"):
        if name in event:
            value = event[name]
            event[name] = [low(item) for item in value] if isinstance(value, list) else low(value)
    return event


def signed(event: dict[str, Any]) -> dict[str, Any]:
    def wrap(value: int | None) -> int | None:
        return value - 2**64 if value is not None and value >= 2**63 else value

    event = narrowed(event)
    if "block_hashes" in event:
        event["block_hashes"] = [wrap(value) for value in event["block_hashes"]]
    if "parent_block_hash" in event:
        event["parent_block_hash"] = wrap(event["parent_block_hash"])
    return event


ORDER = {
    "BlockStored": [
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
    ],
    "BlockRemoved": ["block_hashes", "medium", "group_idx"],
    "AllBlocksCleared": [],
}


def positional(event: dict[str, Any]) -> list[Any]:
    return [event["type"], *(event.get(name) for name in ORDER[event["type"]])]


def test_every_captured_frame_is_understood(captures: Any) -> None:
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
    assert reasons == {"empty_store", "ragged_sliding_window"}
    assert reasons <= IGNORED_REASONS


def test_replayed_batches_are_the_live_ones_byte_for_byte(captures: Any) -> None:
    compared = 0
    for name in captures.names():
        live = dict(captures.frames(name))
        for _, parts in captures.replays(name):
            for seq, raw in parts:
                if seq in live:
                    assert raw == live[seq]
                    compared += 1
    assert compared > 50


@pytest.mark.parametrize("name", BLOCKS)
def test_event_keys_equal_the_keys_predicted_from_the_request(captures: Any, name: str) -> None:
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
def test_every_encoding_of_the_same_events_reads_the_same(captures: Any, change: Any) -> None:
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


def test_our_identity_comes_back_and_a_foreign_one_stays_distinct() -> None:
    identity = bytes(range(32))
    event = one(stored(extra_keys=[[[to_wire(identity), 1]], [[to_wire(identity), -1], ["u-1", 1]]]))
    foreign = foreign_identity("u-1")
    assert event.spans == ((0, identity, 1), (1, identity, -1), (1, foreign, 1))
    assert event.extras == {0: span_extra(identity, 1), 1: span_extra(identity, -1) + span_extra(foreign, 1)}


def test_lora_name_and_salt_are_told_apart_even_when_they_are_one_text() -> None:
    event = one(stored(lora_id=1, lora_name="same", extra_keys=[["same", "same"], ["same"]]))
    assert (event.lora, event.salt, event.extras) == ("same", "same", {})
    plain = one(stored(extra_keys=[["salt"], None]))
    assert (plain.lora, plain.salt, plain.extras) == (None, "salt", {})


def test_an_unnamed_lora_and_a_text_where_none_belongs_equal_nothing_predicted() -> None:
    assert one(stored(lora_id=3)).lora not in (None, "3")
    later = one(stored(parent_block_hash=10, extra_keys=[["salt"], None]))
    assert later.salt is None
    assert later.extras[0]


def test_prompt_embeddings_make_blocks_of_equal_ids_distinct() -> None:
    zeros = {"token_ids": [0, 0, 0, 0]}
    one_digest = one(stored(**zeros, extra_keys=[[b"\1" * 32], [b"\2" * 32]]))
    other = one(stored(**zeros, extra_keys=[[b"\3" * 32], [b"\2" * 32]]))
    plain = one(stored(**zeros))
    keys = [chain(e.ids, 2, 2, e.extras, 0).tolist() for e in (one_digest, other, plain)]
    assert len({key for chained in keys for key in chained}) == 6


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (stored(kv_cache_spec_kind="mamba"), "spec_mamba"),
        (stored(kv_cache_spec_kind="of a later release"), "spec_other"),
        (stored(block_hashes=[11]), "ragged_store"),
        (stored(block_hashes=[11], kv_cache_spec_kind="sliding_window"), "ragged_sliding_window"),
        (stored(block_hashes=[]), "empty_store"),
        (stored(locality="REMOTE"), "remote"),
        ({"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "locality": "REMOTE"}, "remote"),
        ({"type": "BlockRemoved", "block_hashes": [], "medium": "GPU"}, "empty_remove"),
        ({"type": "BlockMoved", "block_hashes": [1]}, "unknown_event"),
        (["BlockMoved", 1], "unknown_event"),
    ],
)
def test_what_cannot_be_indexed_is_ignored_for_a_known_reason(event: Any, reason: str) -> None:
    assert one(event) == Ignored(reason)
    assert reason in IGNORED_REASONS


def test_an_aligned_sliding_window_event_is_stored_with_its_window() -> None:
    event = one(stored(kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=1024))
    assert event.window == 1024


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
    assert (new.group, new.medium, new.ids) == (2, "CPU", array("I", [1, 2, 3, 4]))
    assert gone == Removed((2**64 - 1,), 2, "CPU")


def test_removals_in_a_row_are_one_event_per_place_and_stay_in_order() -> None:
    def gone(number: int, **more: Any) -> dict[str, Any]:
        return {"type": "BlockRemoved", "block_hashes": [number], "medium": "GPU", "group_idx": 0} | more

    batch = decode_batch(
        payload(gone(1), gone(2), gone(3, group_idx=1), gone(4, medium="CPU"), stored(), gone(5), gone(6))
    )
    removed = [event for event in batch.events if isinstance(event, Removed)]
    assert removed == [
        Removed((1, 2), 0, "GPU"),
        Removed((3,), 1, "GPU"),
        Removed((4,), 0, "CPU"),
        Removed((5, 6), 0, "GPU"),
    ]
    assert isinstance(batch.events[3], Stored)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        b"\x00" * 40,
        msgspec.msgpack.encode({"ts": 1}),
        msgspec.msgpack.encode([1.0]),
        payload("BlockStored"),
        payload([]),
        payload([5]),
        payload({"no": "type"}),
        payload(stored(block_size=0)),
        payload(stored(token_ids=[1, 2, 3, -4])),
        payload(stored(token_ids=[1, 2, 3, 2**32])),
        payload(stored(token_ids=None)),
        payload(stored(block_hashes=[b"short", 12])),
        payload(stored(extra_keys=[None])),
        payload(stored(extra_keys=[[1.5], None])),
        payload(stored(extra_keys=[[["id", 2**63]], None])),
        payload(["BlockStored", [1]]),
        payload({"type": "BlockRemoved"}),
    ],
)
def test_malformed_batches_are_an_error_that_says_so(raw: bytes) -> None:
    with pytest.raises(EventError, match=r"."):
        decode_batch(raw)


@given(st.binary(max_size=200))
def test_no_bytes_whatever_escape_as_another_error(raw: bytes) -> None:
    with suppress(EventError):
        assert isinstance(decode_batch(raw), Batch)


@given(st.data())
def test_a_damaged_frame_never_escapes_as_another_error(data: st.DataObject) -> None:
    raw = bytearray(payload(stored(extra_keys=[["s", ["u-1", 1]], None]), {"type": "AllBlocksCleared"}))
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] = data.draw(st.integers(0, 255))
    with suppress(EventError):
        assert isinstance(decode_batch(bytes(raw)), Batch)
