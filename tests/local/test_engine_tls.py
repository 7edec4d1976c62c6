"""Engines that serve TLS: every stage, certificates that change under load, and a CA that did not issue them."""

import httpx
import openai
import pytest
from local.engine_certificates import NAME, engines, replace, serving_tls, shown, trust
from local.load import IMAGES, Load
from local.rig import MEDIA, deployed, example
from long_form import parameters
from unit.router.certificates import certificate
from waiting import wait_for

STAGED = ["demo-disaggregated.yaml", "demo-disaggregated-sglang.yaml", "demo-handover.yaml"]


@pytest.fixture(scope="module", params=parameters(["demo.yaml", "demo-sglang.yaml"], "demo.yaml"))
def deployment(request, tmp_path_factory):
    with deployed(tmp_path_factory.mktemp("tls"), *serving_tls(example(request.param))) as deployment:
        yield deployment


def test_ca_and_certificates_change_twice_under_load_and_no_request_fails(deployment):
    with Load(deployment, breaks=False).asking() as load:
        for old, new in ((0, 1), (1, 2)):
            load.more(20)
            trust(deployment, old, new)
            chain, key = certificate(new, NAME)
            replace(deployment, "engine-certificate", tls_crt=chain, tls_key=key)
            for ip in engines(deployment):
                wait_for(lambda: shown(ip) == chain, 60, "the new certificate is in use")  # noqa: B023
            trust(deployment, new)
            load.more(40)
    for event in ("refused", "untrusted", "name", "expired", "handshake_failed"):
        assert deployment.metric("mmrouter_engine_tls_total", event=event) == 0
    deployment.assert_gate_passes()


def test_a_plain_request_gets_no_answer_from_an_engine(deployment):
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://{engines(deployment)[0]}:8000/health", timeout=10)


def test_an_engine_with_a_certificate_of_another_ca_gets_no_request(deployment):
    current = next(number for number in range(3) if certificate(number, NAME)[0] == shown(engines(deployment)[0]))
    trust(deployment, 7)
    client = deployment.client(max_retries=0)

    for _ in range(3):
        with pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hello?"}], max_tokens=2)
        assert caught.value.status_code in (502, 503)  # refused by the router, or counted as down by the sidecar before
    wait_for(
        lambda: any("refuses the engine's certificate" in line for line in deployment.log),
        60,
        "the sidecar's log says why",
    )
    trust(deployment, current)
    wait_for(deployment.settled, 60, "all engines are reached again")
    deployment.assert_gate_passes()


@pytest.mark.parametrize("name", parameters(STAGED, "demo-disaggregated.yaml"))
def test_every_stage_of_a_request_is_sent_by_tls(name, tmp_path):
    resource = example(name)
    resource["spec"].setdefault("routing", {})["media"] = MEDIA
    with deployed(tmp_path, *serving_tls(resource)) as deployment:
        parts = [
            {"type": "text", "text": "What is this? " * 20},
            {"type": "image_url", "image_url": {"url": IMAGES[0]}},
        ]
        client = deployment.client()
        for _ in range(3):
            client.chat.completions.create(model="demo", messages=[{"role": "user", "content": parts}], max_tokens=3)
        deployment.assert_gate_passes()
        for ip in engines(deployment):
            assert shown(ip) == certificate(0, NAME)[0]
