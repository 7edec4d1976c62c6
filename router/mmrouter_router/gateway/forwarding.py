"""The gateway's handler: reads a request, chooses its deployment, and passes the answer on as it arrives.

The client's key goes with the request: the deployment's frontends judge it. A body is held until the answer begins, so
that the request can be sent again where a frontend is lost before that.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from multidict import MultiDict

from mmrouter_router.api.answers import refuse
from mmrouter_router.core.errors import RETRY, RequestError, is_exhausted
from mmrouter_router.core.request_ids import NAME_HEADER, answered_name
from mmrouter_router.core.worker_threads import WorkerThreads
from mmrouter_router.gateway.metrics import GatewayMetrics
from mmrouter_router.gateway.model_routes import Deployment, Routes
from mmrouter_router.gateway.requested_model import Routed, routed
from mmrouter_router.http.body_budget import BodyBudget, BodyReservation
from mmrouter_router.http.client_channel import AsgiClient, Client, ClientGoneError, Headers, Receive, Scope, Send
from mmrouter_router.http.engine_connection import UpstreamError
from mmrouter_router.http.upstream import Answer, Upstream
from mmrouter_router.intake.api_key_auth import Tenants
from mmrouter_router.intake.json_body import work_size

log = logging.getLogger("mmrouter.gateway")

PAUSES: Final = (0.1, 0.5, 1.0)  # seconds before a request is sent again
DEPLOYMENT_HEADER: Final = b"x-mmrouter-deployment"
_NOT_PASSED: Final = frozenset(
    b"host content-length connection keep-alive proxy-connection transfer-encoding te trailer upgrade expect".split()
)
_NOT_RETURNED: Final = frozenset(b"connection keep-alive transfer-encoding server date".split())


class Forwarding:
    """Answers the paths that end in a deployment; ``routes`` and ``budget`` may be read at any time."""

    def __init__(
        self,
        routes: Callable[[], Routes],
        upstream: Upstream,
        tenants: Tenants,
        metrics: GatewayMetrics,
        threads: WorkerThreads,
        *,
        max_request_bytes: int,
        max_held_bytes: int,
        trusts: bool,
    ) -> None:
        """``routes``: returns the current table. ``trusts``: there is a CA for deployments that serve TLS."""
        self.tenants, self.budget = tenants, BodyBudget(max_held_bytes)
        self._routes, self._upstream, self._metrics, self._threads = routes, upstream, metrics, threads
        self._max_bytes, self._trusts = max_request_bytes, trusts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsgiClient(scope, receive, send) as client:
            await self.answer(client)

    async def answer(self, client: Client) -> None:
        """Answer one request; does not raise for faults of a client or a deployment."""
        held = BodyReservation(self.budget, refuse=client.refuse_body)
        name = (NAME_HEADER, answered_name(client.headers))
        counted = _Counted()
        self._metrics.in_flight.inc()
        try:
            await self._answer(client, held, name, counted)
        except RequestError as error:
            counted.code = str(error.status)
            self._metrics.refused.labels(error.code or "").inc()
            await refuse(client, error, [name])
        except ClientGoneError:
            counted.code = "499"
        except asyncio.CancelledError:
            counted.code = "499" if client.gone else "broken_off"
            if not client.gone:
                raise  # the gateway shuts down
        except UpstreamError as error:
            # The answer has begun, so nothing can be sent again. The unfinished answer makes the server close the
            # connection, by which the client detects it.
            counted.code = "broken_off"
            log.warning("%s: the answer broke off: %s", counted.deployment, error)
        except Exception as error:  # a bug, or the end of memory: the client gets an answer, and it is counted
            failed = RequestError.exhausted() if is_exhausted(error) else RequestError.internal()
            counted.code = str(failed.status)
            if client.begun:
                raise
            log.exception("%s: request failed", name[1].decode())
            await refuse(client, failed, [name])
        finally:
            held.release()
            self._metrics.in_flight.dec()
            self._metrics.requests.labels(counted.deployment, counted.code).inc()

    async def _answer(
        self, client: Client, held: BodyReservation, name: tuple[bytes, bytes], counted: "_Counted"
    ) -> None:
        if client.method != "POST":
            raise RequestError.method_not_allowed(client.method, client.path)
        held.tenant = tenant = self.tenants.authenticate(client.headers).name
        raw = await client.body(self._max_bytes, held)
        read = partial(routed, client.path, raw, self._routes(), self._max_bytes)
        request = await self._threads.run(tenant, work_size(raw), read)
        del raw, read
        deployment = request.choice.deployment
        counted.deployment = deployment.name
        if deployment.tls and not self._trusts:
            message = f"The deployment {deployment.name} serves TLS, and this gateway has no CA to verify it by."
            raise RequestError(503, message, type="server_error", code="no_ca")
        answer = await self._send(client, deployment, _passed(client.headers, name, request), request)
        try:
            del request
            held.release()
            counted.code = str(answer.status)
            headers = [(n, v) for n, v in answer.headers if n not in _NOT_RETURNED]
            await client.stream(answer.status, [*headers, (DEPLOYMENT_HEADER, deployment.name.encode())], b"", answer)
        finally:
            answer.close()

    async def _send(self, client: Client, deployment: Deployment, headers: MultiDict[str], request: Routed) -> Answer:
        """Send a request until an answer begins. Raises :class:`RequestError` (503) where none does."""
        for pause in (*PAUSES, None):
            try:
                return await self._upstream.request(
                    deployment.host, deployment.port, "POST", client.path, headers, request.body
                )
            except UpstreamError as error:
                if error.exhausted:
                    raise RequestError.exhausted() from error
                if pause is None or error.began:
                    log.warning("%s: no answer: %s", deployment.name, error)
                    break
            self._metrics.repeated.labels(deployment.name).inc()
            await asyncio.sleep(pause)
        message = f"The deployment {deployment.name} does not answer. Try again."
        raise RequestError(503, message, type="server_error", code="deployment_unreachable", headers=RETRY)


class _Counted:
    """The labels by which a request is counted at its end."""

    deployment, code = "", "499"


def _passed(headers: Headers, name: tuple[bytes, bytes], request: Routed) -> MultiDict[str]:
    """Return the headers for a frontend; ``name`` is the request's, which its client may not have given."""
    passed: MultiDict[str] = MultiDict()
    for key, value in headers:
        replaced = key == NAME_HEADER or (key == b"content-type" and request.content_type is not None)
        if key not in _NOT_PASSED and not replaced:
            passed.add(key.decode("latin-1"), value.decode("latin-1"))
    passed.add(name[0].decode(), name[1].decode())
    if request.content_type is not None:
        passed.add("content-type", request.content_type)
    return passed
