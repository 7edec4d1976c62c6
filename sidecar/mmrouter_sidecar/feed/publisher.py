"""The feed's ZMQ sockets towards routers: PUB and ROUTER, with CURVE and the accepted keys of clients."""

import asyncio
import errno
import logging
from collections.abc import Callable, Iterator
from functools import reduce
from operator import or_
from types import SimpleNamespace

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

from mmrouter_lib import feed
from mmrouter_sidecar.metrics import Metrics
from mmrouter_sidecar.settings import CurveKeys, Settings

log = logging.getLogger("mmrouter.sidecar")

DOMAIN = "mmrouter"
SEND_HWM = 10_000
MAX_REQUEST_BYTES = 1 << 20
HEARTBEAT_MS = 2_000
CLOSE_LINGER_MS = 1_000  # for the last frames over connections that new keys close
REBIND_SECONDS, REBIND_STEP_SECONDS = 30.0, 0.01
REFUSED: dict[int, str] = {
    zmq.Event.HANDSHAKE_FAILED_AUTH: "key",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "protocol",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "handshake",
}
WATCHED = reduce(or_, REFUSED, int(zmq.Event.HANDSHAKE_SUCCEEDED))


class Publisher:
    """The PUB socket for frames and the ROUTER socket for requests."""

    def __init__(self, settings: Settings, context: zmq.asyncio.Context, metrics: Metrics) -> None:
        self._settings, self._context, self._metrics = settings, context, metrics
        self._authenticator = AsyncioAuthenticator(context)
        self._keys, self._replaced = settings.curve, asyncio.Event()
        self._open()
        self.bound = asyncio.Event()

    def publish(self, frame: feed.Published) -> None:
        """Send a frame to every router; a slow router misses it and requests a replay."""
        self._send_pub.send(feed.encode(frame), zmq.NOBLOCK)

    def use_keys(self, keys: CurveKeys) -> None:
        """Use other keys for new connections. A new sidecar key or a removed router key closes all others."""
        before, self._keys = self._keys, keys
        if keys.secret != before.secret or not set(before.clients) <= set(keys.clients):
            self._replaced.set()

    async def run(self, answer: Callable[[feed.Request], Iterator[feed.Reply]]) -> None:
        """Serve until cancelled. Raises ``zmq.ZMQError`` if an address cannot be bound."""
        self._authenticator.start()
        try:
            # Without a provider of credentials, CURVE accepts every client that has the server's public key.
            router_only = SimpleNamespace(callback=lambda domain, key: domain == DOMAIN and key in self._keys.clients)
            self._authenticator.configure_curve_callback(DOMAIN, router_only)
            while True:
                await self._serve(answer)
                old = self._pub, self._router
                self._open()
                for socket in old:
                    socket.close(CLOSE_LINGER_MS)
        finally:
            self._authenticator.stop()

    async def _serve(self, answer: Callable[[feed.Request], Iterator[feed.Reply]]) -> None:
        """Serve with the present sockets until their keys are replaced."""
        self._replaced.clear()
        ports = self._settings.ports
        monitors = [socket.get_monitor_socket(WATCHED) for socket in (self._pub, self._router)]
        for socket, port in ((self._pub, ports.pub), (self._router, ports.router)):
            await self._bind(socket, f"tcp://{self._settings.pod_ip}:{port}")
        self.bound.set()
        try:
            async with asyncio.TaskGroup() as tasks:
                serving = [tasks.create_task(self._requests(answer))]
                serving += [tasks.create_task(self._watch(monitor)) for monitor in monitors]
                await self._replaced.wait()
                for task in serving:
                    task.cancel()
        finally:
            for socket, monitor in zip((self._pub, self._router), monitors, strict=True):
                socket.disable_monitor()
                monitor.close(0)

    async def _bind(self, socket: zmq.asyncio.Socket, address: str) -> None:
        """Bind, after the socket before this one has left the address: ZeroMQ closes sockets in the background."""
        deadline = asyncio.get_running_loop().time() + REBIND_SECONDS if self.bound.is_set() else 0.0
        while True:
            try:
                socket.bind(address)
                return
            except zmq.ZMQError as error:
                if error.errno != errno.EADDRINUSE or asyncio.get_running_loop().time() > deadline:
                    raise
            await asyncio.sleep(REBIND_STEP_SECONDS)

    async def _requests(self, answer: Callable[[feed.Request], Iterator[feed.Reply]]) -> None:
        while True:
            parts = await self._router.recv_multipart()
            if len(parts) != 3 or parts[1]:
                self._metrics.refusals.labels("frames").inc()
                continue
            client, _, payload = parts
            for reply in self._replies(payload, answer):
                try:
                    self._send_router.send_multipart([client, b"", feed.encode(reply)], zmq.NOBLOCK)
                except zmq.ZMQError as error:  # its queue is full or it is gone; it will ask again
                    self._metrics.unsent.inc()
                    log.warning("an answer could not be sent: %s", error.strerror)
                    break
            await asyncio.sleep(0)

    def _replies(self, payload: bytes, answer: Callable[[feed.Request], Iterator[feed.Reply]]) -> Iterator[feed.Reply]:
        try:
            request = feed.decode_request(payload)
        except (feed.FeedError, UnicodeDecodeError) as error:
            self._metrics.refusals.labels("undecodable").inc()
            log.warning("a request was refused: %s", error)
            yield feed.Refused(_request_id(payload), str(error))
            return
        self._metrics.requests.labels(type(request).__name__).inc()
        for reply in answer(request):
            if isinstance(reply, feed.Refused):
                self._metrics.refusals.labels("question").inc()
            yield reply

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            message = await recv_monitor_message(monitor)
            reason = REFUSED.get(message["event"])
            if reason is not None:
                self._metrics.refusals.labels(reason).inc()
                log.warning("a connection to the feed was refused: %s", reason)

    def _open(self) -> None:
        self._pub: zmq.asyncio.Socket = self._socket(zmq.PUB)
        self._router: zmq.asyncio.Socket = self._socket(zmq.ROUTER)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # report an answer that cannot be sent
        # Sends do not block, so the plain sockets under the asyncio ones save a future per frame.
        self._send_pub: zmq.Socket[bytes] = zmq.Socket.shadow(self._pub)
        self._send_router: zmq.Socket[bytes] = zmq.Socket.shadow(self._router)

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        keys = self._keys
        socket: zmq.asyncio.Socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, SEND_HWM)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN.encode())
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        return socket


def _request_id(payload: bytes) -> int:
    """Return the id of a request of another version, for the refusal; 0 if there is none."""
    try:
        frame = msgspec.msgpack.decode(memoryview(payload)[1:])
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError, RecursionError):
        return 0
    if isinstance(frame, list) and len(frame) > 1 and isinstance(frame[1], int) and not isinstance(frame[1], bool):
        return frame[1]
    return 0
