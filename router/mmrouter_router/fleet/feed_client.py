"""Client of one sidecar's feed: the sockets of a :class:`FeedSession`, and requests outside of the stream."""

import asyncio
import itertools
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq
import zmq.asyncio

from mmrouter_lib import feed
from mmrouter_router.core.settings import CurveKeys
from mmrouter_router.fleet.feed_session import ANSWER_SECONDS, CHECK_SECONDS, FeedSession
from mmrouter_router.fleet.workers import Fleet, SyncRequest, Worker
from mmrouter_router.telemetry.metrics import Metrics

log = logging.getLogger("mmrouter.feeds")

PUB_PORT, ROUTER_PORT = 7557, 7558
DRAIN = 64  # frames of one worker that are taken before other tasks run


class FeedRequestError(ConnectionError):
    """The sidecar did not answer in time or refused; the message says which."""


class FeedClient:
    """One sidecar's feed. ``run`` ends only by cancellation."""

    def __init__(self, worker: Worker, fleet: Fleet, keys: CurveKeys, context: zmq.asyncio.Context, metrics: Metrics):
        self._worker, self._keys, self._context, self._metrics = worker, keys, context, metrics
        self._session = FeedSession(worker, fleet)
        self._ids = itertools.count(2, 2)  # those of the sync are odd, so they never collide
        self._answers: dict[int, asyncio.Queue[feed.Reply]] = {}
        self._dealer: zmq.asyncio.Socket | None = None

    async def run(self) -> None:
        sub: zmq.Socket[bytes] = zmq.Context.shadow(self._context).socket(zmq.SUB)
        dealer: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        self._configure(sub)
        self._configure(dealer)
        ip = self._worker.member.ip
        try:
            sub.subscribe(b"")
            sub.connect(f"tcp://{ip}:{PUB_PORT}")
            dealer.connect(f"tcp://{ip}:{ROUTER_PORT}")
            self._dealer = dealer
            await self._send(self._session.opened())
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._subscribe(sub, tasks))
                tasks.create_task(self._receive_replies(dealer))
                tasks.create_task(self._watch_silence())
        finally:
            self._dealer = None
            sub.close(0)
            dealer.close(0)

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
                pass  # the descriptor signals the next message
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

    def _configure(self, socket: "zmq.Socket[Any]") -> None:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)  # bounds the gap after a sidecar restarts
        socket.setsockopt(zmq.RCVHWM, 100_000)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._keys.server)
