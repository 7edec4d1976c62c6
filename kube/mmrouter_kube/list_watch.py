"""Lists one collection of the Kubernetes API, then watches it and resumes after every interruption.

The watch resumes from the last resource version, bookmarks included. When the server has forgotten that version (410)
the collection is listed again; objects that the new list lacks are gone. Other failures are retried with growing,
random pauses, or after the pause that the server asks for (``Retry-After``).

The API's models per kind are not imported: 0.2 s and 15 MiB beside the router, against 1 s and 40 MiB with
``CoreV1Api``.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import aiohttp
from aiohttp.http_exceptions import LineTooLong
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.exceptions import ApiException

CONNECT_SECONDS = 10.0
LIST_SECONDS = 30.0
PAGE_SIZE = 500
"""Objects per page of a list."""
WATCH_SECONDS = 300
"""Lifetime of one watch request; the server ends it after about this long."""
MAX_EVENT = 64 << 20
"""Bytes of one event; etcd stores no object of more than a few MiB."""
SILENT_SECONDS = 120.0
"""The server sends a bookmark about once a minute; a connection without data for this long is closed."""
FIRST_BACKOFF, LAST_BACKOFF = 0.2, 10.0
STEADY_SECONDS = 1.0
"""A watch that ends sooner counts as a failure: a server that ends every watch at once is not asked without a pause."""
GONE = 410

Object = Mapping[str, Any]


class RefusedError(Exception):
    """The API server answered with an error. ``retry_after``: seconds that it asks to wait."""

    def __init__(self, status: int, message: str, retry_after: float = 0.0) -> None:
        super().__init__(f"{status} {message}")
        self.status, self.retry_after = status, retry_after

    @property
    def reason(self) -> str:
        """Why, as one word for a metric."""
        reasons = {GONE: "expired", 429: "throttled", 401: "unauthorized", 403: "forbidden"}
        return reasons.get(self.status, "server" if self.status >= 500 else "refused")


class MalformedError(Exception):
    """The response is not a list or not an event; the message says what it is."""


class Listener(Protocol):
    """Receives what a :class:`ListWatch` reads. Every method is called from its event loop and must not block."""

    def list_started(self) -> None:
        """Note which objects are known: those that the list lacks are gone when it is complete."""

    def listed(self, objects: Sequence[Object]) -> None:
        """Take one page of the list."""

    def list_complete(self, uids: frozenset[str]) -> None:
        """Drop the objects known when the list started whose uid is not among ``uids``."""

    def event(self, type: str, obj: Object) -> None:
        """Take an ADDED, MODIFIED or DELETED object."""

    def connected(self) -> None:
        """Note that a list or an event has just arrived."""

    def failed(self, reason: str, error: Exception) -> None:
        """Note a failure, which is retried. ``reason`` is a short word. An exception raised here ends the watch."""


class ListWatch:
    """Follows one collection. ``path`` is its URL path, read anew for every request, ``selector`` of labels.

    ``connect`` makes a client for each watch, so that rotated certificates are loaded and a broken connection has no
    effect on the next one.
    """

    def __init__(
        self, connect: Callable[[], ApiClient], path: Callable[[], str], selector: str, listener: Listener
    ) -> None:
        self._connect, self._path, self._selector, self._listener = connect, path, selector, listener
        self._version = ""  # of the list or the last event; empty: list again
        self._heard = False  # an event of the present watch arrived

    async def run(self) -> None:
        """List and watch until cancelled, or until the listener raises."""
        failures = 0
        while True:
            began, self._heard = time.monotonic(), False
            retry_after = 0.0
            failures += 1
            try:
                await self._follow()
                if time.monotonic() - began > STEADY_SECONDS:
                    failures = 0
            except (RefusedError, ApiException) as error:
                refused = error if isinstance(error, RefusedError) else RefusedError(error.status or 0, str(error))
                retry_after = refused.retry_after
                if refused.status == GONE:
                    self._version = ""
                self._listener.failed(refused.reason, refused)
            except (MalformedError, LineTooLong) as error:
                self._listener.failed("broken", error)
            except (OSError, aiohttp.ClientError, TimeoutError) as error:
                self._listener.failed("unreachable", error)
            if self._heard and time.monotonic() - began > STEADY_SECONDS:
                failures = min(failures, 1)  # a watch that worked and was cut, by a load balancer for instance
            if failures:
                backoff = min(FIRST_BACKOFF * 2 ** min(failures - 1, 10), LAST_BACKOFF)
                await asyncio.sleep(max(retry_after, backoff * random.uniform(0.5, 1.0)))

    async def _follow(self) -> None:
        """List unless a version is known, then watch until the server ends the watch."""
        async with self._connect() as api:
            if not self._version:
                await self._list(api)
            async with aclosing(self._events(api)) as events:
                async for event in events:
                    if event["type"] != "BOOKMARK":
                        self._listener.event(event["type"], event["object"])
                    self._version = event["object"]["metadata"]["resourceVersion"]
                    self._listener.connected()
                    self._heard = True

    async def _list(self, api: ApiClient) -> None:
        timeout = aiohttp.ClientTimeout(total=LIST_SECONDS, connect=CONNECT_SECONDS)
        query: dict[str, Any] = {"limit": PAGE_SIZE}
        uids: set[str] = set()
        self._listener.list_started()
        while True:
            content = _decoded(await (await self._get(api, query, timeout)).read(), "a list")
            objects = content.get("items") or []
            self._listener.listed(objects)
            uids.update(obj["metadata"]["uid"] for obj in objects)
            if not (token := content["metadata"].get("continue")):
                break
            query["continue"] = token
        self._listener.list_complete(frozenset(uids))
        self._version = content["metadata"]["resourceVersion"]
        self._listener.connected()

    async def _events(self, api: ApiClient) -> AsyncGenerator[Mapping[str, Any], None]:
        query = {
            "watch": True,
            "allowWatchBookmarks": True,
            "resourceVersion": self._version,
            "timeoutSeconds": round(WATCH_SECONDS * random.uniform(0.8, 1.0)),
        }
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS, sock_read=SILENT_SECONDS)
        response = await self._get(api, query, timeout)
        while line := await response.content.readline(max_line_length=MAX_EVENT):
            if not line.endswith(b"\n"):
                raise MalformedError("the watch ended within an event")
            if line != b"\n":
                yield _event(line)

    async def _get(
        self, api: ApiClient, query: Mapping[str, Any], timeout: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        if self._selector:
            query = {"labelSelector": self._selector, **query}
        method, url, headers, _, _ = await api.param_serialize(
            "GET",
            self._path(),
            query_params=list(query.items()),
            header_params={"Accept": "application/json"},
            auth_settings=["BearerToken"],
        )
        response: aiohttp.ClientResponse = (await api.call_api(method, url, headers, _request_timeout=timeout)).response
        if response.status != 200:
            pause = response.headers.get("retry-after", "")
            raise RefusedError(response.status, (await response.text())[:200], float(pause) if pause.isdigit() else 0.0)
        return response


def _decoded(content: bytes, what: str) -> Mapping[str, Any]:
    try:
        value = json.loads(content)
    except ValueError as error:
        raise MalformedError(f"{what} is not JSON: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("metadata", {}), dict):
        raise MalformedError(f"{what} has another shape: {content[:80].decode(errors='replace')}")
    return value


def _event(line: bytes) -> Mapping[str, Any]:
    event = _decoded(line, "an event")
    obj = event.get("object")
    if event.get("type") == "ERROR" or "code" in event:
        status = obj if isinstance(obj, dict) else event
        raise RefusedError(int(status.get("code") or 0), f"{status.get('reason')}: {status.get('message')}")
    if not isinstance(obj, dict) or not isinstance(event.get("type"), str) or "metadata" not in obj:
        raise MalformedError(f"an event has another shape: {line[:80].decode(errors='replace')}")
    return event
