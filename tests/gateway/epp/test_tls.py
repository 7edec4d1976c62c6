"""TLS of our picker's port: the certificate of a mounted Secret, replaced without a restart, or one of its own."""

import asyncio
import ssl
from pathlib import Path

import grpc
import grpc.aio
import pytest
from gateway.epp.conftest import serving
from unit.router.certificates import HOST, certificate, write_secret

from mmrouter_lib.tls_context import CertificateError
from mmrouter_router.http.certificate import ServerCertificate, self_signed
from mmrouter_router.picker.server import PICKER_PORT
from mmrouter_router.picker.wire import HEALTH_SERVICE, HealthCheckRequest, HealthCheckResponse


async def healthy(ip: str, chain: bytes, name: str = HOST) -> bool:
    """Whether a new connection that trusts this certificate only is answered."""
    credentials = grpc.ssl_channel_credentials(chain)
    # Without a pool of its own gRPC would use the connection of an earlier call.
    options = [("grpc.ssl_target_name_override", name), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(f"{ip}:{PICKER_PORT}", credentials, options=options) as channel:
        check = channel.unary_unary(
            f"/{HEALTH_SERVICE}/Check",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=HealthCheckResponse.FromString,
        )
        try:
            answer = await check(HealthCheckRequest(service="readiness"), timeout=30)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return False
            raise
        return bool(answer.status == 1)


async def test_each_new_connection_gets_the_certificate_that_is_loaded_and_an_unusable_one_changes_nothing(
    tmp_path: Path,
) -> None:
    (first, key), (second, other) = certificate(0), certificate(1)
    write_secret(tmp_path, first, key)
    own = ServerCertificate(tmp_path)
    async with serving(lambda: own.pem) as ip:
        assert await healthy(ip, first)
        write_secret(tmp_path, second, key)  # a key of another certificate
        own.reload()
        assert await healthy(ip, first)
        write_secret(tmp_path, second, other)
        own.reload()
        assert await healthy(ip, second)
        assert not await healthy(ip, first)


async def test_a_client_without_tls_is_not_answered_and_http2_is_agreed_on(tmp_path: Path) -> None:
    write_secret(tmp_path, *certificate(0))
    own = ServerCertificate(tmp_path)
    async with serving(lambda: own.pem) as ip:
        assert await healthy(ip, certificate(0)[0])
        async with grpc.aio.insecure_channel(f"{ip}:{PICKER_PORT}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary(f"/{HEALTH_SERVICE}/Check")(b"", timeout=30)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        context = ssl.create_default_context(cadata=certificate(0)[0].decode())
        context.set_alpn_protocols(["h2"])
        _, writer = await asyncio.open_connection(ip, PICKER_PORT, ssl=context, server_hostname=HOST)
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
        writer.close()


async def test_a_picker_without_a_secret_serves_a_certificate_of_its_own_and_no_two_are_equal() -> None:
    made, other = self_signed("vl"), self_signed("vl")
    assert made != other
    async with serving(lambda: made) as ip:
        assert await healthy(ip, made[1], "vl")
        assert not await healthy(ip, other[1], "vl")


def test_without_openssl_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CertificateError, match="openssl"):
        self_signed("vl")
