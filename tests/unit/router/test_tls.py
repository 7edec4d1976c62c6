"""TLS on the client port: what a plain connection does, bounds of handshakes, and certificates that change."""

import asyncio
import contextlib
import shutil
import ssl
from functools import partial
from pathlib import Path

import pytest
from unit.router import test_connection as plain
from unit.router.certificates import certificate, trusting, write_secret
from unit.router.rig import PORT, LoopbackServer
from unit.router.test_hostile_clients import answer_to
from unit.router.test_server import Holding, cold, in_uvloop
from waiting import until

from mmrouter_lib.tls_context import CertificateError
from mmrouter_router.http import server as http_server
from mmrouter_router.http.certificate import ServerCertificate
from mmrouter_router.http.server import Server

ASK = b"POST /hot HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nab"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A mounted Secret with certificate 0."""
    write_secret(tmp_path, *certificate(0))
    return tmp_path


PROPERTIES = [
    plain.test_each_piece_reaches_the_client_before_the_next_is_sent,
    plain.test_sequential_and_pipelined_requests_share_one_connection,
    plain.test_slow_client_buffers_a_bounded_amount_and_gets_everything,
    plain.test_client_disconnect_aborts_the_engines_request,
    plain.test_truncated_engine_answer_is_truncated_for_the_client,
    plain.test_http_1_0_client_gets_an_unchunked_answer_ended_by_close,
    plain.test_expect_100_continue_is_answered,
    plain.test_failing_handler_is_a_500_and_missing_answer_closes_the_connection,
    partial(plain.test_oversized_body_is_refused_and_the_connection_stays_usable, announced=True),
    partial(plain.test_oversized_body_is_refused_and_the_connection_stays_usable, announced=False),
]


@pytest.mark.parametrize("holds", PROPERTIES)
@in_uvloop
async def test_a_connection_over_tls_does_what_a_plain_one_does(holds, folder):
    async with plain.running_front(ServerCertificate(folder), trusting(certificate(0)[0])) as front:
        await holds(front)


@pytest.mark.parametrize("sent_first", [0, 1, 300_000, 2_000_000])
@in_uvloop
async def test_a_large_body_over_tls_is_read_in_place(sent_first, folder, monkeypatch):
    async with plain.running_front(ServerCertificate(folder), trusting(certificate(0)[0])) as front:
        await plain.test_large_body_bypasses_the_parser_and_the_next_request_does_not(front, monkeypatch, sent_first)


REFUSED = [
    b"nonsense\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 70_000 + b"\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabcnonsense\r\n\r\n",
]


@pytest.mark.usefixtures("same_request_id")
@pytest.mark.parametrize("sent", REFUSED)
@in_uvloop
async def test_refusals_over_tls_are_those_of_plain_connections(sent, folder):
    answers = []
    for tls in ((), (ServerCertificate(folder), trusting(certificate(0)[0]))):
        async with plain.running_front(*tls) as front:
            plain.engine_answers(front, [b"ok"])
            answers.append(await answer_to(front, sent))
    assert answers[0] == answers[1]
    assert b"HTTP/1.1 4" in answers[1]


@contextlib.asynccontextmanager
async def serving(folder: Path, app=cold, **options):
    """Serve with the certificate of a folder; yields the server, the certificate and what it counted."""
    events: list[str] = []
    own = ServerCertificate(folder, events.append)
    front = LoopbackServer(app, own, trusting(certificate(0)[0], certificate(1)[0]))
    front.server = Server(app, front.ip, PORT, drain_seconds=1, certificate=own, **options)
    async with front:
        yield front, own, events


async def shown(front: LoopbackServer) -> bytes:
    """Return the certificate that a new connection gets, after a request over it."""
    reader, writer = await front.connect()
    writer.write(ASK)
    await reader.readuntil(b"hi")
    found = writer.get_extra_info("ssl_object").getpeercert(True)
    writer.close()
    return ssl.DER_cert_to_PEM_cert(found).encode()


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1:DeprecationWarning")
@in_uvloop
async def test_handshake_agrees_on_http_1_1_and_at_least_tls_1_2(folder):
    async with serving(folder) as (front, _, events):
        _, writer = await front.connect()
        agreed = writer.get_extra_info("ssl_object")
        assert (agreed.selected_alpn_protocol(), agreed.version()) == ("http/1.1", "TLSv1.3")
        writer.close()
        old = trusting(certificate(0)[0])
        old.set_ciphers("ALL:@SECLEVEL=0")
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection(front.ip, PORT, ssl=old, server_hostname="mmrouter.example")
        await until(lambda: events == ["loaded", "handshake_failed"])


@in_uvloop
async def test_plain_http_gets_no_answer_from_a_port_with_tls(folder):
    async with serving(folder) as (front, _, events):
        reader, writer = await asyncio.open_connection(front.ip, PORT)
        writer.write(ASK)
        with contextlib.suppress(ConnectionError):
            assert b"HTTP" not in await reader.read()
        await until(lambda: "handshake_failed" in events)


@in_uvloop
async def test_silent_handshakes_count_as_connections_and_end(folder, monkeypatch):
    monkeypatch.setattr(http_server, "HANDSHAKE_SECONDS", 0.5)
    refused: list[str] = []
    async with serving(folder, max_connections=4, count=refused.append) as (front, _, events):
        silent = [await asyncio.open_connection(front.ip, PORT) for _ in range(6)]
        await until(lambda: refused == ["refused", "refused"])
        await until(lambda: events.count("handshake_failed") == 4)
        assert await shown(front) == certificate(0)[0]
        for _, writer in silent:
            writer.close()


@in_uvloop
async def test_a_client_that_never_ends_its_tls_frees_its_connection(folder):
    """A closed connection waits a bounded time for the client's end of TLS, which is no end of its request."""
    async with serving(folder, Holding()) as (front, _, _):
        connections = front.server.server_state.connections
        _, writer = await front.connect()
        await until(lambda: connections)
        writer.transport.pause_reading()
        next(iter(connections)).transport.close()
        await until(lambda: not connections)
        writer.transport.abort()


@in_uvloop
async def test_new_certificate_is_for_new_connections_while_an_answer_continues(folder):
    async with plain.running_front(
        own := ServerCertificate(folder), trusting(certificate(0)[0], certificate(1)[0])
    ) as front:
        go = asyncio.Event()

        @front.engine.answers
        async def answer(writer, head, body) -> None:
            writer.write(plain.HEAD + plain.chunk(b"one "))
            await go.wait()
            writer.write(plain.chunk(b"two") + b"0\r\n\r\n")

        async with plain.client(front, plain.ASK) as before:
            await before.reader.readuntil(b"one ")
            watching = asyncio.create_task(own.watch())
            write_secret(folder, *certificate(1))

            async def seen() -> bytes:
                async with plain.client(front) as new:
                    found = new.writer.get_extra_info("ssl_object").getpeercert(True)
                return ssl.DER_cert_to_PEM_cert(found).encode()

            async with asyncio.timeout(60):
                while await seen() != certificate(1)[0]:
                    await asyncio.sleep(0.05)
            go.set()
            await before.reader.readuntil(b"two")
            watching.cancel()


def broken_secrets() -> list[tuple[bytes, bytes]]:
    chain, key = certificate(0)
    other_chain, other_key = certificate(1)
    return [(other_chain, key), (chain, other_key), (chain, b""), (b"", key), (b"no PEM", key), (chain[:-80], key)]


@pytest.mark.parametrize("number", range(6))
@in_uvloop
async def test_broken_certificate_is_counted_once_and_leaves_the_old_one(number, folder):
    async with serving(folder) as (front, own, events):
        write_secret(folder, *broken_secrets()[number])
        for _ in range(3):
            own.reload()
        assert (events, own.refused) == (["loaded", "refused"], True)
        assert await shown(front) == certificate(0)[0]
        write_secret(folder, *certificate(1))
        own.reload()
        own.reload()
        assert (events, own.refused) == (["loaded", "refused", "loaded"], False)
        assert await shown(front) == certificate(1)[0]


@in_uvloop
async def test_a_missing_secret_leaves_the_certificate(folder):
    async with serving(folder) as (front, own, events):
        link = folder / "..data"
        target = link.readlink()
        link.unlink()
        own.reload()
        own.reload()
        assert (events, own.refused) == (["loaded", "refused"], True)
        assert await shown(front) == certificate(0)[0]
        link.symlink_to(target)
        own.reload()
        assert (events, own.refused) == (["loaded", "refused"], False)


@pytest.mark.parametrize("number", range(6))
def test_a_broken_certificate_at_the_start_is_an_error_that_names_its_folder(number, tmp_path):
    write_secret(tmp_path, *broken_secrets()[number])
    with pytest.raises(CertificateError, match=str(tmp_path)):
        ServerCertificate(tmp_path)
    shutil.rmtree(tmp_path)
    with pytest.raises(CertificateError, match="No such file"):
        ServerCertificate(tmp_path)
