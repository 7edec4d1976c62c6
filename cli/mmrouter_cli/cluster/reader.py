"""Access of `status`, `doctor`, `plan` and `rotate-keys` to a cluster: complete objects by their path."""

import os
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from kubernetes.aio import config

from mmrouter_cli.status.control_api import Unread
from mmrouter_operator.cluster.client import ApiError, KubernetesCluster
from mmrouter_operator.cluster.connection import NO_KUBECONFIG, ConnectError, load, own_namespace

Object = dict[str, Any]
T = TypeVar("T")
_PAGE = "500"


class ClusterError(Exception):
    """The cluster cannot be read at all."""


class Reader(KubernetesCluster):
    """Reads complete objects, where the operator's client reads metadata only."""

    async def read(self, path: str, **query: str) -> Object:
        """Return the object at a path. Raises ``ApiError``."""
        return await self._call("GET", path, query=query or None)

    async def items(self, path: str, **query: str) -> list[Object]:
        """Return all objects of a collection. Raises ``ApiError``."""
        objects: list[Object] = []
        parameters = {**query, "limit": _PAGE}
        while True:
            page = await self._call("GET", path, query=parameters)
            objects += page.get("items") or []
            if not (token := page.get("metadata", {}).get("continue")):
                return objects
            parameters["continue"] = token


NOT_CONFIGURED = (
    "no cluster is configured: there is no ~/.kube/config and KUBECONFIG names no file, so give --kubeconfig"
)


def is_configured() -> bool:
    """Whether a cluster is known without ``--kubeconfig``."""
    return bool(_default_files()) or "KUBERNETES_SERVICE_HOST" in os.environ


@asynccontextmanager
async def reading(kubeconfig: Path | None) -> AsyncIterator[Reader]:
    """Connect as the user's kubectl would. Raises :class:`ClusterError`, also for an ``ApiError`` of the block."""
    if kubeconfig is None and not is_configured():
        raise ClusterError(NOT_CONFIGURED)
    try:
        reader = Reader(await load(kubeconfig), user_agent="mmrouter", identity="")
    except ConnectError as error:
        raise ClusterError(str(error)) from error
    try:
        yield reader
    except ApiError as error:
        raise ClusterError(f"the cluster cannot be read: {error}") from error
    finally:
        await reader.close()


async def attempt(work: Awaitable[T]) -> T | Unread:
    """Return the result, or the reason of an ``ApiError``, so that the rest can still be checked."""
    try:
        return await work
    except ApiError as error:
        return Unread(str(error))


def namespace_of(kubeconfig: Path | None) -> str:
    """Return kubectl's namespace: the current context's, or in a pod the pod's own.

    Errors in a kubeconfig are raised by :func:`reading`.
    """
    if kubeconfig is not None and not kubeconfig.is_file():
        return "default"
    if kubeconfig is None and not _default_files():
        return own_namespace()
    path = str(kubeconfig) if kubeconfig is not None else None
    try:
        _, active = config.list_kube_config_contexts(path)  # type: ignore[no-untyped-call]
    except (config.ConfigException, OSError, *NO_KUBECONFIG):
        return "default"
    return str(active.get("context", {}).get("namespace") or "default")


def _default_files() -> list[Path]:
    named = os.environ.get("KUBECONFIG", "").split(os.pathsep)
    files = [Path(path) for path in named if path] or [Path.home() / ".kube" / "config"]
    return [path for path in files if path.is_file()]
