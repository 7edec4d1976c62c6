"""SGLang's recorded events decode in both encodings; events that cannot be indexed have a reason."""

from array import array
from typing import Any

import msgspec
import pytest
from unit.engines.conftest import batch as encode
from unit.engines.conftest import capture_rows, rows
from unit.engines.sglang_pages import page_digest, page_hashes

from mmrouter_lib.engines.base.events import Cleared, EventError, Ignored, Removed, Stored
from mmrouter_lib.engines.sglang.events import decode_batch

pytestmark = pytest.mark.usefixtures("form")

U64 = (1 << 64) - 1
ORDER = {
    "BlockStored": "block_hashes parent_block_hash token_ids block_size lora_id medium cache_salt session_id lora_name",
    "BlockRemoved": "block_hashes medium",
    "AllBlocksCleared": "",
}


STORED = {"type": "BlockStored", "block_hashes": [-5, 7], "parent_block_hash": None, "block_size": 2}
REMOVED = {"type": "BlockRemoved"}
STORED |= {"token_ids": [1, 2, 2**62, 4], "lora_id": None, "medium": "GPU"}


def stored(**fields: Any) -> dict[str, Any]:
    return STORED | fields


def payloads() -> list[bytes]:
    return [bytes.fromhex(payload) for row in rows() for payload in row.get("payloads", ())]


def test_case_15_recorded_events_keep_every_id_and_every_hash() -> None:
    seen = 0
    for payload in payloads():
        _, wire, rank = msgspec.msgpack.decode(payload)
        batch = decode_batch(payload)
        assert (batch.rank, len(batch.events)) == (rank, len(wire))
        for event, raw in zip(batch.events, wire, strict=True):
            if isinstance(event, Stored):
                assert event.ids.typecode == "Q"
                assert event.ids.tolist() == raw["token_ids"]
                assert list(event.hashes) == [number & U64 for number in raw["block_hashes"]]
                assert (event.salt, event.medium, event.block_size) == (raw.get("cache_salt"), "GPU", raw["block_size"])
                assert not event.extras
                assert not event.spans
                if event.parent is None:
                    hashes = page_hashes(event.ids, event.block_size, cache_salt=event.salt)
                    assert list(event.hashes) == hashes.tolist()
                seen += 1
    assert seen > 8


def test_all_captures_are_decoded_completely() -> None:
    kinds = {Stored: 0, Removed: 0, Cleared: 0}
    for name in ("qwen2_vl.page1.jsonl", "qwen3_vl.page4.jsonl"):
        for line in capture_rows(name):
            for frame in line["frames"]:
                if frame["payload_hex"]:
                    for event in decode_batch(bytes.fromhex(frame["payload_hex"])).events:
                        kinds[type(event)] += 1  # type: ignore[index]
    assert all(kinds.values())
    for line in capture_rows("offline.jsonl"):
        if line["kind"] == "frame":
            assert decode_batch(bytes.fromhex(line["frames_hex"][2])).rank == line["dp_rank"]


def test_a_salt_in_the_metadata_of_an_event_in_array_form_is_the_events_salt() -> None:
    """So 0.5.19 writes it; events without a salt end before it."""
    plain = ["BlockStored", [-5, 7], None, [1, 2, 3, 4], 2, None, "GPU"]
    with_salt, without = decode_batch(encode([*plain, {"cache_salt": "tenant"}], plain)).events
    assert isinstance(with_salt, Stored)
    assert isinstance(without, Stored)
    assert (with_salt.salt, without.salt) == ("tenant", None)
    assert with_salt.ids == without.ids


@pytest.mark.parametrize("payload", payloads())
def test_the_older_positional_form_decodes_equally(payload: bytes) -> None:
    ts, wire, rank = msgspec.msgpack.decode(payload)
    old = [[event["type"], *(event.get(name) for name in ORDER[event["type"]].split())] for event in wire]
    assert decode_batch(msgspec.msgpack.encode([ts, old, rank])) == decode_batch(payload)


def test_one_event_carries_many_pages_and_its_fields() -> None:
    extra = {"cache_salt": "tenant", "medium": "CPU_PINNED", "session_id": "s", "lora_name": "ad", "new_field": 1}
    (event,) = decode_batch(encode(stored(parent_block_hash=-1, **extra), rank=3)).events
    ids = array("Q", [1, 2, 2**62, 4])
    assert event == Stored((U64 - 4, 7), U64, ids, 2, {}, (), "ad", "tenant", 0, "CPU_PINNED")


def test_tiers_are_separate_media() -> None:
    gone = [REMOVED | {"block_hashes": [-5], "medium": medium} for medium in ("GPU", "DISK", "EXTERNAL")]
    events = decode_batch(encode(*gone, REMOVED | {"block_hashes": [9]})).events
    low, media = U64 - 4, ("GPU", "DISK", "EXTERNAL")
    assert events == (*(Removed((low,), 0, medium) for medium in media), Removed((9,), 0, "GPU"))


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (stored(token_ids=[[1, 2], [2, 3], [3, 4], [4, 5]]), "bigram_tokens"),
        (stored(block_hashes=[], token_ids=[]), "empty_store"),
        (stored(token_ids=[1, 2, 3]), "ragged_store"),
        ({"type": "BlockRemoved", "block_hashes": []}, "empty_remove"),
        ({"type": "BlockMoved", "block_hashes": [1]}, "unknown_event"),
    ],
)
def test_events_that_cannot_be_indexed_are_ignored_with_a_reason(event: Any, reason: str) -> None:
    batch = decode_batch(encode(event, {"type": "AllBlocksCleared"}))
    assert batch.events == (Ignored(reason), Cleared())


@pytest.mark.parametrize(
    "payload",
    [
        *[b"", b"\xc1", msgspec.msgpack.encode({"ts": 1})],
        *(encode(stored(block_size=size)) for size in (0, 2**31, 2**64 - 1)),
        *map(encode, [7, [], {"type": 5}, stored(block_hashes=[b"12345678", 7])]),
        *(encode(stored(token_ids=[1, 2, 3, wrong])) for wrong in (-4, "x")),
    ],
)
def test_garbage_raises_event_error(payload: bytes) -> None:
    with pytest.raises(EventError):
        decode_batch(payload)


def test_a_page_without_a_wide_id_is_hashed_in_small_words() -> None:
    """The width is chosen page by page, so text pages before an image hash as they do without one."""
    assert page_digest([1, 2**32], b"") != page_digest([1, 0], b"")
    assert page_hashes([1, 2, 2**40, 4], 2)[0] == page_hashes([1, 2], 2)[0]
