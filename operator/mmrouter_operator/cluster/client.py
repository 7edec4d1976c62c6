"""The only file with a cluster client. Raw dicts in and out; every failure is one of the errors below.

The client's models of every kind are left alone: reading them costs time and memory, and a newer server's fields would
pass through them anyway.
"""

import asyncio
import contextvars
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from mmrouter_operator.model.capabilities import Capabilities
from mmrouter_operator.model.refs import KINDS, OPTIONAL_CHILDREN, RESOURCE, Ref
from mmrouter_operator.model.snapshot import PodView

MANAGER = "mmrouter-operator"
GATE_MANAGER = "mmrouter-operator-gates"
TIMEOUT = 10.0
"""Seconds that one call may take."""

_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_JSON = "application/json"
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

_WRONG_TYPE = "failed to create typed patch object"
"""How the server begins its answer, a 500, to an apply with a field of another type than the kind has."""

Object = dict[str, Any]
Objects = list[Object]
_T = TypeVar("_T")


class ApiError(Exception):
    """A call failed. ``status`` is the HTTP status, 0 when there was no answer."""

    def __init__(self, message: str, *, status: int = 0, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class NotFound(ApiError):  # noqa: N818 - the API's own word
    """There is no such object, or no such kind."""


class Conflict(ApiError):  # noqa: N818
    """The object changed since it was read."""


class AlreadyThere(ApiError):  # noqa: N818
    """An object of that name exists."""


class TooManyRequests(ApiError):  # noqa: N818
    """The server asks for a pause; ``retry_after`` says how long, in seconds, where it did."""


class Unavailable(ApiError):  # noqa: N818
    """No answer, or a 5xx: the call may or may not have had its effect."""


class Refused(ApiError):  # noqa: N818
    """The server understood and will not: invalid, forbidden. Sending the same again is of no use."""


class Deposed(Exception):  # noqa: N818
    """A write was held back because this process does not hold the lease (any more)."""


class Cluster(Protocol):
    """What the operator needs of a cluster. Every method may raise :class:`ApiError`."""

    async def get(self, ref: Ref) -> Object | None:
        """Return the live object, ``None`` where there is none."""

    async def list(self, kind: str, namespace: str, selector: str) -> Objects:
        """Return the metadata (and no more) of all objects of a kind; all namespaces where ``namespace`` is empty."""

    async def apply(self, obj: Object) -> Object:
        """Server-side apply, forced; returns the live object."""

    async def merge(self, obj: Object) -> Object:
        """Merge patch: maps are merged, every list becomes ours as a whole; returns the live object."""

    async def create(self, obj: Object) -> Object:
        """Create. Raises :class:`AlreadyThere`."""

    async def replace(self, obj: Object) -> Object:
        """Write over the object of that ``resourceVersion``. Raises :class:`Conflict`."""

    async def apply_status(self, obj: Object) -> Object:
        """Server-side apply of the status subresource; returns the live object."""

    async def apply_gates(self, pod: PodView, gates: Mapping[str, tuple[bool, str, str]]) -> None:
        """Set a pod's readiness gates: type -> (status, reason, message)."""

    async def delete(self, ref: Ref, uid: str) -> None:
        """Delete exactly that object, its dependents in the background. One that is gone or another is no error."""

    async def event(self, regarding: Object, type: str, reason: str, action: str, note: str) -> None:
        """Record a Kubernetes Event; ``type`` is Normal or Warning."""

    async def exists(self, ref: Ref) -> bool:
        """Whether the object is there; reads its metadata only."""

    async def capabilities(self) -> Capabilities:
        """Return the served API versions; one with an optional child's kind only where it has that kind."""

    async def published(self) -> Object:
        """Return the OpenAPI document of our kind. Whoever is logged in may read it, unlike the definition itself."""


_fence: contextvars.ContextVar[Callable[[], object] | None] = contextvars.ContextVar("fence", default=None)


async def _last_check(*_: object) -> None:
    # A connection stands and nothing has been sent: waiting for one is where the time of a call goes.
    check = _fence.get()
    if check is not None:
        check()


def fence_hooks() -> aiohttp.TraceConfig:
    """Return the hooks that ask the lease a last time: when a connection is there, and right before the first byte.

    The hook of a sent chunk is called before the chunk is written, headers and all, with nothing awaited in between
    (aiohttp 3.14): a process that is stopped before it writes nothing when it wakes.
    """
    hooks = aiohttp.TraceConfig()
    hooks.on_request_chunk_sent.append(_last_check)
    hooks.on_connection_create_end.append(_last_check)
    hooks.on_connection_reuseconn.append(_last_check)
    return hooks


class KubernetesCluster:
    """:class:`Cluster` on a real API server. ``identity`` names this process in the server's audit log."""

    def __init__(self, configuration: Configuration, *, user_agent: str, identity: str) -> None:
        configuration.trace_configs = [*(configuration.trace_configs or []), fence_hooks()]
        # Retrying is the queue's business; a call is one call.
        configuration.retries = None
        self._client = ApiClient(configuration)
        self._client.user_agent = user_agent
        self._identity = identity

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()  # type: ignore[no-untyped-call]

    async def get(self, ref: Ref) -> Object | None:
        """See :class:`Cluster`."""
        try:
            return await self._call("GET", _path(ref))
        except NotFound:
            return None

    async def list(self, kind: str, namespace: str, selector: str) -> Objects:
        """See :class:`Cluster`."""
        found: Objects = []
        query = {"labelSelector": selector, "limit": "500"} if selector else {"limit": "500"}
        while True:
            page = await self._call("GET", KINDS[kind].path(namespace), query=query, accept=_METADATA_LIST)
            found += page.get("items") or []
            if not (token := page.get("metadata", {}).get("continue")):
                return found
            query["continue"] = token

    async def apply(self, obj: Object) -> Object:
        """See :class:`Cluster`."""
        return await self._apply(_path(Ref.of(obj)), obj, MANAGER)

    async def merge(self, obj: Object) -> Object:
        """See :class:`Cluster`."""
        query = {"fieldManager": MANAGER}
        return await self._call("PATCH", _path(Ref.of(obj)), body=obj, query=query, content_type=_MERGE)

    async def create(self, obj: Object) -> Object:
        """See :class:`Cluster`."""
        ref = Ref.of(obj)
        path = KINDS[ref.kind].path(ref.namespace)
        return await self._call("POST", path, body=obj, query={"fieldManager": MANAGER})

    async def replace(self, obj: Object) -> Object:
        """See :class:`Cluster`."""
        return await self._call("PUT", _path(Ref.of(obj)), body=obj, query={"fieldManager": MANAGER})

    async def apply_status(self, obj: Object) -> Object:
        """See :class:`Cluster`."""
        return await self._apply(_path(Ref.of(obj), "status"), obj, MANAGER)

    async def apply_gates(self, pod: PodView, gates: Mapping[str, tuple[bool, str, str]]) -> None:
        """See :class:`Cluster`. The uid keeps the patch from a pod of the same name."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        conditions = [
            {"type": gate, "status": str(value), "reason": reason, "message": message}
            | {"lastTransitionTime": pod.gate_times.get(gate, now) if pod.gates.get(gate) == value else now}
            for gate, (value, reason, message) in sorted(gates.items())
        ]
        metadata = {"name": pod.name, "namespace": pod.namespace, "uid": pod.uid}
        patch = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": {"conditions": conditions}}
        await self._apply(KINDS["Pod"].path(pod.namespace, pod.name, "status"), patch, GATE_MANAGER)

    async def delete(self, ref: Ref, uid: str) -> None:
        """See :class:`Cluster`."""
        options = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        try:
            await self._call("DELETE", _path(ref), body=options)
        except (NotFound, Conflict):
            return

    async def event(self, regarding: Object, type: str, reason: str, action: str, note: str) -> None:
        """See :class:`Cluster`."""
        metadata = regarding["metadata"]
        about = {"apiVersion": regarding["apiVersion"], "kind": regarding["kind"]}
        about |= {field: metadata[field] for field in ("name", "namespace", "uid") if metadata.get(field)}
        if metadata.get("resourceVersion"):
            about["resourceVersion"] = metadata["resourceVersion"]
        namespace = metadata["namespace"]
        event = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": f"{metadata['name']}.{secrets.token_hex(8)}", "namespace": namespace},
            "eventTime": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "reportingController": "mmrouter.io/operator",
            "reportingInstance": self._identity[:128],
            "type": type,
            "reason": reason,
            "action": action,
            # The API's own limit.
            "note": note[:1024],
            "regarding": about,
        }
        await self._call("POST", KINDS["Event"].path(namespace), body=event)

    async def exists(self, ref: Ref) -> bool:
        """See :class:`Cluster`."""
        try:
            await self._call("GET", _path(ref), accept=_METADATA)
        except NotFound:
            return False
        return True

    async def capabilities(self) -> Capabilities:
        """See :class:`Cluster`."""
        groups = (await self._call("GET", "/apis"))["groups"]
        apis = {version["groupVersion"] for group in groups for version in group["versions"]}
        for kind in OPTIONAL_CHILDREN.values():
            # Others define kinds in the same group: without ours it is of no use, and a watch would find nothing.
            if kind.api_version in apis:
                found = await self._call("GET", f"/apis/{kind.api_version}")
                if kind.plural not in {resource["name"] for resource in found.get("resources") or []}:
                    apis.discard(kind.api_version)
        return Capabilities(frozenset(apis | {"v1"}))

    async def published(self) -> Object:
        """See :class:`Cluster`."""
        return await self._call("GET", f"/openapi/v3/apis/{KINDS[RESOURCE].api_version}")

    async def _apply(self, path: str, obj: Object, manager: str) -> Object:
        query = {"fieldManager": manager, "force": "true"}
        return await self._call("PATCH", path, body=obj, query=query, content_type=_APPLY)

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: Object | None = None,
        query: Mapping[str, str] | None = None,
        accept: str = _JSON,
        content_type: str = _JSON,
    ) -> Object:
        headers = {"Accept": accept, "Content-Type": content_type}
        url = f"{path}?{urlencode(query)}" if query else path
        try:
            _, target, headers, _, _ = await self._client.param_serialize(
                method, url, header_params=headers, auth_settings=["BearerToken"]
            )
            response = await self._client.call_api(
                method, target, headers, body, _request_timeout=aiohttp.ClientTimeout(total=TIMEOUT)
            )
            content = await response.read()  # type: ignore[no-untyped-call]
        except TimeoutError as error:
            raise Unavailable(f"{method} {path}: no answer within {TIMEOUT:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"{method} {path}: {error}") from error
        try:
            answer: Object = json.loads(content) if content else {}
        except ValueError:
            answer = {"message": content[:200].decode(errors="replace")}
        if response.status >= 400:
            raise _error(response.status, answer, response.headers)
        return answer


class Fenced:
    """A :class:`Cluster` whose writes need a valid lease.

    ``left`` returns the seconds for which the lease is surely ours; not more than 0 when it is not. A write is refused
    (:class:`Deposed`) before it is sent, and given up when the time is over.
    """

    def __init__(self, cluster: Cluster, left: Callable[[], float]) -> None:
        self._cluster, self._left = cluster, left
        self.get = cluster.get
        self.list = cluster.list
        self.exists = cluster.exists
        self.capabilities = cluster.capabilities
        self.published = cluster.published

    async def apply(self, obj: Object) -> Object:
        """See :class:`Cluster`."""
        return await self._write(lambda: self._cluster.apply(obj))

    async def merge(self, obj: Object) -> Object:
        """See :class:`Cluster`."""
        return await self._write(lambda: self._cluster.merge(obj))

    async def create(self, obj: Object) -> Object:
        """See :class:`Cluster`."""
        return await self._write(lambda: self._cluster.create(obj))

    async def replace(self, obj: Object) -> Object:
        """See :class:`Cluster`."""
        return await self._write(lambda: self._cluster.replace(obj))

    async def apply_status(self, obj: Object) -> Object:
        """See :class:`Cluster`."""
        return await self._write(lambda: self._cluster.apply_status(obj))

    async def apply_gates(self, pod: PodView, gates: Mapping[str, tuple[bool, str, str]]) -> None:
        """See :class:`Cluster`."""
        await self._write(lambda: self._cluster.apply_gates(pod, gates))

    async def delete(self, ref: Ref, uid: str) -> None:
        """See :class:`Cluster`."""
        await self._write(lambda: self._cluster.delete(ref, uid))

    async def event(self, regarding: Object, type: str, reason: str, action: str, note: str) -> None:
        """See :class:`Cluster`."""
        await self._write(lambda: self._cluster.event(regarding, type, reason, action, note))

    def _check(self) -> float:
        left = self._left()
        if left <= 0:
            raise Deposed("this process does not hold the lease")
        return left

    async def _write(self, send: Callable[[], Awaitable[_T]]) -> _T:
        left = self._check()
        token = _fence.set(self._check)
        try:
            async with asyncio.timeout(left):
                return await send()
        except TimeoutError as error:
            raise Deposed("the lease ran out while a write was under way") from error
        except Unavailable as error:
            # A hook that objects to the first byte ends the request as a broken connection does.
            if isinstance(error.__cause__ and error.__cause__.__cause__, Deposed):
                raise Deposed("the lease ran out before a write was sent") from error
            raise
        finally:
            _fence.reset(token)


def _path(ref: Ref, subresource: str = "") -> str:
    return KINDS[ref.kind].path(ref.namespace, ref.name, subresource)


def _error(status: int, answer: Object, headers: Mapping[str, str]) -> ApiError:
    message = str(answer.get("message") or answer.get("reason") or f"HTTP {status}")
    reason = answer.get("reason")
    pause = headers.get("Retry-After", "")
    retry_after = float(pause) if pause.isdigit() else None
    kind: type[ApiError]
    if status == 404:
        kind = NotFound
    elif status == 409:
        kind = AlreadyThere if reason == "AlreadyExists" else Conflict
    elif status == 429:
        kind = TooManyRequests
    elif message.startswith(_WRONG_TYPE):
        kind = Refused
    elif status >= 500 or status == 401:
        # 401: the token is being renewed, or the server restarts; the next try reads it anew.
        kind = Unavailable
    else:
        kind = Refused
    return kind(message, status=status, retry_after=retry_after)
