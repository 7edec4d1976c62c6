"""Client of one sidecar's feed: a SUB socket for the stream and a DEALER socket for requests, both CURVE.

:mod:`mmrouter_router.fleet.feed_sync` decides about order, gaps and epochs. This module receives frames, sends requests
and repeats those without an answer.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from mmrouter_lib import feed
from mmrouter_router.core.settings import CurveKeys
from mmrouter_router.fleet import feed_sync
from mmrouter_router.fleet.workers import Fleet, Worker
from mmrouter_router.telemetry.metrics import Metrics

log = logging.getLogger("mmrouter.feeds")

PUB_PORT, ROUTER_PORT = 7557, 7558
ANSWER_SECONDS = 2.0
"""How long a snapshot or replay may take before it is requested again."""
STALE_SECONDS = 2.0
"""The index is stale after four missing heartbeats of 0.5 s each."""
DRAIN = 64
"""Frames of one worker that are taken before other tasks run."""


class FeedRequestError(ConnectionError):
    """The sidecar did not answer in time or refused; the message says which."""


class FeedClient:
    """One sidecar's feed. ``run`` ends only by cancellation."""

    def __init__(self, worker: Worker, fleet: Fleet, keys: CurveKeys, context: zmq.asyncio.Context, metrics: Metrics):
        self._worker, self._fleet, self._keys, self._context, self._metrics = worker, fleet, keys, context, metrics
        # Requests of callers have even ids on the wire, those of the sync odd ones, so they never collide.
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Queue[feed.Reply]] = {}
        self._dealer: zmq.asyncio.Socket | None = None
        self._requested_at: float | None = None

    async def run(self) -> None:
        """Keep the worker's index in sync for as long as the task lives."""
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
            await self._send(self._fleet.feed_connected(self._worker))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._subscribe(sub, tasks))
                tasks.create_task(self._receive_replies(dealer))
                tasks.create_task(self._watch_silence())
        finally:
            self._dealer = None
            sub.close(0)
            dealer.close(0)

    async def request(self, build: Callable[[int], feed.Request], timeout: float = ANSWER_SECONDS) -> list[feed.Reply]:
        """Send a request outside of the stream (claim, result, detail) and return all parts of its answer.

        Raises :class:`FeedRequestError` when no answer comes in time or the sidecar refuses.
        """
        if self._dealer is None:
            raise FeedRequestError("the feed is not connected")
        request_id = next(self._ids) * 2
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
        """Receive the stream; ends only by cancellation or an error.

        The event loop watches the socket's descriptor, because a future per message would cost more than the message.
        """
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
        steps = self._fleet.on_published(self._worker, frame)
        if steps:
            tasks.create_task(self._send(steps))

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
            if frame.last:
                self._requested_at = None
            # Give the answer back the id that the sync used.
            frame = msgspec.structs.replace(frame, id=frame.id // 2)
            await self._send(self._fleet.on_reply(self._worker, frame))

    async def _watch_silence(self) -> None:
        loop = asyncio.get_running_loop()
        clock = self._fleet.now
        while True:
            await asyncio.sleep(STALE_SECONDS / 4)
            if self._requested_at is not None and loop.time() - self._requested_at > ANSWER_SECONDS:
                await self._send(self._fleet.request_timed_out(self._worker))
            if self._worker.heartbeat_at and clock() - self._worker.heartbeat_at > STALE_SECONDS:
                self._fleet.mark_stale(self._worker)
            elif self._worker.heartbeat_at and not self._worker.sync.synced and self._requested_at is None:
                await self._send(self._fleet.feed_connected(self._worker))

    async def _send(self, steps: list[feed_sync.Step]) -> None:
        """Send the requests among these steps."""
        for step in steps:
            request: feed.Request
            match step:
                case feed_sync.AskSnapshot(number):
                    request = feed.SnapshotRequest(number * 2 + 1)
                case feed_sync.AskReplay(number, epoch, first):
                    request = feed.ReplayRequest(number * 2 + 1, epoch, first)
                case _:
                    continue
            self._requested_at = asyncio.get_running_loop().time()
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
