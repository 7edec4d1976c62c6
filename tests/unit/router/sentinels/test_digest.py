"""An image's bytes are hashed once, whatever the number of scopes, and a large image's never in the event loop."""

import json
import threading

import pytest
from unit.router.sentinels.test_store import CANARY, facts, made_of
from unit.router.test_prepare import SIZE, settings

from mmrouter_cli.sample_images import data_uri, picture
from mmrouter_router.intake import Limits, parse_chat
from mmrouter_router.media import MediaResolver
from mmrouter_router.request import prepare as stage
from mmrouter_router.request.prepare import THREAD_BYTES, Preparer
from mmrouter_router.sentinels import SentinelStore, store
from mmrouter_router.telemetry.metrics import Metrics

SCOPES = [("0.5.23/f", pool) for pool in ("large", "small")]


@pytest.fixture
def threads(monkeypatch):
    """The threads in which each image was hashed, by its bytes."""
    seen: dict[bytes, list[threading.Thread]] = {}

    def noted(data: bytes) -> str:
        seen.setdefault(data, []).append(threading.current_thread())
        return hashed(data)

    hashed = store.sha256_of
    monkeypatch.setattr(store, "sha256_of", noted)
    monkeypatch.setattr(stage, "sha256_of", noted)
    return seen


def known(*, calibrated: bool) -> SentinelStore:
    sentinels = SentinelStore(probe_images=[(CANARY, CANARY)])
    for scope in SCOPES:
        sentinels.describe(scope, "0.5.23", facts())
        if calibrated:
            sentinels.on_observed(scope, CANARY, CANARY, made_of(CANARY))
    return sentinels


@pytest.mark.parametrize("calibrated", [True, False], ids=["calibrated", "calibrated meanwhile"])
async def test_image_is_hashed_once_and_a_large_one_in_a_thread(threads, calibrated):
    small = picture("a", 112, 112)
    large = picture("b", 112, 112) + bytes(THREAD_BYTES)
    own = settings(engine="sglang")
    media = MediaResolver(own.deployment.spec.routing.media, metrics=Metrics())
    preparer = Preparer(own, media, sentinels=known(calibrated=calibrated))
    threads.clear()
    parts = [{"type": "image_url", "image_url": {"url": data_uri(data)}} for data in (small, large)]
    body = json.dumps({"model": "t", "messages": [{"role": "user", "content": parts}]}).encode()
    for _ in range(2):
        prepared = await preparer.prepare(parse_chat(body, Limits(), "t"), None)
        for scope in SCOPES:
            preparer.sentinels.on_observed(scope, CANARY, CANARY, made_of(CANARY))
            assert prepared.filled(scope).unknown is None
            assert len(prepared.keys(SIZE, scope)) > 0
            for span, data in zip(prepared.spans, (small, large), strict=True):
                assert tuple(prepared.filled(scope).ids[span.offset : span.offset + 4]) == made_of(data)
    await media.close()
    assert [len(threads[data]) for data in (small, large)] == [1, 1]
    assert threads[large][0] is not threading.current_thread()


async def test_images_are_not_hashed_without_predictions(threads):
    own = settings(engine="sglang")
    media = MediaResolver(own.deployment.spec.routing.media, metrics=Metrics())
    sentinels = known(calibrated=False)
    preparer = Preparer(own, media, sentinels=sentinels)
    for scope in SCOPES:
        sentinels.on_observed(scope, CANARY, CANARY, (2000001, 2000002, 2000003, 2000004))  # no known fingerprint
    threads.clear()
    body = {"model": "t", "messages": [{"role": "user", "content": [{"type": "text", "text": "look"}]}]}
    body["messages"][0]["content"].append({"type": "image_url", "image_url": {"url": data_uri(picture("c", 56, 56))}})
    prepared = await preparer.prepare(parse_chat(json.dumps(body).encode(), Limits(), "t"), None)
    assert [prepared.filled(scope).unknown for scope in SCOPES] == [0, 0]
    sentinels.on_observed(SCOPES[0], b"seen", b"seen", (2000001, 2000002, 2000003, 2000004))
    await media.close()
    assert threads == {}
