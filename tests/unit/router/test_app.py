"""Readiness of a router, its reaction to membership changes, and its cold routes; feeds are driven by the tests."""

from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import zmq
from unit.router.rig import BLOCK, KEYS, Rig, deployment

from mmrouter_router import app
from mmrouter_router.app import Router
from mmrouter_router.core.settings import CurveKeys, Settings
from mmrouter_router.fleet.membership import Membership, Peer
from mmrouter_router.fleet.workers import Member

MODEL = Path(__file__).parents[3] / "examples" / "models" / "tiny-qwen2-vl"
OWN_IP = "127.84.0.1"


@asynccontextmanager
async def router(config: Path = Path("/nowhere")):
    """A router without its ports."""
    public, secret = zmq.curve_keypair()
    keys = CurveKeys(public, secret, public)
    made = Router(Settings(deployment(), "r", OWN_IP, config, MODEL, bytes(32), "k", "t", keys))
    async with made.lifespan():
        yield made
        made.apply_membership(Membership(()))


def value(router: Router, metric: str, **labels: str) -> float | None:
    return router.metrics.registry.get_sample_value(f"mmrouter_{metric}", labels)


def member(name: str = "w0", ip: str = "127.84.0.2", role: str = "worker", **more) -> Member:
    return Member(f"uid-{name}", name, ip, "worker", role, **more)


def heard(router: Router, uid: str) -> None:
    """The sidecar of a pod sends its snapshot and a heartbeat."""
    rig = Rig.__new__(Rig)
    rig.fleet = router.fleet
    worker = router.fleet.workers[uid]
    rig.fleet.feed_connected(worker)
    rig.sync(worker, KEYS)
    rig.beat(worker, block_size=BLOCK)


async def test_ready_once_all_known_sidecars_sent_their_snapshot():
    async with router() as r:
        assert not r.ready
        r.apply_membership(Membership((member("a"), member("b"))))
        heard(r, "uid-a")
        assert not r.ready
        heard(r, "uid-b")
        assert r.ready


async def test_pod_with_unready_sidecar_does_not_delay_readiness():
    async with router() as r:
        r.apply_membership(Membership((member("a"), member("starting", ready=False))))
        heard(r, "uid-a")
        assert r.ready


async def test_draining_pod_does_not_delay_readiness():
    async with router() as r:
        r.apply_membership(Membership((member("a"), member("gone", draining=True))))
        heard(r, "uid-a")
        assert r.ready


async def test_ready_at_the_deadline_without_all_snapshots(monkeypatch):
    monkeypatch.setattr(app, "READY_SECONDS", 0.0)
    async with router() as r:
        r.apply_membership(Membership((member("a"),)))
        assert r.ready


async def test_readiness_survives_new_and_lost_workers():
    async with router() as r:
        r.apply_membership(Membership(()))
        assert r.ready
        r.apply_membership(Membership((member("a"), member("b"))))
        assert r.ready
        r.apply_membership(Membership(()))
        assert r.ready


async def test_deletion_of_own_pod_ends_readiness():
    async with router() as r:
        r.apply_membership(Membership(()))
        assert r.ready
        r.apply_membership(Membership((), leaving=True))
        assert not r.ready
        assert not r.shutdown.stopping.is_set()


async def test_pod_with_new_address_gets_a_new_feed_and_an_empty_cache():
    async with router() as r:
        r.apply_membership(Membership((member("a"),)))
        heard(r, "uid-a")
        before, feed = r.fleet.workers["uid-a"], r.feed("uid-a")
        assert len(r.fleet.index) == len(KEYS)
        r.apply_membership(Membership((member("a", ip="127.84.0.9"),)))
        assert r.fleet.workers["uid-a"] is not before
        assert r.feed("uid-a") is not feed
        assert r.fleet.workers["uid-a"].slots == {}
        assert not r.fleet.workers["uid-a"].sync.synced


async def test_pod_that_changes_state_keeps_feed_and_cache():
    async with router() as r:
        r.apply_membership(Membership((member("a", ready=False),)))
        heard(r, "uid-a")
        before, feed = r.fleet.workers["uid-a"], r.feed("uid-a")
        r.apply_membership(Membership((member("a", draining=True),)))
        assert r.fleet.workers["uid-a"] is before
        assert r.feed("uid-a") is feed
        assert before.slots
        assert not before.serving


async def test_router_is_not_its_own_peer():
    async with router() as r:
        r.apply_membership(Membership((), (Peer("x", "x", OWN_IP), Peer("y", "y", "127.84.0.3"))))
        assert [peer.uid for peer in r.peers] == ["y"]


@pytest.mark.parametrize("role", ["encoder", "decode", "prefill", "renderer"])
async def test_pods_of_all_roles_are_accepted(role):
    async with router() as r:
        r.apply_membership(Membership((member("other", role=role), member("w"))))
        heard(r, "uid-w")
        assert {row["role"] for row in r.reporter.report()["workers"].values()} == {role, "worker"}
        r.apply_membership(Membership((replace(member("other", role=role), draining=True),)))
        rows = r.reporter.report()["workers"]
        assert [(row["role"], row["routable"]) for row in rows.values()] == [(role, False)]


async def test_requests_to_cold_routes_are_counted_without_client_paths_as_labels():
    async with router() as r:
        transport = httpx.ASGITransport(r.client_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            for path in ("/v1/models", "/health", "/v1/embeddings", "/admin", "/v1/models/../secrets"):
                await client.get(path)
            await client.post("/v1/models")
        (family,) = r.metrics.requests.collect()
        counts = {
            (sample.labels["path"], sample.labels["code"]): sample.value
            for sample in family.samples
            if sample.name.endswith("_total")
        }
        assert counts == {("/v1/models", "200"): 1, ("/v1/models", "405"): 1, ("other", "404"): 3}


async def test_model_list_without_valid_key_is_a_counted_401(tmp_path):
    (tmp_path / "api-keys").mkdir()
    (tmp_path / "api-keys" / "tenant").write_text("key")
    async with router(tmp_path) as r:
        transport = httpx.ASGITransport(r.client_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            answer = await client.get("/v1/models", headers={"authorization": "Bearer other"})
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert value(r, "requests_total", path="/v1/models", code="401") == 1


@pytest.mark.parametrize(("given", "counted"), [("wrong", 1), ("t", 0), (None, 0)])
async def test_request_with_wrong_control_token_is_counted(given, counted):
    headers = {} if given is None else {"x-mmrouter-control": given}
    async with router() as r:
        body = {"model": r.settings.served_model, "messages": [{"role": "user", "content": "hello"}]}
        transport = httpx.ASGITransport(r.client_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            answer = await client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 503, "there is no engine, whatever the header says"
        assert (value(r, "control_refusals_total", reason="header") or 0) == counted


async def test_internal_error_is_not_counted_as_client_disconnect():
    async def fails(*args, **options) -> None:
        raise ZeroDivisionError

    async with router() as r:
        r.chat.prepare = fails
        transport = httpx.ASGITransport(r.client_app(), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            assert (await client.post("/v1/chat/completions", json={})).status_code == 500
        codes = {sample.labels["code"] for family in r.metrics.requests.collect() for sample in family.samples}
        assert codes == {"500"}
