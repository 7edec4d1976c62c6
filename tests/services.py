"""A Service as kube-proxy makes it: one address, from which connections go in turn to the endpoints that are ready."""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from anyio.from_thread import start_blocking_portal
from waiting import repeating

from mmrouter_cli.local.loopback_network import Forwarder

LOOK_SECONDS = 0.2


@contextmanager
def service(ready: Callable[[], Sequence[tuple[str, int]]]) -> Iterator[str]:
    """Serve on a free port until the block ends; yield the URL. ``ready``: the endpoints, looked at again and again."""
    endpoints = tuple(ready())

    def look() -> None:
        nonlocal endpoints
        endpoints = tuple(ready())

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    forwarder = Forwarder(lambda: endpoints)
    with start_blocking_portal() as portal:
        portal.call(forwarder.listen, "127.0.0.1", port)
        try:
            with repeating(look, LOOK_SECONDS):
                yield f"http://127.0.0.1:{port}"
        finally:
            portal.call(forwarder.close)
