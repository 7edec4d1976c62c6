"""A deployment that serves TLS: the certificate changes under streams, and the commands reach the endpoint."""

import asyncio
import socket
import ssl
from urllib.parse import urlsplit

import openai
import pytest
from local.rig import deployed, example
from unit.router.certificates import HOST, certificate, trusting
from waiting import wait_for

STREAMS, TOKENS = 16, 400
QUESTION = [{"role": "user", "content": "Say something long about every picture that you have ever seen. " * 8}]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    """Two frontends and an engine whose answers of 400 tokens take seconds."""
    chain, key = certificate(0)
    data = {"tls.crt": chain.decode(), "tls.key": key.decode()}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "tls"}, "stringData": data}
    resource = example()
    resource["spec"]["frontend"].update(service={"port": 8443}, tls={"secretName": "tls"})
    pool = resource["spec"]["pools"][0]
    pool["args"] = ["--sim-decode-ms=20", "--sim-jitter=0"]
    with deployed(tmp_path_factory.mktemp("tls"), secret, resource) as deployment:
        yield deployment


def shown(url: str) -> bytes:
    """Return the certificate of a new connection."""
    parts = urlsplit(url)
    trust = trusting(certificate(0)[0], certificate(1)[0])
    plain = socket.create_connection((parts.hostname, parts.port), timeout=60)
    with trust.wrap_socket(plain, server_hostname=HOST) as secure:
        return ssl.DER_cert_to_PEM_cert(secure.getpeercert(True)).encode()


def replace_certificates(deployment, number: int) -> None:
    """Change the Secret's files of every frontend, as a kubelet does."""
    for folder in {path.parent for path in deployment.folder.rglob("tls.crt")}:
        for name, content in zip(("tls.crt", "tls.key"), certificate(number), strict=True):
            fresh = folder / f".{name}"
            fresh.write_bytes(content)
            fresh.rename(folder / name)


async def stream(client: openai.AsyncOpenAI, number: int, begun: asyncio.Event) -> int:
    """Return the tokens of one streamed answer, as its last part counts them."""
    answer = await client.chat.completions.create(
        model="demo",
        messages=[*QUESTION, {"role": "user", "content": str(number)}],
        max_tokens=TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    tokens = 0
    async for piece in answer:
        begun.set()
        tokens = piece.usage.completion_tokens if piece.usage else 0
    return tokens


async def test_certificate_changes_while_streams_run_and_no_request_fails(deployment):
    context = trusting(certificate(0)[0], certificate(1)[0])
    urls = [frontend["url"].replace("http:", "https:") for frontend in deployment.run["frontends"]]
    http = openai.DefaultAsyncHttpxClient(verify=context, timeout=120)
    client = openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="any", http_client=http, max_retries=0)
    begun = [asyncio.Event() for _ in range(STREAMS)]
    async with client:
        streams = [asyncio.create_task(stream(client, number, begun[number])) for number in range(STREAMS)]
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), 60)
        replace_certificates(deployment, 1)
        for url in urls:
            await asyncio.to_thread(wait_for, lambda: shown(url) == certificate(1)[0], 60, "new certificate")  # noqa: B023
        later = await asyncio.gather(*(stream(client, number, asyncio.Event()) for number in range(4)))
        assert {*await asyncio.gather(*streams), *later} == {TOKENS}


def test_commands_reach_an_endpoint_by_its_certificate_or_in_spite_of_it(deployment, tmp_path):
    (tmp_path / "ca.crt").write_bytes(certificate(0)[0] + certificate(1)[0])
    distrusted = deployment.mmrouter("verify", deployment.url)
    assert distrusted.returncode == 1
    assert "certificate" in distrusted.stdout.lower()
    for option in (("--insecure",), ("--cacert", str(tmp_path / "ca.crt"))):
        accepted = deployment.mmrouter("verify", *option, deployment.url)
        assert accepted.returncode == 0, accepted.stdout + accepted.stderr
    load = ("--requests", "4", "--concurrency", "2", "--output-tokens", "2", "--image-share", "0")
    measured = deployment.mmrouter("bench", deployment.url, *load, "--cacert", str(tmp_path / "ca.crt"))
    assert measured.returncode == 0, measured.stdout + measured.stderr
    assert deployment.mmrouter("bench", deployment.url, *load).returncode == 2
    none = deployment.mmrouter("verify", "--cacert", str(tmp_path / "missing"), deployment.url)
    assert none.returncode == 2
    assert "--cacert" in none.stderr
