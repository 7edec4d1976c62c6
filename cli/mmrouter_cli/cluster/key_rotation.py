"""The command `mmrouter rotate-keys`: replaces the feed's keys in steps, each once every process has the last."""

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from mmrouter_cli.cluster.reader import Reader, namespace_of, reading
from mmrouter_cli.status.control_api import State, Unread, client, fetch, open_frontends
from mmrouter_operator.cluster.client import ApiError, NotFound
from mmrouter_operator.cluster.operator_kinds import KINDS
from mmrouter_operator.model.credentials import SecretData, SecretError, read_secret
from mmrouter_operator.model.key_rotation import LAST, next_step, router_fingerprints, sidecar_fingerprints
from mmrouter_operator.model.kinds import DEPLOYMENT_LABEL, FRONTEND_ROLE, ROLE_LABEL

ASK_SECONDS = 1.0
HEARD_SECONDS = 5.0
"""Age of a sidecar's last frame above which a frontend's record of its keys may be outdated."""

States = Mapping[str, State | Unread]
"""Name of a frontend -> its state."""


class RotationError(Exception):
    """The rotation cannot go on; the message says why, and how to continue."""


async def rotate(
    read: Callable[[], Awaitable[SecretData]],
    write: Callable[[SecretData], Awaitable[None]],
    states: Callable[[SecretData], Awaitable[States]],
    say: Callable[[str], None],
    wait_seconds: float,
) -> None:
    """Rotate the keys, or complete an interrupted rotation. ``wait_seconds``: the longest wait for each step.

    Raises :class:`RotationError`.
    """
    while True:
        secrets = await read()
        deadline = time.monotonic() + wait_seconds
        while missing := lacking(secrets, await states(secrets)):
            if time.monotonic() > deadline:
                raise RotationError(f"after {wait_seconds:g} s {missing}; run the command again to continue")
            await asyncio.sleep(ASK_SECONDS)
        step, following = next_step(secrets)
        say(step)
        await write(following)
        if step == LAST:
            return


def lacking(secrets: SecretData, states: States) -> str:
    """Return which process does not have the keys of a Secret, empty where all have them."""
    if not states:
        return "there is no frontend"
    for name, state in states.items():
        if isinstance(state, Unread):
            return f"{name} cannot be queried: {state.why}"
        if state.get("feed_keys") != router_fingerprints(secrets):
            return f"{name} does not have the Secret's keys"
        for worker in state["workers"]:
            heard = worker["heard_seconds_ago"]
            if heard is None or heard > HEARD_SECONDS:
                return f"{name} does not hear {worker['name']}"
            if worker.get("feed_keys") != sidecar_fingerprints(secrets):
                return f"{worker['name']} does not have the Secret's keys"
    return ""


async def on_cluster(
    name: str, namespace: str | None, kubeconfig: Path | None, say: Callable[[str], None], wait_seconds: float
) -> None:
    """Rotate the keys of a deployment with the rights of the kubeconfig. Raises :class:`RotationError`, and
    ``ClusterError`` where the cluster cannot be read.
    """
    namespace = namespace or namespace_of(kubeconfig)
    async with reading(kubeconfig) as reader:
        path = KINDS["Secret"].path(namespace, f"{name}-secrets")
        latest: dict[str, Any] = {}

        async def read() -> SecretData:
            try:
                latest.update(await reader.read(path))
                return read_secret(latest)
            except NotFound:
                raise RotationError(f"there is no Secret {name}-secrets in namespace {namespace}") from None
            except SecretError as error:
                raise RotationError(f"Secret {name}-secrets: {error}") from error

        async def write(secrets: SecretData) -> None:
            data = {entry: base64.b64encode(value).decode() for entry, value in secrets.entries().items()}
            try:
                await reader.replace({**latest, "data": data})
            except ApiError as error:
                raise RotationError(f"Secret {name}-secrets cannot be changed: {error}") from error

        async def states(secrets: SecretData) -> States:
            return await _states(reader, name, namespace, kubeconfig, secrets.control_token)

        await rotate(read, write, states, say, wait_seconds)


async def _states(reader: Reader, name: str, namespace: str, kubeconfig: Path | None, token: str) -> States:
    selector = f"{DEPLOYMENT_LABEL}={name},{ROLE_LABEL}={FRONTEND_ROLE}"
    pods = await reader.items(KINDS["Pod"].path(namespace), labelSelector=selector)
    pods = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    async with open_frontends(pods, kubeconfig) as frontends, client(token) as http:
        answers = await asyncio.gather(*(fetch(http, frontend) for frontend in frontends))
    return {frontend.name: answer for frontend, answer in zip(frontends, answers, strict=True)}
