"""Client of one sidecar's feed: the sockets of a :class:`FeedSession`, and requests outside of the stream."""

import asyncio
import errno
import itertools
import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import zmq
import zmq.asyncio

from mmrouter_lib import feed
from mmrouter_lib.feed_keys import fingerprint
from mmrouter_router.core.settings import CurveKeys
from mmrouter_router.fleet.feed_session import ANSWER_SECONDS, CHECK_SECONDS, FeedSession
from mmrouter_router.fleet.workers import Fleet, SyncRequest, Worker
from mmrouter_router.telemetry.metrics import Metrics

log = logging.getLogger("mmrouter.feeds")

PUB_PORT, ROUTER_PORT = 7557, 7558
TRIAL_SECONDS = 2.0  # how long the sidecar may be silent before another combination of keys is tried, if there is one
HEARTBEAT_MS = 2_000
"""A connection that is silent for three of them is replaced: the sidecar may have closed it while the node was cut
off, which this end cannot see."""
CONNECT_MS = 2_000  # after which a connection is tried anew, because the kernel repeats a lost SYN ever more rarely
RETRY_SECONDS = 1.0  # pause where no socket can be opened
DRAIN = 64  # frames of one worker that are taken before other tasks run


class FeedRequestError(ConnectionError):
    """The sidecar did not answer in time or refused; the message says which."""


def feed_context() -> zmq.asyncio.Context:
    """Return a context for the feeds of all workers. Each has two sockets, and libzmq allows 1,023 by default."""
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    return context


class FeedClient:
    """One sidecar's feed. ``run`` ends only by cancellation."""

    def __init__(
        self, worker: Worker, fleet: Fleet, keys: tuple[CurveKeys, ...], context: zmq.asyncio.Context, metrics: Metrics
    ) -> None:
        """``keys``: combinations to use, the preferred one first."""
        self._worker, self._keys, self._context, self._metrics = worker, keys, context, metrics
        self._session = FeedSession(worker, fleet)
        self._heard_keys: tuple[str, ...] = ()  # those of the last heartbeat
        self._heard = False
        self._reconsider = asyncio.Event()
        self._ids = itertools.count(2, 2)  # those of the sync are odd, so they never collide
        self._answers: dict[int, asyncio.Queue[feed.Reply]] = {}
        self._dealer: zmq.asyncio.Socket | None = None

    def use_keys(self, keys: tuple[CurveKeys, ...]) -> None:
        """Use other keys. The connection stays until a heartbeat says that the sidecar accepts the preferred ones."""
        self._keys = keys
        self._reconsider.set()

    async def run(self) -> None:
        keys = self._keys[0]
        while True:
            try:
                keys = await self._connect(keys)
            except zmq.ZMQError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                log.warning("%s: the feed waits for free file descriptors: %s", self._worker.member.name, error)
                await asyncio.sleep(RETRY_SECONDS)
            else:
                log.info("%s: the feed continues with other keys", self._worker.member.name)

    async def _connect(self, keys: CurveKeys) -> CurveKeys:
        """Follow the feed with these keys; return the keys to use next."""
        with ExitStack() as opened:
            sub: zmq.Socket[bytes] = zmq.Context.shadow(self._context).socket(zmq.SUB)
            opened.callback(sub.close, 0)
            dealer: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
            opened.callback(dealer.close, 0)
            opened.callback(setattr, self, "_dealer", None)
            self._configure(sub, keys)
            self._configure(dealer, keys)
            ip = self._worker.member.ip
            sub.subscribe(b"")
            sub.connect(f"tcp://{ip}:{PUB_PORT}")
            dealer.connect(f"tcp://{ip}:{ROUTER_PORT}")
            self._dealer = dealer
            if not self._worker.sync.synced:  # else the feed continues, and sequence numbers show gaps
                await self._send(self._session.opened())
            async with asyncio.TaskGroup() as tasks:
                following = [
                    tasks.create_task(self._subscribe(sub, tasks)),
                    tasks.create_task(self._receive_replies(dealer)),
                    tasks.create_task(self._watch_silence()),
                ]
                successor = await self._other_keys(keys)
                for task in following:
                    task.cancel()
            return successor

    async def _other_keys(self, used: CurveKeys) -> CurveKeys:
        """Return the keys to use instead of ``used``, once there are any.

        They are the first ones that the sidecar has and accepts, as its heartbeats say. Without a heartbeat the
        combinations are tried in turn.
        """
        self._heard = False
        while True:
            self._reconsider.clear()
            if (better := self._accepted_keys(used)) != used:
                return better
            with suppress(TimeoutError):
                async with asyncio.timeout(TRIAL_SECONDS):
                    await self._reconsider.wait()
                    continue
            if not self._heard and len(self._keys) > 1:
                self._heard_keys = ()
                return self._keys[(self._keys.index(used) + 1) % len(self._keys)]
            self._heard = False

    def _accepted_keys(self, used: CurveKeys) -> CurveKeys:
        for keys in self._keys if self._heard_keys else ():
            if {fingerprint(keys.server), fingerprint(keys.public)} <= set(self._heard_keys):
                return keys
        return used if used in self._keys else self._keys[0]

    async def request(self, build: Callable[[int], feed.Request], timeout: float = ANSWER_SECONDS) -> list[feed.Reply]:
        """Send a request outside of the stream; return all parts of its answer. Raises :class:`FeedRequestError`."""
        if self._dealer is None:
            raise FeedRequestError("the feed is not connected")
        request_id = next(self._ids)
        inbox: asyncio.Queue[feed.Reply] = asyncio.Queue()
        self._answers[request_id] = inbox
        try:
            async with asyncio.timeout(timeout):
                await self._dealer.send_multipart([b"", feed.encode(build(request_id))])
                parts = [await inbox.get()]
                while not parts[-1].last:
                    parts.append(await inbox.get())
        except TimeoutError as error:
            raise FeedRequestError(f"no answer from the sidecar within {timeout:g} s") from error
        finally:
            del self._answers[request_id]
        if isinstance(parts[-1], feed.Refused):
            raise FeedRequestError(parts[-1].reason)
        return parts

    async def send_work(self, work: feed.Work) -> None:
        """Send this router's load on a rank. A frame that cannot be sent now is dropped: load gossip repeats it."""
        if self._dealer is not None and self._worker.sync.synced:
            with suppress(zmq.Again):
                await self._dealer.send_multipart([b"", feed.encode(work)], zmq.NOBLOCK)

    async def _subscribe(self, sub: "zmq.Socket[bytes]", tasks: asyncio.TaskGroup) -> None:
        """Receive the stream by the socket's descriptor: a future per message would cost more than the message."""
        loop = asyncio.get_running_loop()
        broken: asyncio.Future[None] = loop.create_future()

        def receive() -> None:
            if broken.done():
                return
            try:
                for _ in range(DRAIN):
                    self._received(sub.recv(zmq.NOBLOCK), tasks)
                loop.call_soon(receive)  # there may be more, but pending requests run first
            except zmq.Again:
                pass  # the event loop calls again at the next message
            except Exception as error:  # end the task instead of only this callback
                broken.set_exception(error)

        descriptor: int = sub.FD
        loop.add_reader(descriptor, receive)
        try:
            receive()
            await broken
        finally:
            broken.cancel()
            loop.remove_reader(descriptor)

    def _received(self, payload: bytes, tasks: asyncio.TaskGroup) -> None:
        try:
            frame = feed.decode_published(payload)
        except feed.FeedError as error:
            self._metrics.feed_ignored.labels("undecodable").inc()
            log.warning("%s: feed frame refused: %s", self._worker.member.name, error)
            return
        if isinstance(frame, feed.Heartbeat):
            self._heard = True
            if frame.keys != self._heard_keys:
                self._heard_keys = frame.keys
                self._reconsider.set()
        if requests := self._session.on_published(frame):
            tasks.create_task(self._send(requests))

    async def _receive_replies(self, dealer: zmq.asyncio.Socket) -> None:
        while True:
            parts = await dealer.recv_multipart()
            try:
                frame = feed.decode_reply(parts[-1])
            except feed.FeedError as error:
                self._metrics.feed_ignored.labels("undecodable").inc()
                log.warning("%s: feed answer refused: %s", self._worker.member.name, error)
                continue
            if frame.id % 2 == 0:
                inbox = self._answers.get(frame.id)
                if inbox is not None:
                    inbox.put_nowait(frame)
                continue
            await self._send(self._session.on_reply(frame))

    async def _watch_silence(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            await self._send(self._session.check())

    async def _send(self, requests: list[SyncRequest]) -> None:
        for request in requests:
            if self._dealer is not None:
                with suppress(zmq.Again):
                    await self._dealer.send_multipart([b"", feed.encode(request)])

    def _configure(self, socket: "zmq.Socket[Any]", keys: CurveKeys) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)  # bounds the gap after a sidecar restarts
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        socket.setsockopt(zmq.RCVHWM, 100_000)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
