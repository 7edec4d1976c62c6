from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict

from mmrouter_router.media.cache import MAX_FRESH_S, MediaCache, Stored, freshness

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def stored(size: int) -> Stored:
    return Stored(bytes(size), "image/png", "http://a.example/", None, None, 0.0)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ([], 0.0),
        ([("Cache-Control", "max-age=60")], 60.0),
        ([("cache-control", 'public, MAX-AGE="60"')], 60.0),
        ([("Cache-Control", "max-age=60"), ("Age", "45")], 15.0),
        ([("Cache-Control", "max-age=60"), ("Age", "100")], 0.0),
        ([("Cache-Control", "max-age=60, s-maxage=5")], 5.0),
        ([("Cache-Control", "max-age=60"), ("Cache-Control", "no-store")], None),
        ([("Cache-Control", "no-store")], None),
        ([("Cache-Control", "private, max-age=60")], None),
        ([("Cache-Control", "no-cache, max-age=60")], 0.0),
        ([("Cache-Control", "max-age=60"), ("Vary", "*")], None),
        ([("Cache-Control", "max-age=60"), ("Vary", "Accept")], 60.0),
        ([("Cache-Control", "max-age=-1")], 0.0),
        ([("Cache-Control", "max-age=nonsense")], 0.0),
        ([("Cache-Control", "max-age=" + "9" * 5000)], 0.0),
        ([("Cache-Control", "max-age=31536000")], MAX_FRESH_S),
        ([("Expires", "Tue, 01 Jan 2030 00:01:00 GMT")], 60.0),
        ([("Expires", "Tue, 01 Jan 2030 00:01:00 GMT"), ("Date", "Tue, 01 Jan 2030 00:00:30 GMT")], 30.0),
        ([("Expires", "Tue, 01 Jan 2030 00:01:00 GMT"), ("Cache-Control", "max-age=5")], 5.0),
        ([("Expires", "0")], 0.0),
        ([("Expires", "Tue, 01 Jan 2019 00:00:00 GMT")], 0.0),
    ],
)
def test_freshness_follows_the_origins_headers(headers, seconds):
    assert freshness(CIMultiDict(headers), NOW) == seconds


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=80), st.text(max_size=40), st.text(max_size=40))
def test_any_cache_header_is_parsed(control, expires, age):
    seconds = freshness(CIMultiDict({"Cache-Control": control, "Expires": expires, "Age": age}), NOW)
    assert seconds is None or 0 <= seconds <= MAX_FRESH_S


def test_least_recently_used_entries_are_evicted_first():
    cache = MediaCache(10)
    for name in "abc":
        cache.put(("", name), stored(3))
    assert cache.get(("", "a"))
    cache.put(("", "d"), stored(3))
    assert [name for name in "abcd" if cache.get(("", name))] == ["a", "c", "d"]
    assert cache.size == 9


def test_entry_larger_than_the_cache_removes_the_old_one():
    cache = MediaCache(10)
    cache.put(("", "a"), stored(3))
    cache.put(("", "a"), stored(11))
    assert (cache.get(("", "a")), cache.size) == (None, 0)


def test_evicted_entry_is_not_restored_by_renewal():
    cache = MediaCache(10)
    cache.put(("", "a"), stored(3))
    cache.drop(("", "a"))
    cache.renew(("", "a"), 5.0)
    assert len(cache) == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 12)), max_size=40))
def test_size_is_the_sum_of_entries(steps):
    cache = MediaCache(10)
    for name, size in steps:
        cache.put(("", name), stored(size))
    held = [entry for name in "abcdef" if (entry := cache.get(("", name)))]
    assert cache.size == sum(len(entry.data) for entry in held) <= 10
