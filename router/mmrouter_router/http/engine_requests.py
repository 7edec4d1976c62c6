"""Requests of the router's own to engines and renderers: one question, one complete answer."""

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeVar

from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_router.http.engine_connection import UpstreamError
from mmrouter_router.http.upstream import Upstream

T = TypeVar("T")


class EngineRequestError(Exception):
    """A server did not answer as needed. ``cause``, fit for a metric's label: timeout, lost, refused or unusable."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class EngineRequests:
    """Sends requests with the key of a deployment's engines."""

    def __init__(self, upstream: Upstream, engine_key: str) -> None:
        self._upstream = upstream
        self._headers = {
            "content-type": "application/json",
            "authorization": f"Bearer {engine_key}",
            "accept-encoding": "identity",
        }

    async def ask(
        self,
        ip: str,
        path: str,
        body: bytes | None,
        read: Callable[[bytes], T],
        seconds: float | None,
        limit: int,
        headers: Mapping[str, str] | None = None,
    ) -> T:
        """POST a body, GET without one; return what ``read`` makes of the body of a success, at most ``limit`` bytes.

        ``read`` raises ``ValueError`` for an unusable one. Raises :class:`EngineRequestError`.
        """
        address, method, sent = (ip, HTTP_PORT), "GET" if body is None else "POST", {**(headers or {}), **self._headers}
        try:
            async with asyncio.timeout(seconds):
                status, raw = await self._upstream.ask(address, method, path, sent, body or b"", limit=limit)
        except TimeoutError as error:
            raise EngineRequestError("timeout", f"no answer within {seconds:g} s") from error
        except UpstreamError as error:
            raise EngineRequestError("lost", str(error)) from error
        if status >= 300:
            raise EngineRequestError("refused", f"answered {status}: {raw[:200].decode(errors='replace')}")
        try:
            return read(raw)
        except ValueError as error:
            raise EngineRequestError("unusable", str(error)) from error
