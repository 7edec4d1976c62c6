"""Packed items round-trip, and anything else is refused; the processor cache, called in vLLM's order."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handover.tests.support import NAME, SETTINGS, Clock, refusal, written
from mmrouter_handover.plugin import wire
from mmrouter_handover.plugin.processor_cache import HandedOverCache, PendingItems, Processed
from mmrouter_handover.plugin.wire import PackedItem
from mmrouter_handover.shm import HandOverError


def read(data: bytes | bytearray, name: str = NAME, settings: str = SETTINGS) -> tuple[wire.Header, memoryview]:
    return wire.read_header(memoryview(data), name=name, settings=settings)


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_tensors_round_trip_aligned_and_padding_is_cleared(payloads):
    packer = wire.Packer()
    nodes = [packer.tensor("uint8", (len(payload),), memoryview(payload)) for payload in payloads]
    data = written(packer.pack(SETTINGS, NAME, "image", [wire.Field("pixels", "flat", wire.Node(nodes=nodes))], []))
    header, tensors = read(data)

    def tensor(placed: wire.Tensor) -> bytes:
        assert placed.offset % wire.ALIGNMENT == 0
        return bytes(tensors[placed.offset : placed.offset + placed.length])

    assert wire.unpack_node(header.fields[0].node, tensor) == payloads
    assert b"\xee" not in bytes(data).replace(b"\xee", b"", sum(payload.count(b"\xee") for payload in payloads))


def test_fields_and_prompt_updates_round_trip(pack):
    header, _ = read(written(pack(b"abc", b"de")))
    pixels, grid, scale, nothing = header.fields
    assert pixels == wire.Field("pixels", "flat", pixels.node, dim=1)
    assert grid == wire.Field("grid", "batched", grid.node, keep_on_cpu=True)
    assert scale == wire.Field("scale", "shared", wire.Node(number=0.5), batch_size=2)
    assert nothing == wire.Field("nothing", "batched", wire.Node())
    assert [wire.unpack_node(field.node, None) for field in (scale, nothing)] == [0.5, None]
    replaced, inserted = header.updates
    assert replaced == wire.PromptUpdate("replace", [7], [1, 7, 7, 2], b"\0\1\1\0")
    assert inserted == wire.PromptUpdate("insert", [], [9])


@given(st.data())
def test_any_damaged_item_is_refused_with_a_reason(data):
    packer = wire.Packer()
    node = packer.tensor("uint8", (5,), memoryview(b"abcde"))
    whole = written(packer.pack(SETTINGS, NAME, "image", [wire.Field("pixels", "flat", node)], []))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    found: list[tuple[wire.Header, memoryview]] = []
    if reason := refusal(lambda: found.append(read(whole[:cut]))):
        assert reason in ("refused", "truncated", "settings")
    else:
        assert len(found[0][1]) == found[0][0].length


def test_an_item_of_another_image_settings_or_version_is_refused(pack):
    data = written(pack(b"abc"))
    assert refusal(lambda: read(data, name="m1-b")) == "refused"
    assert refusal(lambda: read(data, settings="others")) == "settings"
    assert refusal(lambda: read(data[:-1])) == refusal(lambda: read(data + b"more")) == "truncated"
    assert refusal(lambda: read(altered(pack(b"abc"), version=2))) == "refused"


@pytest.mark.parametrize("tensor", [("uint8", 4096, 0), ("uint8", 1, 3), ("uint8", 1, 1 << 40), ("object", 1, 0), None])
def test_a_header_that_points_outside_its_tensors_or_nests_too_deep_is_refused(pack, tensor):
    node = wire.Node(nodes=[wire.Node(nodes=[wire.Node(nodes=[wire.Node(nodes=[wire.Node(nodes=[wire.Node()])])])])])
    if tensor:
        dtype, length, offset = tensor
        node = wire.Node(tensor=wire.Tensor(dtype, (length,), offset))
    with pytest.raises(HandOverError, match="refused"):
        read(altered(pack(b"abc"), fields=[wire.Field("pixels", "flat", node)]))


def test_a_tensor_of_another_length_than_its_shape_is_not_written():
    with pytest.raises(HandOverError, match="refused"):
        wire.Packer().tensor("int64", (2,), memoryview(bytes(15)))


def altered(item: PackedItem, **changes: Any) -> bytearray:
    """Write an item with another header over the same tensors."""
    header, tensors = read(written(item))
    return written(PackedItem(msgspec.structs.replace(header, **changes), [(0, tensors)]))


class Lru:
    """A stand-in for vLLM's cache, which returns an item once and only its updates from then on.

    The real one runs in tests/conformance.
    """

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}
        self.touched: list[str] = []
        self.released = 0

    def is_cached_item(self, mm_hash: str) -> bool:
        return mm_hash in self.held

    def get_and_update_item(self, mm_item: Any, mm_hash: str) -> Any:
        if mm_hash in self.held:
            return None, self.held[mm_hash]
        assert mm_item is not None
        self.held[mm_hash] = mm_item[1]
        return mm_item

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        self.touched.append(mm_hash)

    def release_sender_touches(self) -> None:
        self.released += 1

    def clear_cache(self) -> None:
        self.held.clear()


@pytest.fixture
def pending(clock: Clock) -> PendingItems[Processed]:
    return PendingItems(100, clock)


@pytest.fixture
def cache(pending: PendingItems[Processed]) -> HandedOverCache:
    return HandedOverCache(Lru(), pending)


def merge(cache: HandedOverCache, *names: str) -> list[Any]:
    """Make the calls of vLLM for a chat that names images without bytes."""
    assert all(cache.is_cached(list(names)))
    for name in names:
        cache.touch_sender_cache_item(name)
    try:
        return cache.get_and_update([None] * len(names), list(names))
    finally:
        cache.release_sender_touches()


def test_a_handed_over_image_is_added_to_vllms_cache_once(cache, pending):
    pending.put("a", ("item", ["update"]), 10, 5)
    assert merge(cache, "a", "a") == [("item", ["update"]), (None, ["update"])]
    assert (pending.bytes, len(pending), cache.used, cache.released, cache.touched) == (0, 0, 1, 1, ["a", "a"])
    assert merge(cache, "a") == [(None, ["update"])]
    assert cache.used == 1


def test_an_image_reported_as_cached_is_available_after_its_expiry(cache, pending, clock):
    pending.put("a", ("item", []), 10, 5)
    assert cache.is_cached_item("a")
    clock.now += 6
    pending.expire()
    assert cache.get_and_update_item(None, "a") == ("item", [])


def test_an_image_that_vllm_processed_is_added_unchanged(cache, pending):
    pending.put("a", ("item", []), 10, 5)
    assert cache.get_and_update_item(("own", []), "a") == ("own", [])
    assert not cache.is_cached_item("b")


def test_vllms_own_copy_has_precedence(cache, pending):
    cache.held["a"] = ["own update"]
    pending.put("a", ("item", []), 10, 5)
    assert merge(cache, "a") == [(None, ["own update"])]
    assert cache.used == 0


def test_a_failed_chat_leaves_nothing_claimed_and_a_reset_drops_everything(cache, pending, clock):
    pending.put("a", ("item", []), 10, 5)
    assert cache.is_cached_item("a")
    cache.release_sender_touches()
    clock.now += 6
    assert not cache.is_cached_item("a")
    pending.put("b", ("item", []), 10, 5)
    cache.held["c"] = []
    cache.clear_cache()
    assert cache.is_cached(["b", "c"]) == [False, False]
    assert pending.bytes == 0


def test_pending_items_are_bounded_expire_and_are_not_evicted(pending, clock):
    pending.put("a", ("1", []), 60, 5)
    pending.put("a", ("2", []), 50, 5)
    with pytest.raises(HandOverError, match="full"):
        pending.put("b", ("3", []), 51, 5)
    assert pending.get("a") == ("2", [])
    clock.now += 4
    assert pending.extend("a", 3)
    clock.now += 2
    assert pending.get("a")
    clock.now += 1
    assert pending.get("a") is None
    assert not pending.extend("a", 3)
    pending.put("b", ("3", []), 100, 5)
    assert (pending.bytes, len(pending)) == (100, 1)
