"""A sidecar and two routers whose keys rotate: whatever order they see a change in, the feed continues."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from unit.sidecar.conftest import batch, stored
from waiting import until

from mmrouter_lib import feed_keys
from mmrouter_lib.feed_keys import ROUTER_PUBLIC, SIDECAR_SECRET, KeyWatch
from mmrouter_operator.model.credentials import SIDECAR_ITEMS, SecretData, new_secret_data
from mmrouter_operator.model.key_rotation import LAST, next_step, sidecar_fingerprints
from mmrouter_router.core.settings import curve_keys as router_keys
from mmrouter_router.fleet import feed_client
from mmrouter_router.fleet.feed_client import FeedClient
from mmrouter_router.fleet.membership import Member
from mmrouter_router.fleet.workers import Fleet
from mmrouter_router.telemetry.metrics import Metrics
from mmrouter_sidecar import app
from mmrouter_sidecar.settings import curve_keys


def write(folder: Path, secrets: SecretData, *names: str) -> None:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(secrets.entries()[name])


class OneRouter:
    """A router's client of the feed, without the rest of the router."""

    def __init__(self, ip: str, secrets: SecretData, context: zmq.asyncio.Context) -> None:
        self.fleet = Fleet(Metrics())
        self.worker = self.fleet.join(Member("pod-1", "pod-1", ip, "worker", "worker"))
        self.client = FeedClient(self.worker, self.fleet, self.keys(secrets), context, Metrics())
        self._task = asyncio.create_task(self.client.run())

    @staticmethod
    def keys(secrets: SecretData) -> Any:
        return router_keys({name: tuple(value.split()) for name, value in secrets.entries().items() if "curve" in name})

    def use(self, secrets: SecretData) -> None:
        self.client.use_keys(self.keys(secrets))

    def hears(self, keys: tuple[str, ...]) -> bool:
        """Whether the last heartbeat names these keys; the first one may come after a snapshot."""
        return self.worker.heartbeat is not None and self.worker.heartbeat.keys == keys

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


@contextlib.asynccontextmanager
async def routers(count: int, ip: str, secrets: SecretData) -> AsyncIterator[list[OneRouter]]:
    context = zmq.asyncio.Context()
    made = [OneRouter(ip, secrets, context) for _ in range(count)]
    try:
        yield made
    finally:
        for router in made:
            await router.stop()
        context.destroy(linger=0)


@pytest.fixture
def secrets() -> SecretData:
    return replace(new_secret_data(), identity_key=bytes(range(32)))


@pytest.fixture
def begun(settings: Any, secrets: SecretData, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Settings of a sidecar with these keys, which looks for changes without pause."""
    monkeypatch.setattr(app, "CHECK_SECONDS", 0.02)
    monkeypatch.setattr(feed_client, "TRIAL_SECONDS", 0.5)
    write(settings.secrets_dir, secrets, *SIDECAR_ITEMS)
    files = feed_keys.read_keys(settings.secrets_dir, SIDECAR_SECRET, ROUTER_PUBLIC)
    return replace(settings, curve=curve_keys(files))


@pytest.mark.parametrize("order", list(itertools.permutations(("sidecar", 0, 1))))
async def test_every_block_reaches_every_router_in_each_order_of_a_rotation(
    order: tuple[Any, ...], begun: Any, secrets: SecretData, start: Any, engines: Any
) -> None:
    await start(begun)
    engine, number = engines(), itertools.count(1)
    async with routers(2, begun.pod_ip, secrets) as both:

        async def follow() -> None:
            """Wait until a new block is in both indexes."""
            block = next(number)
            await engine.publish(batch(stored([block], ids=[block, block])))
            await until(lambda: all(r.worker.sync.synced and r.worker.sync.seq == block for r in both))
            held = [router.fleet.index.held(router.worker.slots[0]) for router in both]
            assert held == [block, block]

        await follow()
        step = ""
        while step != LAST:
            step, secrets = next_step(secrets)
            for process in order:
                if process == "sidecar":
                    write(begun.secrets_dir, secrets, *SIDECAR_ITEMS)
                else:
                    both[process].use(secrets)
                await follow()
            expected = tuple(sidecar_fingerprints(secrets))
            await until(lambda: all(router.hears(expected) for router in both))  # noqa: B023
        await follow()


async def test_a_router_with_retired_keys_is_refused(begun: Any, secrets: SecretData, start: Any) -> None:
    one = await start(begun)
    old = secrets
    async with routers(1, begun.pod_ip, secrets) as (follower,):
        await until(lambda: follower.worker.heartbeat is not None)
        for _ in range(2):
            _, secrets = next_step(secrets)
            write(begun.secrets_dir, secrets, *SIDECAR_ITEMS)
            follower.use(secrets)
            expected = tuple(sidecar_fingerprints(secrets))
            await until(lambda: follower.hears(expected))  # noqa: B023
        mixed = replace(old, sidecar_public=secrets.sidecar_public.split()[0])
        for stale, reason in ((mixed, "key"), (old, "protocol")):
            async with routers(1, begun.pod_ip, stale) as (stranger,):
                before = one.metric("refusals_total", reason=reason)
                await until(lambda: one.metric("refusals_total", reason=reason) > before)  # noqa: B023
                assert stranger.worker.heartbeat is None


async def test_keys_of_a_secret_that_was_created_anew_and_damaged_ones_change_nothing(
    begun: Any, secrets: SecretData, caplog: pytest.LogCaptureFixture
) -> None:
    watch = KeyWatch(begun.secrets_dir, secrets.identity_key, SIDECAR_SECRET, ROUTER_PUBLIC)
    assert watch.changed() is not None
    assert watch.changed() is None
    write(begun.secrets_dir, new_secret_data(), *SIDECAR_ITEMS)
    assert [watch.changed() for _ in range(3)] == [None] * 3
    assert caplog.text.count("created anew") == 1
    write(begun.secrets_dir, secrets, *SIDECAR_ITEMS)
    assert watch.changed() is None
    (begun.secrets_dir / ROUTER_PUBLIC).write_bytes(b"no key")
    assert watch.changed() is None
    (begun.secrets_dir / ROUTER_PUBLIC).unlink()
    assert watch.changed() is None
    _, following = next_step(secrets)
    write(begun.secrets_dir, following, *SIDECAR_ITEMS)
    found = watch.changed()
    assert found is not None
    assert curve_keys(found).fingerprints == tuple(sidecar_fingerprints(following))
