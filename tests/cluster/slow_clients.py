"""Clients of the API server whose writes are answered late, or not at all, as on a machine that is busy elsewhere."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator

import httpx
from cluster.controlplane import ControlPlane
from cluster.hollow_kubelet import STRATEGIC


class Late(httpx.AsyncBaseTransport):
    """Passes everything on to the API server; what becomes of the answers to ``PATCH`` is up to :meth:`patched`."""

    opens: tuple[str, ...] = ()
    """Readiness gates of a pod that it opens."""

    def __init__(self, plane: ControlPlane) -> None:
        self.server = httpx.AsyncHTTPTransport(verify=ssl.create_default_context(cafile=str(plane.ca)))
        self.seen: set[str] = set()
        """Versions of objects of which the watch has told, once its reader has taken them."""
        self.told = asyncio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "PATCH":
            return await self.patched(request)
        answer = await self.server.handle_async_request(request)
        if "watch" in request.url.params:
            assert isinstance(answer.stream, httpx.AsyncByteStream)
            answer.stream = Watched(answer.stream, self)
        return answer

    async def patched(self, request: httpx.Request) -> httpx.Response:
        """Return the answer to a ``PATCH``."""
        return await self.server.handle_async_request(request)

    async def aclose(self) -> None:
        await self.server.aclose()


class Overtaken(Late):
    """Another writer's change of the pod comes between the first write and its answer: it opens a readiness gate.

    The answer is held back until the watch has told of that change, so the older state comes after the newer one.
    """

    opens = ("example.com/open",)

    def __init__(self, plane: ControlPlane) -> None:
        super().__init__(plane)
        self._patch = {"status": {"conditions": [{"type": gate, "status": "True"} for gate in self.opens]}}
        self._first = True

    async def patched(self, request: httpx.Request) -> httpx.Response:
        first, self._first = self._first, False
        answer = await super().patched(request)
        if first:
            headers = {"authorization": request.headers["authorization"], "content-type": STRATEGIC}
            theirs = httpx.Request("PATCH", request.url, headers=headers, content=json.dumps(self._patch))
            changed = await self.server.handle_async_request(theirs)
            version = json.loads(await changed.aread())["metadata"]["resourceVersion"]
            while version not in self.seen:
                self.told.clear()
                await self.told.wait()
        return answer


class Lost(Late):
    """The first write never reaches the server."""

    def __init__(self, plane: ControlPlane) -> None:
        super().__init__(plane)
        self._first = True

    async def patched(self, request: httpx.Request) -> httpx.Response:
        first, self._first = self._first, False
        if first:
            raise httpx.ReadTimeout("injected", request=request)
        return await super().patched(request)


class Watched(httpx.AsyncByteStream):
    """A watch's bytes."""

    def __init__(self, inner: httpx.AsyncByteStream, late: Late) -> None:
        self._inner, self._late = inner, late
        self._rest = b""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._inner:
            yield piece
            # The next read means that all complete lines were processed.
            *lines, self._rest = (self._rest + piece).split(b"\n")
            self._late.seen |= {json.loads(line)["object"]["metadata"]["resourceVersion"] for line in lines}
            self._late.told.set()

    async def aclose(self) -> None:
        await self._inner.aclose()
