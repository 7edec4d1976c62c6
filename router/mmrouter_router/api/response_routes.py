"""Routes of stored responses: the engine that stores one returns or cancels it."""

from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from typing import Final
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from mmrouter_lib.engines.base.request_fields import RESPONSES
from mmrouter_router.admission.tenant_limits import TenantAdmission
from mmrouter_router.core.errors import RequestError
from mmrouter_router.dispatch.engine_client import ERROR_LIMIT, EngineClient
from mmrouter_router.dispatch.stored_responses import StoredResponses
from mmrouter_router.http.client_channel import Receive, Scope, Send
from mmrouter_router.http.engine_connection import UpstreamError
from mmrouter_router.http.upstream import Answer
from mmrouter_router.intake.api_key_auth import Tenants

PARAM: Final = "response_id"
IGNORED: Final = frozenset({"include", "include[]", "include_obfuscation"})
"""Parameters of OpenAI's query that engines ignore."""
_BOOLEANS: Final = ("true", "false")
_MAX_DIGITS: Final = 9


class ResponseRoutes:
    """The routes, under the limits of tenants. ``query``: parameters that the engines' route to retrieve takes."""

    def __init__(
        self,
        tenants: Tenants,
        admission: TenantAdmission,
        stored: StoredResponses,
        engines: EngineClient,
        query: frozenset[str],
    ) -> None:
        self._tenants, self._admission, self._stored, self._engines = tenants, admission, stored, engines
        self._query = query

    def routes(self) -> list[Route]:
        path = f"{RESPONSES}/{{response_id}}"
        retrieve = Route(path, self._retrieve, methods=["GET"])
        retrieve.methods = {"GET"}  # without HEAD, which engines refuse
        return [retrieve, Route(f"{path}/cancel", self._cancel, methods=["POST"])]

    async def _retrieve(self, request: Request) -> Response:
        query = _checked(request.query_params, self._query)
        return await self._ask(request, f"?{urlencode(query)}" if query else "")

    async def _cancel(self, request: Request) -> Response:
        return await self._ask(request, "/cancel")

    async def _ask(self, request: Request, rest: str) -> Response:
        """Pass a request on to the engine that stores the response. ``rest``: of the path, behind the id.

        Raises :class:`RequestError`.
        """
        response_id: str = request.path_params["response_id"]
        tenant = self._tenants.authenticate(request.scope["headers"])
        with ExitStack() as held:
            permit = held.enter_context(self._admission.admit(tenant.name))
            worker = self._stored.holder(response_id, tenant.name, PARAM)
            path = f"{RESPONSES}/{response_id}{rest}"
            try:
                answer = await self._engines.ask_about(worker, request.method, path)
                held.callback(answer.close)
                # At the head of a stream, whose first event may never come: from there on a lost client ends it.
                is_stream = _content_type(answer).startswith(b"text/event-stream")
                first = b"" if answer.status < 400 and is_stream else await answer.piece()
                error = (first + await answer.read(ERROR_LIMIT)) if answer.status >= 400 else b""
            except UpstreamError as lost:
                raise RequestError.no_worker("the engine that stores the response broke off its answer") from lost
            if answer.status == 404:
                raise self._stored.absent(response_id, PARAM)
            if answer.status >= 400:
                raise RequestError.from_engine(answer.status, error, hidden=(worker.member.name,))
            kind = _content_type(answer)
            headers = {name.decode(): value.decode() for name, value in permit.headers}
            return _Passed(held.pop_all(), _pieces(first, answer), answer.status, headers, kind.decode())


class _Passed(StreamingResponse):
    """An engine's answer on its way to the client; then what it ``held`` is released."""

    def __init__(
        self, held: ExitStack, pieces: AsyncIterator[bytes], status: int, headers: dict[str, str], kind: str
    ) -> None:
        super().__init__(pieces, status, headers, kind)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await super().__call__(scope, receive, send)


def _content_type(answer: Answer) -> bytes:
    return next((value for name, value in answer.headers if name == b"content-type"), b"application/json")


async def _pieces(first: bytes, answer: Answer) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for piece in answer.body():
        yield piece


def _checked(given: Mapping[str, str], known: frozenset[str]) -> dict[str, str]:
    """Return the parameters for the engine. Raises :class:`RequestError` (400) that names one."""
    query: dict[str, str] = {}
    for name, value in given.items():
        if name in IGNORED:
            continue
        if name not in known:
            raise RequestError.unknown_field(name)
        if name == "stream" and value not in _BOOLEANS:
            raise RequestError.unknown_value(name, value, _BOOLEANS)
        if name == "starting_after" and not (value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS):
            raise RequestError.wrong_type(name, "a number", value)
        query[name] = value
    return query
