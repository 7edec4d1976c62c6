"""Real engines that serve TLS behind a sidecar and a router; they use a certificate that is replaced, twice."""

import pytest
from conformance.engine_process import engine_args, require_memory
from conformance.engines import deployed, manifest, pool, sglang_manifest
from conformance.setups import TINY
from local.engine_certificates import NAME, engines, replace, serving_tls, shown, trust
from long_form import parameters
from unit.router.certificates import certificate
from waiting import wait_for

from mmrouter_cli.sample_images import data_uri, picture

SECONDS = 120


@pytest.fixture(scope="module", params=parameters(["vllm", "sglang"]))
def deployment(request, shrunk, tmp_path_factory):
    require_memory()
    env = request.getfixturevalue(f"{request.param}_env")
    if request.param == "vllm":
        engine = {"type": "vllm", "args": engine_args()}
        made = manifest(shrunk(TINY), engine, [pool("worker")], repository=TINY)
    else:
        made = sglang_manifest(shrunk(TINY), TINY, [("worker", 1)])
    with deployed(env, tmp_path_factory.mktemp("tls"), *serving_tls(made)) as deployment:
        yield deployment


def test_requests_are_answered_while_a_real_engine_gets_new_certificates(deployment):
    wait_for(deployment.settled, SECONDS, "the engine's blocks are those that were predicted")
    [ip] = engines(deployment)
    client = deployment.client(max_retries=0)
    parts = [
        {"type": "text", "text": "Describe this picture. " * 20},
        {"type": "image_url", "image_url": {"url": data_uri(picture("tls", 112, 112))}},
    ]
    for old, new in ((0, 0), (0, 1), (1, 2)):
        if old != new:
            trust(deployment, old, new)
            chain, key = certificate(new, NAME)
            replace(deployment, "engine-certificate", tls_crt=chain, tls_key=key)
            wait_for(lambda: shown(ip) == chain, SECONDS, "the engine uses the new certificate")  # noqa: B023
            trust(deployment, new)
        stream = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": parts}], max_tokens=4, stream=True
        )
        assert len(list(stream)) > 1
    assert shown(ip) == certificate(2, NAME)[0]
    assert deployment.metric("mmrouter_engine_tls_total", event="untrusted") == 0
    assert deployment.settled()
