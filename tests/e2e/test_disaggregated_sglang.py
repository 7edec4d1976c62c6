"""SGLang's prefill and decode engines in real pods: proved in pairs, and no request is lost with one of them."""

import time
from collections.abc import Iterator

import pytest
from artefacts import Record
from cluster.access import Access
from e2e.deploying import RESTRICTED
from e2e.staged_deployments import Chain, chained, strike
from scenarios import assert_whole

SPEC = {
    "engine": {"type": "sglang", "kvConnector": {"transferBackend": "nixl"}},
    "pools": [
        {"name": "prefill", "role": "prefill", "replicas": 2, "accelerator": {"kind": "cpu"}},
        {"name": "decode", "role": "decode", "replicas": 1, "accelerator": {"kind": "cpu"}},
    ],
}


@pytest.fixture(scope="module")
def pairs(operated: Access, record: Record) -> Iterator[Chain]:
    began = time.monotonic()
    with operated.namespace(**RESTRICTED) as namespace, chained(operated, namespace, SPEC) as made:
        record("SGLang's pairs Ready and proved after apply, s", round(time.monotonic() - began, 1))
        yield made


def test_pairs_are_proved_and_a_picture_that_is_shown_again_is_a_whole_hit(pairs: Chain) -> None:
    expected = {
        "Ready": ("True", "Serving"),
        "ExactRoutingVerified": ("True", "Verified"),
        "ChainComplete": ("True", "EveryStage"),
    }
    assert pairs.conditions(*expected) == expected
    with pairs.chat() as chat:
        picture = chat.image("a")
        assert_whole(chat.send(picture, "what?"), chat.send(picture, "what?"))
        decision = chat.decided(picture, "and where?")
    (decode,) = pairs.deployed.pods("decode")
    assert (decision["form"], decision["answers"]) == ("prefill-decode", decode["metadata"]["name"])
    assert decision["worker"] in {pod["metadata"]["name"] for pod in pairs.deployed.pods("prefill")}


def test_a_prefill_engine_that_is_killed_costs_no_request(pairs: Chain, record: Record) -> None:
    traffic, since = strike(pairs, "prefill", "ReplicasMissing", count=1)
    again = [each for each in pairs.decisions(since) if len(each["attempts"]) > 1]
    summary = f"{len(traffic.sent)} requests, {len(again)} of them by another pair, {len(traffic.failed)} failed"
    record("kill -9 of one of two SGLang prefill engines", summary)
    assert traffic.failed_before_streaming == [], traffic
