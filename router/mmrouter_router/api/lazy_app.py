"""An app that is made when it is first needed, because its imports would delay the start of all other ports."""

import asyncio
from collections.abc import Callable
from typing import Any

from mmrouter_router.http.client_channel import Receive, Scope, Send


class LazyApp:
    """The ASGI app that ``make`` returns; a thread calls it at the first request, and other requests wait for it.

    Where ``make`` fails, those requests fail, and the next one tries again.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._making: asyncio.Task[Any] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        making = self._making
        if making is None or (making.done() and (making.cancelled() or making.exception() is not None)):
            making = self._making = asyncio.create_task(asyncio.to_thread(self._make))
        app = await asyncio.shield(making)
        await app(scope, receive, send)
