"""The feed's keys rotate under load: every index follows its engine, no request fails, and the old keys are void."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from local.load import assert_replicas_agree, load
from waiting import wait_for

from mmrouter_cli.cluster.key_rotation import RotationError, rotate
from mmrouter_cli.status.control_api import Frontend, client, fetch
from mmrouter_operator.model.credentials import ROUTER_ITEMS, SIDECAR_ITEMS, SecretData, new_secret_data
from mmrouter_operator.model.key_rotation import LAST

PAUSE_SECONDS = 0.5
"""Between two pods that see a change."""


@pytest.fixture(scope="module")
def deployment(breakable):
    return breakable


class Secret:
    """The Secret of a local deployment: one copy of its files in each pod, which change one after the other."""

    def __init__(self, folder: Path) -> None:
        routers = {path.parent for path in folder.rglob("router.curve.secret")}
        sidecars = {path.parent for path in folder.rglob("sidecar.curve.secret")}
        assert routers
        assert sidecars
        self.copies = [(place, ROUTER_ITEMS) for place in sorted(routers)]
        self.copies[1:1] = [(place, SIDECAR_ITEMS) for place in sorted(sidecars)]
        entries = {name: (place / name).read_bytes() for place, names in self.copies for name in names}
        texts = {
            field: entries[f"{side}.curve.{half}"].decode()
            for side in ("router", "sidecar")
            for half in ("public", "secret")
            for field in [f"{side}_{half}"]
        }
        tokens = {
            name: entries[file].decode()
            for name, file in (("control_token", "control.token"), ("engine_key", "engine.key"))
        }
        self.content = SecretData(entries["identity.key"], **texts, **tokens)

    async def read(self) -> SecretData:
        return self.content

    async def write(self, content: SecretData) -> None:
        self.content = content
        for place, names in self.copies:
            await asyncio.sleep(PAUSE_SECONDS)
            for name in names:
                fresh = place / f".{name}"
                fresh.write_bytes(content.entries()[name])
                fresh.rename(place / name)


async def rotated(deployment, secret: Secret, wait_seconds: float = 120) -> list[str]:
    """Rotate the keys; return the steps."""
    steps: list[str] = []

    async def states(_: SecretData):
        async with client(deployment.token) as http:
            return {url: await fetch(http, Frontend(url, url)) for url in deployment.controls}

    await rotate(secret.read, secret.write, states, steps.append, wait_seconds)
    return steps


def test_keys_rotate_under_load_without_a_failed_request(deployment):
    secret = Secret(deployment.folder)
    before = secret.content
    epochs = {worker["uid"]: worker["epoch"] for worker in deployment.state()["workers"]}
    with load(deployment) as requests:
        requests.more(5)
        assert asyncio.run(rotated(deployment, secret)) == ["introduce", "switch", LAST]
        requests.more(20)
    wait_for(deployment.settled, 60, "every feed is heard")
    assert secret.content.router_secret != before.router_secret
    assert secret.content.sidecar_secret != before.sidecar_secret
    assert {worker["uid"]: worker["epoch"] for worker in deployment.state()["workers"]} == epochs
    assert_replicas_agree(deployment)
    deployment.assert_gate_passes()


def test_a_rotation_waits_for_the_last_process_and_continues_where_it_was(deployment):
    secret = Secret(deployment.folder)
    away = secret.copies.pop(1)  # a sidecar that does not see the change
    with pytest.raises(RotationError, match="does not have the Secret's keys; run the command again"):
        asyncio.run(rotated(deployment, secret, wait_seconds=3 * PAUSE_SECONDS))
    wait_for(deployment.settled, 60, "every feed is heard with old and new keys")
    secret.copies.append(away)
    asyncio.run(secret.write(secret.content))
    assert asyncio.run(rotated(deployment, secret)) == ["switch", LAST]
    wait_for(deployment.settled, 60, "every feed is heard")
    deployment.assert_gate_passes()


def test_keys_of_a_secret_that_was_created_anew_leave_running_pods_as_they_are(deployment):
    secret = Secret(deployment.folder)
    asyncio.run(secret.write(replace(new_secret_data(), control_token=deployment.token)))
    wait_for(
        lambda: sum("created anew" in line for line in deployment.log) == len(secret.copies), 60, "all have seen it"
    )
    wait_for(deployment.settled, 60, "every feed is heard")
