"""The recomputed SGLang identities and hashes equal those of a real engine."""

import hashlib
import re
from array import array
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from unit.engines.conftest import SGLANG_PLACEHOLDER, capture_rows, events, row, rows, sglang_captures
from unit.engines.sglang_pages import page_digest, page_hashes, salt_root

from mmrouter_lib.engines.sglang import identity

QWEN3 = identity.Fingerprint(
    transformers="5.19.0",
    processor_class="sglang.srt.multimodal.processors.qwen_vl.QwenVLImageProcessor",
    wrapper_class="transformers.models.qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor",
    model_type="qwen3_vl",
    architectures=("Qwen3VLForConditionalGeneration",),
)
QWEN25 = replace(
    QWEN3,
    wrapper_class="transformers.models.qwen2_5_vl.processing_qwen2_5_vl.Qwen2_5_VLProcessor",
    model_type="qwen2_5_vl",
    architectures=("Qwen2_5_VLForConditionalGeneration",),
)


def rebuilt(stored: Iterable[dict[str, Any]]) -> tuple[int, int]:
    """Rebuild every hash of stored events from their tokens; (equal, different). Blocks of unknown parents are left."""
    digests: dict[int, bytes] = {}
    equal = different = 0
    for event in stored:
        if event["type"] != "BlockStored":
            continue
        parent, size = event["parent_block_hash"], event["block_size"]
        if parent is not None and parent not in digests:
            continue
        prior = salt_root(event.get("cache_salt")) if parent is None else digests[parent]
        for number, published in enumerate(event["block_hashes"]):
            prior = page_digest(event["token_ids"][number * size : (number + 1) * size], prior)
            digests[published] = prior
            if int.from_bytes(prior[:8], "big", signed=True) == published:
                equal += 1
            else:
                different += 1
    return equal, different


def test_every_hash_of_the_excerpt_is_rebuilt() -> None:
    for family in ("qwen2_vl", "qwen3_vl"):
        equal, different = rebuilt(event for row in rows(family) if "payloads" in row for event in events(row))
        assert different == 0
        assert equal > 20


@pytest.mark.parametrize(("name", "hashes"), [("qwen2_vl.page1.jsonl", 5933), ("qwen3_vl.page4.jsonl", 1459)])
def test_case_15_every_published_hash_of_a_capture_is_rebuilt(name: str, hashes: int) -> None:
    stored = [
        event
        for line in capture_rows(name)
        for frame in line["frames"]
        if isinstance(frame["decoded"], list)
        for event in frame["decoded"][1]
    ]
    assert rebuilt(stored) == (hashes, 0)


def test_offline_hashes_items_and_salts_are_rebuilt() -> None:
    checked = 0
    for line in capture_rows("offline.jsonl"):
        match line:
            case {"kind": "feature_hash", "item_hash_hex": number, "pad_values": values} | {
                "kind": "caller_hash",
                "hex": number,
                "pad_values": values,
            }:
                assert identity.sentinels(int(number, 16), legacy=False) == tuple(values)
            case {"kind": "radix", "format": "default", "step": "first" | "salt", "events": events}:
                published = [number & (1 << 64) - 1 for event in events for number in event["block_hashes"]]
                salt = line["kwargs"].get("cache_salt")
                assert page_hashes(line["tokens"], line["page_size"], cache_salt=salt).tolist() == published
            case {"kind": "padding", "input_ids": ids, "padded": padded}:
                assert identity.run_ids(identity.sentinels(0xAA, legacy=False), 6).tolist() == padded[3:9]
                assert identity.run_ids(identity.sentinels(0xBB, legacy=False), 3).tolist() == padded[12:15]
                assert len(ids) == len(padded)
            case _:
                continue
        checked += 1
    assert checked > 20


def by_bytes(sha256: str, fingerprint: identity.Fingerprint = QWEN3) -> tuple[int, ...]:
    """The sentinels that the artifact path gives to an image."""
    return identity.sentinels(identity.artifact_hash_of(sha256, fingerprint, {}), legacy=False)


def published_sentinels(taken: dict[str, Any]) -> list[int]:
    tokens = (token for event in events(taken) for token in event.get("token_ids", ()))
    return [token for token in tokens if token >= identity.SENTINEL_BASE]


def test_the_artifact_path_is_predicted_from_encoded_bytes_alone() -> None:
    for case in ("chat_A", "chat_B"):
        taken = row("qwen3_vl", case)
        assert identity.run_ids(by_bytes(taken["sha256"]), 12).tolist() == published_sentinels(taken)


def test_the_flag_moves_qwen25_to_the_artifact_path() -> None:
    text = (sglang_captures() / "qwen2_5_vl.preprocess_cache.txt").read_text()
    found = re.search(r"sentinels of image A: \[(.*)\]", text)
    assert found
    seen = tuple(int(number) for number in found[1].split(","))
    sha = row("qwen3_vl", "chat_A")["sha256"]
    assert by_bytes(sha, QWEN25) == seen


def test_caller_given_hashes_become_the_item_hash() -> None:
    for case in ("gen_A_mm_hash16", "gen_A_mm_hash64"):
        taken = row("qwen2_vl", case)
        assert set(published_sentinels(taken)) == set(identity.sentinels(int(taken["mm_hashes"][0], 16), legacy=False))


def test_a_prompt_with_sentinels_has_the_published_hashes() -> None:
    """From the engine's returned ids, which have plain placeholders, to the hashes of its events."""
    taken = row("qwen3_vl", "chat_A")
    ids = array("Q", taken["prompt_token_ids"])
    start, length = ids.index(SGLANG_PLACEHOLDER), ids.count(SGLANG_PLACEHOLDER)
    ids[start : start + length] = identity.run_ids(by_bytes(taken["sha256"]), length)
    published = [number & (1 << 64) - 1 for event in events(taken) for number in event["block_hashes"]]
    assert page_hashes(ids, 4).tolist()[: len(published)] == published


def test_case_16_the_older_form_repeats_one_thirty_bit_value() -> None:
    number = 0x0F0F_1234_5678_9ABC
    assert identity.sentinels(number, legacy=True) == (1_000_000 + number % 2**30,)
    assert identity.run_ids(identity.sentinels(number, legacy=True), 5).tolist() == [1_000_000 + number % 2**30] * 5
    assert all(map(identity.legacy_sentinels, ("0.5.22", "0.5.15.post1")))
    assert not any(map(identity.legacy_sentinels, ("0.5.23", "0.5.23.post1+cu130", "0.6.0rc1", "")))


@given(number=st.integers(0, 2**256 - 1), length=st.integers(0, 40))
def test_case_16_four_values_cycle_from_the_start_of_a_run(number: int, length: int) -> None:
    values = identity.sentinels(number, legacy=False)
    ids = identity.run_ids(values, length)
    assert len(ids) == length
    assert all(token == values[place % 4] for place, token in enumerate(ids))
    assert all(identity.SENTINEL_BASE <= value < identity.SENTINEL_BASE + 2**62 for value in values)
    assert values == identity.sentinels(number & (2**64 - 1), legacy=False)


@given(st.lists(st.integers(0, 2**63), max_size=30), st.integers(1, 9), st.one_of(st.none(), st.text(max_size=5)))
def test_pages_are_chained_and_salted(ids: list[int], size: int, salt: str | None) -> None:
    hashes = page_hashes(ids, size, cache_salt=salt)
    assert len(hashes) == len(ids) // size
    assert page_hashes(ids[: size * 2], size, cache_salt=salt) == hashes[:2]
    if hashes:
        assert set(hashes).isdisjoint(page_hashes(ids, size, cache_salt=f"{salt}x"))
        assert set(hashes).isdisjoint(page_hashes([ids[0] + 1, *ids[1:]], size, cache_salt=salt))


IMAGE, OTHER = (hashlib.sha256(data).hexdigest() for data in (b"image", b"other"))


def test_every_field_of_fingerprint_and_options_changes_the_identity() -> None:
    base = identity.artifact_hash_of(IMAGE, QWEN3, {})
    others = [
        identity.artifact_hash_of(OTHER, QWEN3, {}),
        identity.artifact_hash_of(IMAGE, QWEN25, {}),
        identity.artifact_hash_of(IMAGE, QWEN3, {"detail": "high"}),
        *(
            identity.artifact_hash_of(IMAGE, replace(QWEN3, **{name: value}), {})
            for name, value in [
                ("transformers", "5.20.0"),
                ("revision", "main"),
                ("feature_transport", "cuda_ipc"),
                ("image_processor_backend", "pil"),
                ("mm_process_config", {"image": {"max_pixels": 1003520}}),
                ("gpu_image_decode", False),
            ]
        ),
    ]
    assert len({base, *others}) == len(others) + 1
    assert identity.artifact_hash_of(IMAGE, QWEN3.digest(), {}) == base


def test_values_of_different_types_have_different_canonical_forms() -> None:
    values: list[Any] = [None, False, 0, 0.0, "0", [], {}, [0], {"0": 0}]
    assert len({identity.canonical_json(value) for value in values}) == len(values)
    with pytest.raises(ValueError, match="canonical"):
        identity.canonical_json({1, 2})
