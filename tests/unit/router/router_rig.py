"""A router without its ports, requests to its application, and pods that its tests add and feed."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import httpx
import zmq
from unit.router.preparing import settings
from unit.router.rig import KEYS, deployment, heartbeat, sync

from mmrouter_router.app import Router
from mmrouter_router.core.settings import CurveKeys
from mmrouter_router.fleet.feed_client import FeedClient
from mmrouter_router.fleet.membership import Membership
from mmrouter_router.fleet.workers import Member

OWN_IP = "127.84.0.1"


@asynccontextmanager
async def router(config: Path = Path("/nowhere"), own=None, *, key: str = ""):
    """A router without its ports, of this deployment; with a key, which ``tenant`` has in the folder."""
    if key:
        (config / "api-keys").mkdir()
        (config / "api-keys" / "tenant").write_text(key)
    public, secret = zmq.curve_keypair()
    keys = (CurveKeys(public, secret, public),)
    made = Router(replace(settings(), deployment=own or deployment(), pod_ip=OWN_IP, config_dir=config, curve=keys))
    # A feed of its own would connect again at any time and ask for a snapshot that no sidecar sends.
    with patch.object(FeedClient, "run", lambda feed: asyncio.Event().wait()):
        async with made.lifespan():
            yield made
            made.apply_membership(Membership(()))


HELLO = {"model": "t", "messages": [{"role": "user", "content": "x"}]}


def client_of(router: Router, headers=None, **options) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(router.client_app(), **options)
    return httpx.AsyncClient(transport=transport, base_url="http://router", headers=headers)


def value(router: Router, metric: str, **labels: str) -> float | None:
    return router.metrics.registry.get_sample_value(f"mmrouter_{metric}", labels)


def member(name: str = "w0", ip: str = "127.84.0.2", role: str = "worker", **more) -> Member:
    return Member(f"uid-{name}", name, ip, "worker", role, **more)


def heard(router: Router, uid: str, **beat) -> None:
    """The sidecar of a pod sends its snapshot and a heartbeat with these fields."""
    worker = router.fleet.workers[uid]
    router.fleet.feed_connected(worker)
    sync(router.fleet, worker, KEYS)
    heartbeat(router.fleet, worker, **beat)


def join(router: Router, *members: Member, **beat) -> None:
    """These pods are the members now, and their sidecars are heard."""
    router.apply_membership(Membership(members))
    for each in members:
        heard(router, each.uid, **beat)
