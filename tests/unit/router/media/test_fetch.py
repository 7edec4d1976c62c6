"""Guarded fetches from real origins: what is sent, what is returned, and what must never be connected to."""

import asyncio
import gzip
import itertools
import shutil
import socket
import ssl
import subprocess
import threading
from ipaddress import ip_address

import pytest
from aiohttp import web
from unit.router.rig import no_free_descriptors, refused

from mmrouter_lib.api import Media as MediaSettings
from mmrouter_router.media.content import MediaError
from mmrouter_router.media.fetch import MAX_INFORMATIONAL, Fetcher, FetchLimits, socket_factory
from mmrouter_router.media.guard import Guard

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(64))


async def reason_of(resolver, url) -> str:
    error = await refused(resolver.resolve(url, param="here"))
    assert (error.status, error.param) == (400, "here")
    return error.code.removeprefix("media_")


async def test_fetch_sends_no_identifying_headers(origin, resolving, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    media = await resolving().resolve(origin.url("/image", host="images.example"), param="p")
    assert (media.data, media.mime, media.source) == (PNG, "image/png", "fetch")
    assert dict(origin.seen[0].headers) == {
        "Host": f"images.example:{origin.port}",
        "User-Agent": "mmrouter-media/1",
        "Accept": "*/*",
        "Accept-Encoding": "identity",
        "Connection": "close",
    }


async def test_path_and_query_arrive_verbatim(origin, resolving):
    origin.serve("/a/b c~")
    await resolving().resolve(origin.url("/a%2Fb%20c%7e?sig=%7e%2B+/&x"), param="p")
    assert origin.seen[0].raw_path == "/a%2Fb%20c%7e?sig=%7e%2B+/&x"


async def test_cookies_are_not_returned(origin, resolving):
    origin.serve("/first", status=302, Location="/image", Set_Cookie="a=b; Path=/")
    await resolving().resolve(origin.url("/first"), param="p")
    assert [request.path for request in origin.seen] == ["/first", "/image"]
    assert "Cookie" not in origin.seen[1].headers


async def test_private_addresses_are_never_connected_to(origin, resolving):
    closed = resolving({"allowed_cidrs": ["10.0.0.0/8"]})
    for host in ("127.0.0.1", "internal.example", "[::ffff:127.0.0.1]", "[::1]"):
        assert await reason_of(closed, origin.url(host=host)) == "address"
    assert origin.seen == []


async def test_name_with_one_private_address_is_not_connected_to(origin, resolving):
    async def lookup(host, port):
        return ["127.0.0.1", "10.0.0.1"]

    assert await reason_of(resolving(lookup=lookup), origin.url(host="two.example")) == "address"
    assert origin.seen == []


async def test_dns_rebinding_does_not_change_the_checked_address(serving, resolving):
    answers = [["127.0.0.2"], ["127.0.0.1"]]

    async def rebinding(host, port):
        return answers.pop(0)

    async with serving("127.0.0.2") as allowed, serving("127.0.0.1", allowed.port) as internal:
        allowed.serve("/image")
        internal.serve("/image", b"\x89PNG\r\n\x1a\nsecret")
        allowed.serve("/again", status=302, Location="/image")
        resolver = resolving({"allowed_cidrs": ["127.0.0.2/32"]}, lookup=rebinding)
        media = await resolver.resolve(allowed.url(host="evil.example"), param="p")
        assert (media.data, len(answers), len(internal.seen)) == (PNG, 1, 0)
        # The redirect's target is resolved again, checked again and refused.
        answers.insert(0, ["127.0.0.2"])
        assert await reason_of(resolver, allowed.url("/again", host="evil.example")) == "address"
        assert (len(allowed.seen), len(internal.seen)) == (2, 0)


async def test_no_socket_is_opened_for_an_unchecked_address():
    create = socket_factory([ip_address("127.0.0.1"), ip_address("::1")])
    info = (socket.AF_INET, socket.SOCK_STREAM, 0, "")
    create((*info, ("127.0.0.1", 80))).close()
    with pytest.raises(PermissionError):
        create((*info, ("127.0.0.2", 80)))


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("http://169.254.169.254/latest/meta-data", "address"),
        ("http://10.0.0.1/", "address"),
        ("http://[::ffff:10.0.0.1]/", "address"),
        ("file:///etc/passwd", "scheme"),
        ("data:image/png;base64,AAAA", "scheme"),
        ("http://user:pass@127.0.0.1/", "url"),
        ("http://2130706433/", "url"),
    ],
)
async def test_redirect_is_checked_like_a_client_url(location, reason, origin, resolving):
    origin.serve("/start", status=302, Location=location)
    assert await reason_of(resolving(), origin.url("/start")) == reason


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_router_without_free_descriptors_does_not_blame_the_client(host, origin, resolving):
    resolver, url = resolving(), origin.url(host=host)
    origin.serve("/image")
    with no_free_descriptors():
        error = await refused(resolver.resolve(url, param="here"))
    assert (error.status, error.code, error.param) == (503, "router_exhausted", "here")
    assert error.headers["Retry-After"] == "1"
    assert (await resolver.resolve(url, param="here")).data == PNG


async def test_redirect_cannot_leave_the_allowed_hosts(origin, resolving):
    origin.serve("/start", status=301, Location=origin.url(host="b.example"))
    resolver = resolving({"fetch": "allowList", "allowed_hosts": ["a.example"]})
    assert await reason_of(resolver, origin.url("/start", host="a.example")) == "host"
    assert len(origin.seen) == 1


@pytest.mark.parametrize(("redirects", "fetched"), [(3, True), (4, False)])
async def test_three_redirects_are_followed_and_no_more(redirects, fetched, origin, resolving):
    origin.serve("/0")
    for number in range(1, redirects + 1):
        origin.serve(f"/{number}", status=307, Location=f"/{number - 1}")
    if fetched:
        assert (await resolving().resolve(origin.url(f"/{redirects}"), param="p")).data == PNG
    else:
        assert await reason_of(resolving(), origin.url(f"/{redirects}")) == "redirect"


@pytest.mark.parametrize(
    ("status", "headers", "body", "reason"),
    [
        (404, {}, b"no", "status"),
        (403, {}, b"no", "status"),
        (500, {}, b"no", "status"),
        (206, {}, PNG, "status"),
        (204, {}, b"", "status"),
        (302, {}, b"", "status"),
        (304, {}, b"", "status"),
        (200, {}, b"", "empty"),
        (200, {"Content_Type": "image/png"}, b"<!doctype html><p>log in", "web_page"),
        (200, {"Content_Encoding": "gzip"}, gzip.compress(bytes(1 << 24)), "encoding"),
        (200, {"Content_Encoding": "identity, br"}, PNG, "encoding"),
    ],
)
async def test_unusable_answers_are_refused_by_kind(status, headers, body, reason, origin, resolving):
    assert await reason_of(resolving(), origin.serve("/x", body, status, **headers)) == reason


async def test_size_limit_holds_with_and_without_content_length(origin, resolving):
    async def endless(request):
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(bytes(4096))

    origin.routes["/endless"] = endless
    resolver = resolving(limits={"max_bytes": 100_000})
    assert len((await resolver.resolve(origin.serve("/fits", b"x" * 100_000), param="p")).data) == 100_000
    assert await reason_of(resolver, origin.serve("/declared", b"x" * 100_001)) == "too_large"
    assert await reason_of(resolver, origin.url("/endless")) == "too_large"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort", "unreachable"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nshort", "unreachable"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nlong and longer", "unreachable"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nContent-Length: 9\r\n\r\n123456789", "unreachable"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nx", "unreachable"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\nx", "too_large"),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil the end", b"until the end"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", "unreachable"),
        (b"SSH-2.0-OpenSSH_9.9\r\n", "unreachable"),
        (b"", "unreachable"),
    ],
)
async def test_malformed_http_is_an_error(answer, expected, raw_origin, resolving):
    async def talk(reader, writer):
        writer.write(answer)

    url = await raw_origin(talk)
    if isinstance(expected, bytes):
        assert (await resolving().resolve(url, param="p")).data == expected
    else:
        assert await reason_of(resolving(), url) == expected


@pytest.mark.parametrize(("hints", "expected"), [(MAX_INFORMATIONAL, b"ok"), (None, "unreachable")])
async def test_informational_answers_are_bounded(hints, expected, raw_origin, resolving):
    gone = asyncio.Event()

    async def talk(reader, writer):
        for _ in range(hints) if hints else itertools.count():
            writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n")
            await asyncio.sleep(0)  # drain() alone does not let the other side run
            if writer.transport.is_closing():
                gone.set()
                return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    url = await raw_origin(talk)
    if isinstance(expected, bytes):
        assert (await resolving().resolve(url, param="p")).data == expected
    else:
        assert await reason_of(resolving(limits={"total_s": 60.0}), url) == expected
        await asyncio.wait_for(gone.wait(), 60)


async def test_trickling_host_times_out(raw_origin, resolving):
    gone = asyncio.Event()

    async def talk(reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
        hangs_up = asyncio.ensure_future(reader.read(1))
        while not (await asyncio.wait({hangs_up}, timeout=0.02))[0]:
            writer.write(b"x")
        gone.set()

    url = await raw_origin(talk)
    assert await reason_of(resolving(limits={"total_s": 0.2}), url) == "timeout"
    await asyncio.wait_for(gone.wait(), 5)


async def test_slow_and_failing_name_servers_are_a_400(resolving):
    async def slow(host, port):
        await asyncio.Event().wait()

    async def unknown(host, port):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    assert await reason_of(resolving(lookup=slow, limits={"total_s": 0.1}), "http://a.example/") == "timeout"
    assert await reason_of(resolving(lookup=unknown), "http://a.example/") == "unreachable"


async def test_system_resolver_is_used_and_its_answer_checked(origin, resolving):
    url = origin.url(host="localhost")
    resolver = resolving(lookup=None, media={"allowed_cidrs": ["127.0.0.0/8", "::1/128"]})
    assert (await resolver.resolve(url, param="p")).data
    assert await reason_of(resolving(lookup=None, media={"allowed_cidrs": []}), url) == "address"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A server's TLS context for images.example, and a client's that trusts it."""
    if shutil.which("openssl") is None:
        pytest.skip("not run: no openssl command to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -keyout key -out cert"
    subject = ["-subj", "/CN=images.example", "-addext", "subjectAltName=DNS:images.example"]
    subprocess.run([*command.split(), *subject], cwd=folder, check=True, capture_output=True)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(folder / "cert", folder / "key")
    return server, ssl.create_default_context(cafile=str(folder / "cert"))


async def test_tls_verifies_the_name_though_the_address_is_pinned(certificate, serving, resolving):
    server, trusting = certificate
    async with serving(ssl_context=server) as origin:
        origin.serve("/image")
        url, other = (origin.url(host=host, scheme="https") for host in ("images.example", "other.example"))
        assert (await resolving(tls=trusting).resolve(url, param="p")).data == PNG
        assert await reason_of(resolving(tls=trusting), other) == "unreachable"
        assert await reason_of(resolving(), url) == "unreachable"
        origin.serve("/down", status=302, Location="http://images.example/")
        down = origin.url("/down", host="images.example", scheme="https")
        assert await reason_of(resolving(tls=trusting), down) == "redirect"


async def test_silent_name_servers_of_one_tenant_leave_lookups_to_the_others(monkeypatch):
    answers = threading.Event()

    def getaddrinfo(host, port, **_):
        if host == "silent.example":
            answers.wait(60)
        raise OSError("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    limits = FetchLimits(max_bytes=1000, total_s=0.2, concurrent=4)
    fetcher = Fetcher(Guard(MediaSettings(fetch="public")), limits)
    try:
        for _ in range(3):  # what ends by its time keeps its thread
            asked = [fetcher.fetch("http://silent.example/x", tenant="a") for _ in range(2)]
            ended = await asyncio.gather(*asked, return_exceptions=True)
            assert {error.reason for error in ended} == {"timeout"}
        with pytest.raises(MediaError) as other:
            await fetcher.fetch("http://absent.example/x", tenant="b")
        assert other.value.reason == "unreachable"
    finally:
        answers.set()
        fetcher.close()
