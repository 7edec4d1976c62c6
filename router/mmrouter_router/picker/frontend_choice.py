"""Sends each request of a gateway to a frontend, which serves it as if no gateway were there."""

import random
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from mmrouter_router.core.errors import RequestError
from mmrouter_router.http.engine_connection import address
from mmrouter_router.picker import protocol
from mmrouter_router.picker.exchange import Stream


class FrontendChoice:
    """Handles a stream: chooses the frontend that has the fewest of this picker's requests, and passes on the bodies.

    Bodies are passed on as they arrive, and nothing of them is held. Prompts are not looked at: every frontend knows
    which engine has which blocks.
    """

    def __init__(self, ready: Callable[[], Collection[str]], port: int, *, test_selection: bool = False) -> None:
        """``ready``: addresses of the frontends that are Ready. ``test_selection``: obey the header of conformance
        tests.
        """
        self._ready, self._port, self._test_selection = ready, port, test_selection
        self.under_way: Counter[str] = Counter()
        """Requests of this picker at each frontend."""

    async def __call__(self, stream: Stream, first: Any) -> None:
        """Serve a stream until the gateway ends it. Raises :class:`.protocol.ProtocolError`."""
        protocol.check_first(first)
        order = protocol.Order()
        order.check(first)
        allowed = protocol.allowed(first, test_selection=self._test_selection)
        usable = [ip for ip in self._ready() if protocol.allows(allowed, ip, self._port)]
        if not usable:
            error = RequestError.no_frontend()
            headers = [(b"content-type", b"application/json"), (b"retry-after", error.headers["Retry-After"].encode())]
            await stream.write(protocol.immediate(error.status, headers, error.to_body()))
            return
        fewest = min(self.under_way[ip] for ip in usable)
        # Among equals at random, so that requests which never meet are spread too.
        ip = random.choice([ip for ip in usable if self.under_way[ip] == fewest])
        self.under_way[ip] += 1
        try:
            chosen = protocol.destination(address(ip, self._port))
            chosen.request_headers.response.clear_route_cache = True  # the route may depend on the endpoint
            await stream.write(chosen)
            while (message := await stream.read()) is not None:
                for answer in protocol.unchanged(order.check(message), message):
                    await stream.write(answer)
        finally:
            self.under_way[ip] -= 1
            self.under_way += Counter()  # without frontends that have none, which may never return
