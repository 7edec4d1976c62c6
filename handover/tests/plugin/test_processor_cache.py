"""An engine's cache with handed-over images before it: what vLLM asks of it, in the order in which it asks."""

from typing import Any

import pytest

from handover.tests.support import Clock
from mmrouter_handover.plugin.pending_items import Kept
from mmrouter_handover.plugin.processor_cache import HandedOverCache, Processed
from mmrouter_handover.plugin.wire import HandOverFailed


class Lru:
    """A cache as vLLM's: it hands an item on once, and only says that it is there from then on.

    The real one runs in tests/conformance; this one counts what it is asked.
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
def kept(clock: Clock) -> Kept[Processed]:
    return Kept(100, clock)


@pytest.fixture
def lru() -> Lru:
    return Lru()


@pytest.fixture
def cache(lru: Lru, kept: Kept[Processed]) -> HandedOverCache:
    return HandedOverCache(lru, kept)


def merge(cache: HandedOverCache, *names: str) -> list[Any]:
    """What vLLM does for a chat that names images without bytes."""
    assert all(cache.is_cached(list(names)))
    for name in names:
        cache.touch_sender_cache_item(name)
    try:
        return cache.get_and_update([None] * len(names), list(names))
    finally:
        cache.release_sender_touches()


def test_a_handed_over_image_reaches_the_core_once_and_is_vllms_own_from_then_on(
    cache: HandedOverCache, lru: Lru, kept: Kept[Processed]
):
    kept.put("a", ("item", ["update"]), 10, 5)
    assert merge(cache, "a", "a") == [("item", ["update"]), (None, ["update"])]
    assert (kept.bytes, len(kept), cache.used, lru.released, lru.touched) == (0, 0, 1, 1, ["a", "a"])
    assert merge(cache, "a") == [(None, ["update"])]
    assert cache.used == 1


def test_an_image_that_was_called_cached_is_there_although_its_time_ended_in_between(
    cache: HandedOverCache, kept: Kept[Processed], clock: Clock
):
    kept.put("a", ("item", []), 10, 5)
    assert cache.is_cached_item("a")
    clock.now += 6
    kept.expire()
    assert cache.get_and_update_item(None, "a") == ("item", [])


def test_an_image_that_vllm_processed_itself_goes_in_as_it_is(cache: HandedOverCache, kept: Kept[Processed]):
    kept.put("a", ("item", []), 10, 5)
    assert cache.get_and_update_item(("own", []), "a") == ("own", [])
    assert not cache.is_cached_item("b")


def test_vllms_own_copy_is_taken_before_the_one_that_was_handed_over(
    cache: HandedOverCache, lru: Lru, kept: Kept[Processed]
):
    lru.held["a"] = ["own update"]
    kept.put("a", ("item", []), 10, 5)
    assert merge(cache, "a") == [(None, ["own update"])]
    assert cache.used == 0


def test_a_chat_that_failed_leaves_nothing_claimed_and_a_reset_forgets_all(
    cache: HandedOverCache, lru: Lru, kept: Kept[Processed], clock: Clock
):
    kept.put("a", ("item", []), 10, 5)
    assert cache.is_cached_item("a")
    cache.release_sender_touches()
    clock.now += 6
    assert not cache.is_cached_item("a")
    kept.put("b", ("item", []), 10, 5)
    lru.held["c"] = []
    cache.clear_cache()
    assert cache.is_cached(["b", "c"]) == [False, False]
    assert kept.bytes == 0


def test_what_waits_is_bounded_ends_in_time_and_makes_no_way(kept: Kept[Processed], clock: Clock):
    kept.put("a", ("1", []), 60, 5)
    kept.put("a", ("2", []), 50, 5)
    with pytest.raises(HandOverFailed, match="full"):
        kept.put("b", ("3", []), 51, 5)
    assert kept.get("a") == ("2", [])
    clock.now += 4
    assert kept.extend("a", 3)
    clock.now += 2
    assert kept.get("a")
    clock.now += 1
    assert kept.get("a") is None
    assert not kept.extend("a", 3)
    kept.put("b", ("3", []), 100, 5)
    assert (kept.bytes, len(kept)) == (100, 1)
