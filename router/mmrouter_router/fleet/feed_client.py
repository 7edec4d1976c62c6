"""The router's end of the feed: one SUB and one DEALER per sidecar, both CURVE.

Everything that decides (order, gaps, epochs) is in :mod:`mmrouter_router.fleet.feed_sync`; here frames are received,
questions
are sent, and a question that stays unanswered is asked again.
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
from mmrouter_router.fleet import feed_sync as follow
from mmrouter_router.fleet.workers import Fleet, Worker
from mmrouter_router.telemetry.metrics import Metrics

log = logging.getLogger("mmrouter.feeds")

PUB_PORT, ROUTER_PORT = 7557, 7558
ANSWER_SECONDS = 2.0
"""How long a snapshot or replay may take before it is asked for again."""
STALE_SECONDS = 2.0
"""Heartbeats come every 0.5 s; four missing ones mean that the index is not proved any more."""

DRAIN = 64
"""Frames of one worker that are taken in one go."""


class FeedSilentError(ConnectionError):
    """The sidecar did not answer in time or refused; the message says which."""


class Feed:
    """One sidecar's feed. ``run`` ends only by cancellation."""

    def __init__(self, worker: Worker, fleet: Fleet, keys: CurveKeys, context: zmq.asyncio.Context, metrics: Metrics):
        self._worker, self._fleet, self._keys, self._context, self._metrics = worker, fleet, keys, context, metrics
        # On the wire our own questions have even ids and the follower's odd ones: they never meet.
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Queue[feed.Reply]] = {}
        self._dealer: zmq.asyncio.Socket | None = None
        self._asked_at: float | None = None

    async def run(self) -> None:
        """Follow the sidecar for as long as the task lives."""
        sub: zmq.Socket[bytes] = zmq.Context.shadow(self._context).socket(zmq.SUB)
        dealer: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        self._set(sub)
        self._set(dealer)
        ip = self._worker.member.ip
        try:
            sub.subscribe(b"")
            sub.connect(f"tcp://{ip}:{PUB_PORT}")
            dealer.connect(f"tcp://{ip}:{ROUTER_PORT}")
            self._dealer = dealer
            await self._ask(self._fleet.connect(self._worker))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._subscribe(sub, tasks))
                tasks.create_task(self._replies(dealer))
                tasks.create_task(self._watch())
        finally:
            self._dealer = None
            sub.close(0)
            dealer.close(0)

    async def question(self, build: Callable[[int], feed.Request], timeout: float = ANSWER_SECONDS) -> list[feed.Reply]:
        """Send a request of our own (claim, result, detail) and return all parts of its answer.

        Raises :class:`FeedSilentError` when no answer comes in time or the sidecar refuses.
        """
        if self._dealer is None:
            raise FeedSilentError("the feed is not connected")
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
            raise FeedSilentError(f"no answer from the sidecar within {timeout:g} s") from error
        finally:
            del self._answers[request_id]
        if isinstance(parts[-1], feed.Refused):
            raise FeedSilentError(parts[-1].reason)
        return parts

    async def tell(self, work: feed.Work) -> None:
        """Hand it to the sidecar. What cannot be sent now is dropped: it is told again, or something newer is.

        Nor does it wait for a sidecar that is away: one that is back has more urgent questions to answer.
        """
        if self._dealer is not None and self._worker.follower.synced:
            with suppress(zmq.Again):
                await self._dealer.send_multipart([b"", feed.encode(work)], zmq.NOBLOCK)

    async def _subscribe(self, sub: "zmq.Socket[bytes]", tasks: asyncio.TaskGroup) -> None:
        """Take what comes whenever the socket has something; ends only by cancellation or an error.

        The loop watches it and nobody awaits single messages: of a feed that brings one delta at a time, the futures
        were most of the cost.
        """
        loop = asyncio.get_running_loop()
        broken: asyncio.Future[None] = loop.create_future()

        def take() -> None:
            if broken.done():
                return
            try:
                for _ in range(DRAIN):
                    self._received(sub.recv(zmq.NOBLOCK), tasks)
                loop.call_soon(take)  # perhaps there is more, but the requests come first
            except zmq.Again:
                pass  # the descriptor tells of whatever comes from here on
            except Exception as error:  # whatever it is, it ends the task and not only this call
                broken.set_exception(error)

        descriptor: int = sub.FD
        loop.add_reader(descriptor, take)
        try:
            take()
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
        steps = self._fleet.published(self._worker, frame)
        if steps:
            tasks.create_task(self._ask(steps))

    async def _replies(self, dealer: zmq.asyncio.Socket) -> None:
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
                self._asked_at = None
            await self._ask(self._fleet.replied(self._worker, _renumber(frame)))

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        clock = self._fleet.now
        while True:
            await asyncio.sleep(STALE_SECONDS / 4)
            if self._asked_at is not None and loop.time() - self._asked_at > ANSWER_SECONDS:
                await self._ask(self._fleet.silence(self._worker))
            if self._worker.beat_at and clock() - self._worker.beat_at > STALE_SECONDS:
                self._fleet.lost(self._worker)
            elif self._worker.beat_at and not self._worker.follower.synced and self._asked_at is None:
                await self._ask(self._fleet.connect(self._worker))

    async def _ask(self, steps: list[follow.Step]) -> None:
        for step in steps:
            request: feed.Request
            match step:
                case follow.AskSnapshot(number):
                    request = feed.SnapshotRequest(number * 2 + 1)
                case follow.AskReplay(number, epoch, first):
                    request = feed.ReplayRequest(number * 2 + 1, epoch, first)
                case _:
                    continue
            self._asked_at = asyncio.get_running_loop().time()
            if self._dealer is not None:
                with suppress(zmq.Again):
                    await self._dealer.send_multipart([b"", feed.encode(request)])

    def _set(self, socket: "zmq.Socket[Any]") -> None:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)  # while a sidecar restarts; a pod that is gone is not dialled
        socket.setsockopt(zmq.RCVHWM, 100_000)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._keys.server)


def _renumber(frame: feed.Reply) -> feed.Reply:
    """Give a stream answer back the number that the follower asked with."""
    return msgspec.structs.replace(frame, id=frame.id // 2)
