"""Connections to engines by TLS: what is trusted, what is refused and why, and a CA that changes."""

import asyncio
from pathlib import Path

import pytest
from unit.router import test_upstream as plain
from unit.router.certificates import certificate
from unit.router.rig import http_answer
from unit.router.test_server import in_uvloop

from mmrouter_lib.tls_context import CertificateError, EngineTrust, engine_server_name, server_context
from mmrouter_router.http.engine_connection import UpstreamError
from mmrouter_router.http.upstream import Upstream

NAME = engine_server_name("vl", "team")
IP = "127.0.0.1"


class Engine(plain.Engine):
    """Serves TLS with a certificate."""

    def __init__(self, folder: Path, chain: bytes, key: bytes) -> None:
        super().__init__()
        (folder / "tls.crt").write_bytes(chain)
        (folder / "tls.key").write_bytes(key)
        self._context = server_context(str(folder / "tls.crt"), str(folder / "tls.key"))

    async def __aenter__(self) -> "Engine":
        self.server = await asyncio.start_server(self._connection, IP, 0, ssl=self._context)
        self.port = self.server.sockets[0].getsockname()[1]
        return self


def trusting(folder: Path, *certificates: bytes) -> tuple[Upstream, EngineTrust, list[str]]:
    events: list[str] = []
    (folder / "ca.crt").write_bytes(b"".join(certificates))
    trust = EngineTrust(folder, NAME, events.append)
    upstream = Upstream(connect_seconds=10, trust=trust)
    upstream.encrypted = frozenset({IP})
    return upstream, trust, events


@in_uvloop
async def test_requests_and_streams_pass_by_tls_on_a_kept_connection(tmp_path):
    upstream, _, events = trusting(tmp_path, certificate(0, NAME)[0])
    async with Engine(tmp_path, *certificate(0, NAME)) as engine:
        await plain.test_body_arrives_unchanged_and_the_connection_is_reused(engine, upstream)
        await plain.test_events_arrive_while_the_engine_still_writes(engine, upstream)
        engine.says(http_answer(200, b"x" * 3_000_000))
        answer = await plain.ask(upstream, engine, b"y" * 3_000_000)
        assert await answer.read(4_000_000) == b"x" * 3_000_000
        answer.close()
    upstream.close()
    assert events == ["loaded"]


@pytest.mark.parametrize(
    ("served", "trusted", "reason"),
    [
        (certificate(0, NAME), certificate(1, NAME), "untrusted"),
        (certificate(0, "vl-engine.other.svc"), certificate(0, "vl-engine.other.svc"), "name"),
    ],
    ids=["another CA", "another deployment's name"],
)
@in_uvloop
async def test_a_certificate_that_is_not_the_engines_is_refused_with_the_reason(
    served, trusted, reason, tmp_path, caplog
):
    upstream, _, events = trusting(tmp_path, trusted[0])
    async with Engine(tmp_path, *served) as engine:
        with pytest.raises(UpstreamError, match=rf"by TLS \({reason}\)") as caught:
            await plain.ask(upstream, engine)
        assert not engine.requests
    assert not caught.value.sent
    assert events == ["loaded", reason]
    assert f"by TLS ({reason})" in caplog.text


@in_uvloop
async def test_an_engine_from_before_tls_gets_plain_requests_and_one_with_tls_never(tmp_path):
    upstream, _, events = trusting(tmp_path, certificate(0, NAME)[0])
    async with plain.Engine() as engine:
        upstream.encrypted = frozenset({"127.0.0.2"})
        (await plain.ask(upstream, engine)).close()
        assert len(engine.requests) == 1
    upstream.encrypted = frozenset({IP})
    first: list[bytes] = []

    async def answers_in_plain(reader, writer) -> None:
        first.append(await reader.read(64))
        writer.write(http_answer(200))

    server = await asyncio.start_server(answers_in_plain, IP, 0)
    with pytest.raises(UpstreamError, match="handshake_failed"):
        await upstream.request(IP, server.sockets[0].getsockname()[1], "GET", "/", {})
    server.close()
    assert first[0][:1] == b"\x16"  # a TLS handshake
    assert events == ["loaded", "handshake_failed"]


@in_uvloop
async def test_a_new_ca_is_used_and_an_unusable_one_leaves_the_old_one(tmp_path):
    upstream, trust, events = trusting(tmp_path, certificate(1, NAME)[0])
    async with Engine(tmp_path, *certificate(0, NAME)) as engine:
        (tmp_path / "ca.crt").write_bytes(certificate(1, NAME)[0] + certificate(0, NAME)[0])
        trust.reload()
        (await plain.ask(upstream, engine)).close()
        (tmp_path / "ca.crt").write_bytes(b"no certificate")
        trust.reload()
        trust.reload()
        upstream.close()
        (await plain.ask(upstream, engine)).close()
        assert len(engine.requests) == 2
    assert events == ["loaded", "loaded", "refused"]


@in_uvloop
async def test_a_connection_that_a_removed_ca_authenticated_takes_no_further_request(tmp_path):
    upstream, trust, _ = trusting(tmp_path, certificate(0, NAME)[0])
    async with Engine(tmp_path, *certificate(0, NAME)) as engine:
        streaming = await plain.ask(upstream, engine)
        await streaming.read(100)
        streaming.close()
        assert upstream.idle_connections(IP, engine.port) == 1
        (tmp_path / "ca.crt").write_bytes(certificate(1, NAME)[0])
        trust.reload()
        with pytest.raises(UpstreamError, match="untrusted"):
            await plain.ask(upstream, engine)
        assert upstream.idle_connections(IP, engine.port) == 0
    upstream.close()


def test_a_router_does_not_start_without_a_ca(tmp_path):
    with pytest.raises(CertificateError, match=str(tmp_path)):
        EngineTrust(tmp_path, NAME)
