"""Resolution of media: shared fetches, the cache, and limits per request."""

import asyncio
import base64
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict
from unit.conftest import examples
from unit.router.rig import refused

from mmrouter_cli.sample_images import data_uri
from mmrouter_lib.media_identity import media_identity
from mmrouter_router.media.cache import MAX_FRESH_S, MediaCache, Stored, freshness

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(64))
OTHER = b"\x89PNG\r\n\x1a\nother"


@dataclass(frozen=True)
class Part:
    url: str
    param: str = "here"
    inline: None = None


class Gate:
    """A handler that answers once ``open`` is set."""

    def __init__(self, body: bytes = PNG) -> None:
        self.open, self.asked, self.body = asyncio.Event(), asyncio.Event(), body

    async def __call__(self, request):
        self.asked.set()
        await self.open.wait()
        return web.Response(body=self.body)


@pytest.fixture
def value(metrics):
    """The value of a metric by its name and labels."""
    return lambda name, **labels: metrics.registry.get_sample_value(f"mmrouter_media_{name}", labels)


async def test_url_and_data_uri_give_the_same_media(origin, resolving, value):
    resolver = resolving()
    by_url = await resolver.resolve(origin.url(), param="p")
    by_data = await resolver.resolve(data_uri(PNG), param="p")
    assert (by_url.data, by_url.mime) == (by_data.data, by_data.mime) == (PNG, "image/png")
    assert by_url.data_uri() == by_data.data_uri() == data_uri(PNG)
    assert (value("resolved_total", source="fetch"), value("resolved_total", source="data")) == (1, 1)
    assert value("bytes_total", source="fetch") == len(PNG)


async def test_case_09_one_image_by_several_urls_is_one_identity(origin, resolving):
    resolver = resolving()
    origin.serve("/signed")
    urls = [
        origin.url(),
        data_uri(PNG),
        origin.url("/signed") + "?signature=1&expires=2",
        origin.url(host="EXAMPLE.test"),
        origin.url(host="example.test"),
    ]
    found = [await resolver.resolve(url, param="p") for url in urls]
    identities = {media_identity(media.data, {}, key=bytes(32)) for media in found}
    assert identities == {media_identity(PNG, {}, key=bytes(32))}


async def test_case_10_changed_bytes_behind_a_url_are_another_identity(origin, resolving):
    resolver = resolving()
    url = origin.serve("/changing", cache_control="no-cache")
    before = await resolver.resolve(url, param="p")
    origin.serve("/changing", OTHER, cache_control="no-cache")
    after = await resolver.resolve(url, param="p")
    assert media_identity(before.data, {}, key=bytes(32)) != media_identity(after.data, {}, key=bytes(32))


async def test_claimed_type_is_ignored(resolving):
    uri = "data:text/html;base64," + base64.b64encode(PNG).decode()
    assert (await resolving().resolve(uri, param="p")).mime == "image/png"


async def test_concurrent_requests_for_a_url_share_one_fetch(origin, resolving, value):
    gate = origin.routes["/slow"] = Gate()
    resolver = resolving()
    waiting = [asyncio.create_task(resolver.resolve(origin.url("/slow"), param=f"p{n}")) for n in range(10)]
    await gate.asked.wait()
    gate.open.set()
    assert {media.data for media in await asyncio.gather(*waiting)} == {PNG}
    assert (len(origin.seen), value("joined_total")) == (1, 9)


async def test_shared_failure_names_the_field_of_each_request(origin, resolving, value):
    gate = origin.routes["/slow"] = Gate(body=b"")
    resolver = resolving()
    waiting = [asyncio.create_task(resolver.resolve(origin.url("/slow"), param=f"p{n}")) for n in range(3)]
    await gate.asked.wait()
    gate.open.set()
    faults = await asyncio.gather(*waiting, return_exceptions=True)
    assert [(fault.param, fault.code) for fault in faults] == [(f"p{n}", "media_empty") for n in range(3)]
    assert value("refused_total", reason="empty") == 3


async def test_cancelled_or_expired_request_does_not_end_a_shared_fetch(origin, resolving):
    gate = origin.routes["/slow"] = Gate()
    resolver = resolving()
    url = origin.url("/slow")
    leaver, stayer = (asyncio.create_task(resolver.resolve(url, param="p")) for _ in range(2))
    hurried = asyncio.create_task(asyncio.wait_for(resolver.resolve(url, param="p"), 0.05))
    await gate.asked.wait()
    leaver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaver
    with pytest.raises(TimeoutError):
        await hurried
    gate.open.set()
    assert ((await stayer).data, len(origin.seen)) == (PNG, 1)


async def test_fetch_is_cancelled_with_its_last_request_and_a_new_one_starts_afresh(raw_origin, resolving):
    asked, gone = asyncio.Semaphore(0), asyncio.Event()

    async def talk(reader, writer):
        asked.release()
        await reader.read(1)
        gone.set()

    url, resolver = await raw_origin(talk), resolving()
    waiting = [asyncio.create_task(resolver.resolve(url, param="p")) for _ in range(2)]
    await asked.acquire()
    for task in waiting:
        task.cancel()
    late = asyncio.create_task(resolver.resolve(url, param="p"))
    await asyncio.wait_for(gone.wait(), 5)
    await asyncio.wait_for(asked.acquire(), 5)
    assert not late.done()
    late.cancel()


async def test_tenants_share_neither_fetches_nor_bytes(origin, resolving):
    url = origin.serve("/kept", Cache_Control="max-age=60")
    resolver = resolving()
    for tenant in ("a", "b", "a"):
        await resolver.resolve(url, param="p", tenant=tenant)
    assert len(origin.seen) == 2


async def test_fresh_entries_are_reused_and_stale_ones_fetched_again(origin, resolving, value):
    time = [1000.0]
    resolver = resolving(clock=lambda: time[0])
    url = origin.serve("/kept", Cache_Control="max-age=60")
    sources = []
    for step in (0, 59, 2):
        time[0] += step
        sources.append((await resolver.resolve(url, param="p")).source)
    assert (sources, len(origin.seen)) == (["fetch", "cache", "fetch"], 2)
    assert value("cache_bytes") == pytest.approx(len(PNG), abs=2000)


@pytest.mark.parametrize(
    ("name", "header", "versions"),
    [
        ("ETag", "If-None-Match", ("one", "two")),
        ("Last-Modified", "If-Modified-Since", ("Sun, 01 Nov 2026 10:00:00 GMT", "Sun, 01 Nov 2026 10:00:01 GMT")),
    ],
)
async def test_stored_bytes_are_revalidated_and_replaced_when_changed(name, header, versions, origin, resolving):
    current = [versions[0], PNG]

    async def answer(request):
        version, body = current
        if request.headers.get(header) == version:
            return web.Response(status=304)
        return web.Response(body=body, headers={name: version})

    origin.routes["/changing"] = answer
    resolver = resolving()
    got = [await resolver.resolve(origin.url("/changing"), param="p") for _ in range(2)]
    current[:] = [versions[1], OTHER]
    got += [await resolver.resolve(origin.url("/changing"), param="p") for _ in range(2)]
    assert [media.source for media in got] == ["fetch", "revalidated", "fetch", "revalidated"]
    assert [media.data for media in got] == [PNG, PNG, OTHER, OTHER]


async def test_bytes_of_the_second_in_which_they_were_modified_are_fetched_again(origin, resolving):
    bodies = [PNG, OTHER]
    moment = "Sun, 01 Nov 2026 10:00:00 GMT"

    async def answer(request):
        if "If-Modified-Since" in request.headers:
            return web.Response(status=304)
        return web.Response(body=bodies.pop(0), headers={"Last-Modified": moment, "Date": moment})

    origin.routes["/within"] = answer
    resolver = resolving()
    assert [(await resolver.resolve(origin.url("/within"), param="p")).data for _ in range(2)] == [PNG, OTHER]


@pytest.mark.parametrize("headers", [{}, {"Cache_Control": "no-store", "ETag": '"a"'}, {"Cache_Control": "private"}])
async def test_uncacheable_media_is_fetched_every_time(headers, origin, resolving):
    url = origin.serve("/unkept", **headers)
    resolver = resolving()
    assert [(await resolver.resolve(url, param="p")).source for _ in range(2)] == ["fetch", "fetch"]
    assert not any("If-None-Match" in request.headers for request in origin.seen)


async def test_redirect_is_followed_again_and_its_target_revalidated(origin, resolving):
    async def target(request):
        if request.headers.get("If-None-Match") == '"a"':
            return web.Response(status=304)
        return web.Response(body=PNG, headers={"ETag": '"a"', "Cache-Control": "max-age=600"})

    origin.routes["/target"] = target
    url = origin.serve("/moving", status=302, Location="/target", ETag='"b"')
    resolver = resolving()
    assert [(await resolver.resolve(url, param="p")).source for _ in range(2)] == ["fetch", "revalidated"]
    assert [request.headers.get("If-None-Match") for request in origin.seen] == [None, None, None, '"a"']
    # After a new redirect the old ETag must not be sent to the new target, nor its 304 renew the old bytes.
    origin.serve("/elsewhere", OTHER, ETag='"a"')
    origin.serve("/moving", status=302, Location="/elsewhere")
    assert (await resolver.resolve(url, param="p")).data == OTHER


async def test_busy_fetch_slots_are_a_429(origin, resolving):
    gate = origin.routes["/slow"] = Gate()
    resolver = resolving(limits={"concurrent": 1, "queue_s": 0.02})
    first = asyncio.create_task(resolver.resolve(origin.url("/slow"), param="p"))
    await gate.asked.wait()
    error = await refused(resolver.resolve(origin.url("/image"), param="p"))
    assert (error.status, error.code, error.headers["Retry-After"]) == (429, "media_busy", "1")
    gate.open.set()
    await first
    assert (await resolver.resolve(origin.url("/image"), param="p")).data == PNG


async def test_media_are_returned_in_order_and_each_url_fetched_once(origin, resolving):
    gate = origin.routes["/slow"] = Gate(OTHER)
    urls = [origin.url("/slow"), data_uri(b"inline"), origin.url(), origin.url("/slow"), origin.url()]
    resolving_all = asyncio.create_task(resolving().resolve_all([Part(url) for url in urls]))
    await gate.asked.wait()
    gate.open.set()
    assert [media.data for media in await resolving_all] == [OTHER, b"inline", PNG, OTHER, PNG]
    assert len(origin.seen) == 2


async def test_first_error_names_its_field_and_cancels_the_other_fetches(raw_origin, origin, resolving):
    gone = asyncio.Event()

    async def talk(reader, writer):
        await reader.read(1)
        gone.set()

    parts = [Part(await raw_origin(talk), "a"), Part(origin.serve("/missing", status=404), "b")]
    error = await refused(resolving().resolve_all(parts))
    assert (error.param, error.code) == ("b", "media_status")
    await asyncio.wait_for(gone.wait(), 5)


async def test_invalid_data_uri_costs_no_fetch(origin, resolving):
    error = await refused(resolving().resolve_all([Part(origin.url(), "a"), Part("data:;base64,?", "b")]))
    assert (error.param, origin.seen) == ("b", [])


async def test_total_size_of_media_is_limited(origin, resolving):
    resolver = resolving({"max_request_bytes": "150"})
    parts = [Part(origin.url(), "a"), Part(data_uri(PNG), "b")]
    assert len(await resolver.resolve_all(parts)) == 2
    for more in (Part(data_uri(b"1234567"), "c"), Part(origin.serve("/more", b"1234567"), "c")):
        error = await refused(resolver.resolve_all([*parts, more]))
        assert (error.code, error.status) == ("media_request_too_large", 400)


async def test_size_of_one_medium_is_limited(resolving):
    resolver = resolving({"max_bytes": "10"})
    await resolver.resolve(data_uri(b"1234567890"), param="p")
    error = await refused(resolver.resolve(data_uri(b"1234567890a"), param="p"))
    assert (error.code, error.param) == ("media_too_large", "p")


async def test_data_only_refuses_urls_without_a_lookup(resolving, value):
    async def lookup(host, port):
        raise AssertionError("nothing may be looked up")

    resolver = resolving({"fetch": "dataOnly", "allowed_cidrs": []}, lookup=lookup)
    error = await refused(resolver.resolve("https://a.example/", param="p"))
    assert (error.status, error.code) == (400, "media_fetch_disabled")
    assert value("refused_total", reason="fetch_disabled") == 1


NOW = datetime(2030, 1, 1, tzinfo=UTC)


def stored(size: int) -> Stored:
    return Stored(bytes(size), "image/png", "http://a.example/", None, None, 0.0)


AT, HALF = "Expires: Tue, 01 Jan 2030 00:01:00 GMT", "Date: Tue, 01 Jan 2030 00:00:30 GMT"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ([], 0.0),
        (["Cache-Control: max-age=60"], 60.0),
        (['cache-control: public, MAX-AGE="60"'], 60.0),
        (["Cache-Control: max-age=60", "Age: 45"], 15.0),
        (["Cache-Control: max-age=60", "Age: 100"], 0.0),
        (["Cache-Control: max-age=60, s-maxage=5"], 5.0),
        (["Cache-Control: max-age=60", "Cache-Control: no-store"], None),
        (["Cache-Control: no-store"], None),
        (["Cache-Control: private, max-age=60"], None),
        (["Cache-Control: no-cache, max-age=60"], 0.0),
        (["Cache-Control: max-age=60", "Vary: *"], None),
        (["Cache-Control: max-age=60", "Vary: Accept"], 60.0),
        *((["Cache-Control: max-age=" + odd], 0.0) for odd in ("-1", "nonsense", "9" * 5000)),
        (["Cache-Control: max-age=31536000"], MAX_FRESH_S),
        ([AT], 60.0),
        ([AT, HALF], 30.0),
        ([AT, "Cache-Control: max-age=5"], 5.0),
        (["Expires: 0"], 0.0),
        (["Expires: Tue, 01 Jan 99999999999999999999 00:00:00 GMT"], 0.0),
        (["Expires: Tue, 01 Jan 2019 00:00:00 GMT"], 0.0),
    ],
)
def test_freshness_follows_the_origins_headers(headers, seconds):
    assert freshness(CIMultiDict(header.split(": ") for header in headers), NOW) == seconds


@settings(max_examples=examples(60), deadline=None)
@given(st.text(max_size=80), st.text(max_size=40), st.text(max_size=40))
def test_any_cache_header_is_parsed(control, expires, age):
    seconds = freshness(CIMultiDict({"Cache-Control": control, "Expires": expires, "Age": age}), NOW)
    assert seconds is None or 0 <= seconds <= MAX_FRESH_S


SIZE = 100_000  # of media in these tests, beside which an entry's texts are small


def test_least_recently_used_entries_are_evicted_first():
    cache = MediaCache(10 * SIZE)
    for name in "abc":
        cache.put(("", name), stored(3 * SIZE))
    assert cache.get(("", "a"))
    cache.put(("", "d"), stored(3 * SIZE))
    assert [name for name in "abcd" if cache.get(("", name))] == ["a", "c", "d"]
    assert cache.size == pytest.approx(9 * SIZE, rel=0.05)


def test_texts_of_an_entry_that_its_origin_chooses_are_part_of_its_size():
    cache = MediaCache(SIZE)
    for number in range(100):
        cache.put(("", f"{number:08}" * 1000), replace(stored(1), etag="e" * 8000))
    assert len(cache) < 10


def test_entry_larger_than_the_cache_removes_the_old_one():
    cache = MediaCache(10 * SIZE)
    cache.put(("", "a"), stored(3 * SIZE))
    cache.put(("", "a"), stored(11 * SIZE))
    assert (cache.get(("", "a")), cache.size) == (None, 0)


def test_evicted_entry_is_not_restored_by_renewal():
    cache = MediaCache(10 * SIZE)
    cache.put(("", "a"), stored(3))
    cache.drop(("", "a"))
    cache.renew(("", "a"), 5.0)
    assert len(cache) == 0


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 12)), max_size=40))
def test_size_is_the_sum_of_entries(steps):
    cache = MediaCache(10 * SIZE)
    for name, size in steps:
        cache.put(("", name), stored(size * SIZE))
    held = [entry for name in "abcdef" if (entry := cache.get(("", name)))]
    media = sum(len(entry.data) for entry in held)
    assert media <= cache.size <= min(10 * SIZE, media + 2000 * len(held))
