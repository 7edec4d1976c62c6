"""Discovery from the cluster's API: one list, then one watch of this deployment's pods, resumed for good.

The client is ``kubernetes.aio`` without its models per kind: 0.2 s and 15 MiB beside the router, against 1 s and
40 MiB with ``CoreV1Api`` and next to nothing for a watch written on aiohttp alone. Frames, error events and
bookmarks are read by the library.

Whatever goes wrong with the API, the last roster stands and requests are served: a sidecar that is gone shows that by
itself.
"""

import asyncio
import json
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import aiohttp
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.watch import Watch

from mmrouter_router.core.settings import ApiServer
from mmrouter_router.fleet.discovery import Peer, Roster
from mmrouter_router.fleet.pods import DEPLOYMENT_LABEL, is_leaving, roster, who
from mmrouter_router.fleet.workers import Member
from mmrouter_router.telemetry.metrics import Metrics

log = logging.getLogger("mmrouter.discovery")

CONNECT_SECONDS = 10.0
LIST_SECONDS = 30.0
WATCH_SECONDS = 300
"""The server ends a watch after about so long; it goes on from where it was."""
SILENT_SECONDS = 120.0
"""The server sends a bookmark about once a minute; a connection that says nothing for so long is given up."""
FIRST_BACKOFF, LAST_BACKOFF = 0.2, 10.0
STEADY_SECONDS = 1.0
GONE = 410


class _RefusedError(Exception):
    """The API answered with an error. ``after``: seconds that it asks us to wait."""

    def __init__(self, status: int, message: str, after: float = 0.0) -> None:
        super().__init__(f"{status} {message}")
        self.status, self.after = status, after


class _BrokenError(Exception):
    """What came is no list or no event; the message says what it is."""


async def watch_pods(
    server: ApiServer, deployment: str, own_uid: str, update: Callable[[Roster], None], metrics: Metrics
) -> None:
    """Call ``update`` with everybody of a deployment in the pod's own namespace, now and after every change.

    ``own_uid`` is this router's pod. Ends only by cancellation.
    """
    await _PodWatch(server, deployment, own_uid, update, metrics).run()


class _PodWatch:
    def __init__(
        self, server: ApiServer, deployment: str, own_uid: str, update: Callable[[Roster], None], metrics: Metrics
    ) -> None:
        self._server, self._deployment, self._own_uid = server, deployment, own_uid
        self._update, self._metrics = update, metrics
        self._known: dict[str, Member | Peer] = {}
        self._leaving = False
        self._told: Roster | None = None
        self._version = ""  # of the list or the last event; empty: list again
        self._away = False

    async def run(self) -> None:
        failures = 0
        while True:
            began = time.monotonic()
            after = 0.0
            try:
                await self._follow()
                # A server that ends every watch at once is no reason to ask without a pause.
                failures = 0 if time.monotonic() - began > STEADY_SECONDS else failures + 1
            except (_RefusedError, ApiException) as error:
                failures += 1
                after = error.after if isinstance(error, _RefusedError) else 0.0
                if error.status == GONE:
                    self._version = ""
                self._failed(_reason(error.status), str(error))
            except (OSError, aiohttp.ClientError, TimeoutError, _BrokenError) as error:
                failures += 1
                self._failed("broken" if isinstance(error, _BrokenError) else "unreachable", repr(error))
            if failures:
                backoff = min(FIRST_BACKOFF * 2 ** min(failures - 1, 10), LAST_BACKOFF)
                await asyncio.sleep(max(after, backoff * random.uniform(0.5, 1.0)))

    async def _follow(self) -> None:
        """List if nothing is known, then watch until the server ends it. Raises what the connection raises."""
        # A client for each watch: certificates are rotated, and a broken connection takes nothing along.
        async with ApiClient(self._configuration()) as api:
            if not self._version:
                await self._list(api)
            async with aclosing(self._events(api)) as events:
                async for event in events:
                    self._take_event(event["type"], event["object"])

    async def _events(self, api: ApiClient) -> AsyncGenerator[Mapping[str, Any], None]:
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS, sock_read=SILENT_SECONDS)

        async def ask(*, timeout_seconds: int, **_: Any) -> aiohttp.ClientResponse:
            query = {
                "watch": True,
                "allowWatchBookmarks": True,
                "resourceVersion": self._version,
                "timeoutSeconds": timeout_seconds,
            }
            return await self._get(api, query, timeout)

        # With a timeout of the server's the library reads one watch to its end; to go on is ours, with our pauses.
        seconds = round(WATCH_SECONDS * random.uniform(0.8, 1.0))
        watch: Any = Watch(return_type="object")  # type: ignore[no-untyped-call]
        async with watch.stream(ask, timeout_seconds=seconds) as events:
            while True:
                try:
                    event = await anext(events)
                except StopAsyncIteration:
                    return
                except (ApiException, _RefusedError, OSError, aiohttp.ClientError, TimeoutError):
                    raise
                except Exception as error:  # the library has no type of its own for a frame that is no event
                    raise _BrokenError(str(error)) from error
                if not isinstance(event, Mapping):
                    raise _BrokenError("the watch broke off within an event")
                yield event

    async def _list(self, api: ApiClient) -> None:
        answer = await self._get(api, {}, aiohttp.ClientTimeout(total=LIST_SECONDS, connect=CONNECT_SECONDS))
        try:
            content = json.loads(await answer.read())
        except ValueError as error:
            raise _BrokenError(f"the list is no JSON: {error}") from error
        self._known.clear()
        for pod in content["items"]:
            self._take(pod)
        self._tell()
        self._version = content["metadata"]["resourceVersion"]
        self._back()

    def _take_event(self, kind: str, obj: Mapping[str, Any]) -> None:
        if kind == "DELETED":
            self._known.pop(obj["metadata"]["uid"], None)
            self._leaving = self._leaving or obj["metadata"]["uid"] == self._own_uid
        elif kind != "BOOKMARK":
            self._take(obj)
        self._tell()
        self._version = obj["metadata"]["resourceVersion"]
        self._back()

    def _take(self, pod: Mapping[str, Any]) -> None:
        uid = pod["metadata"]["uid"]
        known = who(pod)
        if known is None:
            self._known.pop(uid, None)
        else:
            self._known[uid] = known
        if uid == self._own_uid:
            self._leaving = self._leaving or is_leaving(pod)

    def _tell(self) -> None:
        now = roster(self._known.values(), self._own_uid, leaving=self._leaving)
        if now != self._told:
            self._told = now
            self._update(now)

    async def _get(
        self, api: ApiClient, query: Mapping[str, Any], timeout: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        namespace = (self._server.folder / "namespace").read_text().strip()
        query = {"labelSelector": f"{DEPLOYMENT_LABEL}={self._deployment}", **query}
        method, url, headers, _, _ = await api.param_serialize(
            "GET",
            "/api/v1/namespaces/{namespace}/pods",
            path_params={"namespace": namespace},
            query_params=list(query.items()),
            header_params={"Accept": "application/json"},
            auth_settings=["BearerToken"],
        )
        answer: aiohttp.ClientResponse = (await api.call_api(method, url, headers, _request_timeout=timeout)).response
        if answer.status != 200:
            said = (await answer.text())[:200]
            after = answer.headers.get("retry-after", "")
            raise _RefusedError(answer.status, said, float(after) if after.isdigit() else 0.0)
        return answer

    def _configuration(self) -> Configuration:
        host = f"[{self._server.host}]" if ":" in self._server.host else self._server.host
        folder = self._server.folder
        configuration = Configuration(host=f"https://{host}:{self._server.port}", ssl_ca_cert=str(folder / "ca.crt"))

        def token(into: Configuration) -> None:
            # Read for every request: the kubelet replaces the file before the token in it ends.
            into.api_key["BearerToken"] = f"Bearer {(folder / 'token').read_text().strip()}"

        token(configuration)
        configuration.refresh_api_key_hook = token  # type: ignore[assignment]
        return configuration

    def _failed(self, reason: str, message: str) -> None:
        self._metrics.discovery_errors.labels(reason).inc()
        self._metrics.discovery_synced.set(0)
        if not self._away and reason != "expired":
            self._away = True
            log.warning("the API server does not answer as it should, the last roster stands: %s", message)

    def _back(self) -> None:
        self._metrics.discovery_synced.set(1)
        if self._away:
            self._away = False
            log.info("the API server is back")


def _reason(status: int) -> str:
    known = {GONE: "expired", 429: "throttled", 401: "unauthorized", 403: "forbidden"}
    return known.get(status, "server" if status >= 500 else "refused")
