"""The processor cache with handed-over images, called in the order in which vLLM calls it."""

from typing import Any

import pytest

from handover.tests.support import Clock
from mmrouter_handover.plugin.processor_cache import HandedOverCache, PendingItems, Processed
from mmrouter_handover.plugin.wire import HandOverFailed


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
def lru() -> Lru:
    return Lru()


@pytest.fixture
def cache(lru: Lru, pending: PendingItems[Processed]) -> HandedOverCache:
    return HandedOverCache(lru, pending)


def merge(cache: HandedOverCache, *names: str) -> list[Any]:
    """Make the calls of vLLM for a chat that names images without bytes."""
    assert all(cache.is_cached(list(names)))
    for name in names:
        cache.touch_sender_cache_item(name)
    try:
        return cache.get_and_update([None] * len(names), list(names))
    finally:
        cache.release_sender_touches()


def test_a_handed_over_image_is_added_to_vllms_cache_once(
    cache: HandedOverCache, lru: Lru, pending: PendingItems[Processed]
):
    pending.put("a", ("item", ["update"]), 10, 5)
    assert merge(cache, "a", "a") == [("item", ["update"]), (None, ["update"])]
    assert (pending.bytes, len(pending), cache.used, lru.released, lru.touched) == (0, 0, 1, 1, ["a", "a"])
    assert merge(cache, "a") == [(None, ["update"])]
    assert cache.used == 1


def test_an_image_reported_as_cached_is_available_after_its_expiry(
    cache: HandedOverCache, pending: PendingItems[Processed], clock: Clock
):
    pending.put("a", ("item", []), 10, 5)
    assert cache.is_cached_item("a")
    clock.now += 6
    pending.expire()
    assert cache.get_and_update_item(None, "a") == ("item", [])


def test_an_image_that_vllm_processed_is_added_unchanged(cache: HandedOverCache, pending: PendingItems[Processed]):
    pending.put("a", ("item", []), 10, 5)
    assert cache.get_and_update_item(("own", []), "a") == ("own", [])
    assert not cache.is_cached_item("b")


def test_vllms_own_copy_has_precedence(cache: HandedOverCache, lru: Lru, pending: PendingItems[Processed]):
    lru.held["a"] = ["own update"]
    pending.put("a", ("item", []), 10, 5)
    assert merge(cache, "a") == [(None, ["own update"])]
    assert cache.used == 0


def test_a_failed_chat_leaves_nothing_claimed_and_a_reset_drops_everything(
    cache: HandedOverCache, lru: Lru, pending: PendingItems[Processed], clock: Clock
):
    pending.put("a", ("item", []), 10, 5)
    assert cache.is_cached_item("a")
    cache.release_sender_touches()
    clock.now += 6
    assert not cache.is_cached_item("a")
    pending.put("b", ("item", []), 10, 5)
    lru.held["c"] = []
    cache.clear_cache()
    assert cache.is_cached(["b", "c"]) == [False, False]
    assert pending.bytes == 0


def test_pending_items_are_bounded_expire_and_are_not_evicted(pending: PendingItems[Processed], clock: Clock):
    pending.put("a", ("1", []), 60, 5)
    pending.put("a", ("2", []), 50, 5)
    with pytest.raises(HandOverFailed, match="full"):
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
