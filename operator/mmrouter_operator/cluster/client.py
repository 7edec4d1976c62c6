"""The client of the Kubernetes API: raw dicts in and out, and one exception type per way a call can fail.

The client library's models per kind are not used: importing them costs time and memory, and they would drop fields of
newer API versions.
"""

import asyncio
import contextvars
import copy
import json
import secrets
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from mmrouter_operator.cluster.operator_kinds import KINDS, OPTIONAL_CHILDREN
from mmrouter_operator.model.kinds import RESOURCE, Capabilities, Ref
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
"""Start of the server's answer, a 500, to an apply with a field of another type than the kind has."""

Object = dict[str, Any]
Objects = list[Object]


class ApiError(Exception):
    """A call failed. ``status`` is the HTTP status, 0 without an answer; ``retry_after`` is in seconds."""

    def __init__(self, message: str, *, status: int = 0, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class NotFound(ApiError):  # noqa: N818 - the API's own word
    """There is no such object, or no such kind."""


class Conflict(ApiError):  # noqa: N818
    """The object changed since it was read."""


class AlreadyExists(ApiError):  # noqa: N818
    """An object of that name exists."""


class TooManyRequests(ApiError):  # noqa: N818
    """The server throttles; ``retry_after`` is the pause that it asks for, if it does."""


class Unavailable(ApiError):  # noqa: N818
    """No answer, or a 5xx: the call may or may not have had its effect."""


class Refused(ApiError):  # noqa: N818
    """The server refuses the request as invalid or forbidden. Repeating it unchanged cannot succeed."""


class LeaseLost(Exception):  # noqa: N818
    """A write was not sent, or abandoned, because this process does not hold the lease."""


_fence: contextvars.ContextVar[Callable[[], object] | None] = contextvars.ContextVar("fence", default=None)


async def _check_fence(*_: object) -> None:
    check = _fence.get()
    if check is not None:
        check()


def fence_hooks() -> aiohttp.TraceConfig:
    """Return the hooks that check the lease once a connection is there, and right before the first byte.

    Waiting for a connection takes most of a call's time. aiohttp 3.14 calls the hook for a sent chunk before it writes
    the chunk, headers included, without an ``await`` in between: a process that is suspended before it writes nothing
    when it resumes.
    """
    hooks = aiohttp.TraceConfig()
    hooks.on_request_chunk_sent.append(_check_fence)
    hooks.on_connection_create_end.append(_check_fence)
    hooks.on_connection_reuseconn.append(_check_fence)
    return hooks


class KubernetesCluster:
    """The operator's calls to an API server. ``identity`` names this process in Events. Raises :class:`ApiError`."""

    def __init__(self, configuration: Configuration, *, user_agent: str, identity: str) -> None:
        configuration.trace_configs = [*(configuration.trace_configs or []), fence_hooks()]
        # Retries are up to the work queue: a call is one request.
        configuration.retries = None
        self._client = ApiClient(configuration)
        self._client.user_agent = user_agent
        self._identity = identity
        self._lease_left: Callable[[], float] | None = None

    def fenced(self, lease_left: Callable[[], float]) -> "KubernetesCluster":
        """Return the same client with writes that need a valid lease.

        ``lease_left`` returns the seconds for which this process surely holds the lease, 0 or less if it does not. A
        write raises :class:`LeaseLost` before it is sent, and is abandoned when the time is over.
        """
        other = copy.copy(self)
        other._lease_left = lease_left
        return other

    async def close(self) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]

    async def get(self, ref: Ref) -> Object | None:
        try:
            return await self._call("GET", ref.path())
        except NotFound:
            return None

    async def list(self, kind: str, namespace: str, selector: str) -> Objects:
        """Return the metadata (and no more) of all objects of a kind; of all namespaces if ``namespace`` is empty."""
        objects: Objects = []
        query = {"labelSelector": selector, "limit": "500"} if selector else {"limit": "500"}
        while True:
            page = await self._call("GET", KINDS[kind].path(namespace), query=query, accept=_METADATA_LIST)
            objects += page.get("items") or []
            if not (token := page.get("metadata", {}).get("continue")):
                return objects
            query["continue"] = token

    async def apply(self, obj: Object) -> Object:
        """Apply on the server side, forced; returns the live object."""
        return await self._apply(Ref.of(obj).path(), obj, MANAGER)

    async def merge(self, obj: Object) -> Object:
        """Merge patch: maps are merged, lists are replaced as a whole; returns the live object."""
        query = {"fieldManager": MANAGER}
        return await self._call("PATCH", Ref.of(obj).path(), body=obj, query=query, content_type=_MERGE)

    async def create(self, obj: Object) -> Object:
        """Create an object. Raises :class:`AlreadyExists`."""
        path = KINDS[obj["kind"]].path(obj["metadata"].get("namespace", ""))
        return await self._call("POST", path, body=obj, query={"fieldManager": MANAGER})

    async def replace(self, obj: Object) -> Object:
        """Replace the object of that ``resourceVersion``. Raises :class:`Conflict`."""
        return await self._call("PUT", Ref.of(obj).path(), body=obj, query={"fieldManager": MANAGER})

    async def apply_status(self, obj: Object) -> Object:
        """Apply the status subresource on the server side; returns the live object."""
        return await self._apply(Ref.of(obj).path("status"), obj, MANAGER)

    async def apply_gates(self, pod: PodView, gates: Mapping[str, tuple[bool, str, str]]) -> None:
        """Set a pod's readiness gates: type -> (status, reason, message). The uid excludes a pod of the same name."""
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
        """Delete the object of that uid, its dependents in the background. A missing or another object is no error."""
        options = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        try:
            await self._call("DELETE", ref.path(), body=options)
        except (NotFound, Conflict):
            return

    async def event(self, regarding: Object, type: str, reason: str, action: str, note: str) -> None:
        """Record a Kubernetes Event; ``type`` is Normal or Warning."""
        metadata = regarding["metadata"]
        about = {"apiVersion": regarding["apiVersion"], "kind": regarding["kind"]}
        about |= {
            field: metadata[field] for field in ("name", "namespace", "uid", "resourceVersion") if metadata.get(field)
        }
        event = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": f"{metadata['name']}.{secrets.token_hex(8)}", "namespace": metadata["namespace"]},
            "eventTime": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "reportingController": "mmrouter.io/operator",
            "reportingInstance": self._identity[:128],
            "type": type,
            "reason": reason,
            "action": action,
            "note": note[:1024],  # the API's limit
            "regarding": about,
        }
        await self._call("POST", KINDS["Event"].path(metadata["namespace"]), body=event)

    async def exists(self, ref: Ref) -> bool:
        try:
            await self._call("GET", ref.path(), accept=_METADATA)
        except NotFound:
            return False
        return True

    async def capabilities(self) -> Capabilities:
        """Return the served API versions. One of our own kind or of an optional child counts only if it has the kind.

        Others define kinds in the same groups, and the definition of a kind may be on its way.
        """
        groups = (await self._call("GET", "/apis"))["groups"]
        apis = {version["groupVersion"] for group in groups for version in group["versions"]}
        for kind in (KINDS[RESOURCE], *OPTIONAL_CHILDREN.values()):
            if kind.api in apis:
                resources = (await self._call("GET", f"/apis/{kind.api}")).get("resources") or []
                if kind.plural not in {resource["name"] for resource in resources}:
                    apis.discard(kind.api)
        return Capabilities(frozenset(apis | {"v1"}))

    async def published(self) -> Object:
        """Return the OpenAPI document of our kind. Unlike the CRD, every authenticated user may read it."""
        return await self._call("GET", f"/openapi/v3/apis/{KINDS[RESOURCE].api}")

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
        if method == "GET" or self._lease_left is None:
            return await self._send(method, url, headers, body)
        left = self._check_lease()
        token = _fence.set(self._check_lease)
        try:
            async with asyncio.timeout(left):
                return await self._send(method, url, headers, body)
        except TimeoutError as error:
            raise LeaseLost("the lease ran out during a write") from error
        except Unavailable as error:
            # A hook that raises before the first byte ends the request as a broken connection does.
            if isinstance(error.__cause__ and error.__cause__.__cause__, LeaseLost):
                raise LeaseLost("the lease ran out before a write was sent") from error
            raise
        finally:
            _fence.reset(token)

    async def _send(self, method: str, url: str, headers: Mapping[str, str], body: Object | None) -> Object:
        where = f"{method} {url.partition('?')[0]}"
        try:
            _, target, sent, _, _ = await self._client.param_serialize(
                method, url, header_params=headers, auth_settings=["BearerToken"]
            )
            response = await self._client.call_api(
                method, target, sent, body, _request_timeout=aiohttp.ClientTimeout(total=TIMEOUT)
            )
            content = await response.read()  # type: ignore[no-untyped-call]
        except TimeoutError as error:
            raise Unavailable(f"{where}: no answer within {TIMEOUT:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"{where}: {error}") from error
        try:
            answer: Object = json.loads(content) if content else {}
        except ValueError:
            answer = {"message": content[:200].decode(errors="replace")}
        if response.status >= 400:
            raise _error(response.status, answer, response.headers)
        return answer

    def _check_lease(self) -> float:
        left = self._lease_left() if self._lease_left is not None else 0.0
        if left <= 0:
            raise LeaseLost("this process does not hold the lease")
        return left


def _error(status: int, answer: Object, headers: Mapping[str, str]) -> ApiError:
    message = str(answer.get("message") or answer.get("reason") or f"HTTP {status}")
    pause = headers.get("Retry-After", "")
    kind: type[ApiError] = Refused
    if status == 409:
        kind = AlreadyExists if answer.get("reason") == "AlreadyExists" else Conflict
    elif status in (404, 429):
        kind = NotFound if status == 404 else TooManyRequests
    elif (status >= 500 or status == 401) and not message.startswith(_WRONG_TYPE):
        # 401: the token is being renewed, or the server restarts; the next try reads the token again.
        kind = Unavailable
    return kind(message, status=status, retry_after=float(pause) if pause.isdigit() else None)
