"""The router's end of the feed with real sockets: what a sidecar of every accepted version says ends up in the index.

The sidecar here is a player of the golden frames, byte for byte as that version wrote them. Only numbers that a real
one would set are set: an answer carries the number of its question, and a second delta follows the first.
"""

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from mmrouter_lib import feed
from mmrouter_router.core.settings import CurveKeys
from mmrouter_router.fleet.feed_client import DRAIN, PUB_PORT, ROUTER_PORT, FeedClient
from mmrouter_router.fleet.workers import Fleet, Member, Worker
from mmrouter_router.telemetry.metrics import Metrics

GOLDEN = Path(__file__).parents[1] / "feed" / "golden"
SECONDS = 10
KEY = {number: int.from_bytes(bytes([number]) * 8, "little") for number in range(6)}
"""The golden frames' keys: one byte, eight times."""


class Player:
    """A sidecar of one version. ``published``: frames that it repeats all the time, as heartbeats are repeated."""

    def __init__(self, version: int, ip: str, context: zmq.asyncio.Context) -> None:
        self.golden: dict[str, str] = json.loads((GOLDEN / f"v{version}.json").read_text())
        self.public, secret = zmq.curve_keypair()
        self.pub, self.router = self._bound(context, zmq.PUB, secret), self._bound(context, zmq.ROUTER, secret)
        self.pub.bind(f"tcp://{ip}:{PUB_PORT}")
        self.router.bind(f"tcp://{ip}:{ROUTER_PORT}")
        self.published = [self.payload("heartbeat")]
        self.asked: list[type] = []

    def _bound(self, context: zmq.asyncio.Context, kind: int, secret: bytes) -> zmq.asyncio.Socket:
        socket: zmq.asyncio.Socket = context.socket(kind)
        socket.curve_server, socket.curve_secretkey, socket.linger = True, secret, 0
        return socket

    def payload(self, name: str, **numbers: int) -> bytes:
        """Return a golden frame, with numbers at places of its array (``_1=5``: the second item is 5)."""
        payload = bytes.fromhex(self.golden[name])
        if not numbers:
            return payload
        items = msgspec.msgpack.decode(payload[1:])
        for place, number in numbers.items():
            items[int(place[1:])] = number
        return payload[:1] + msgspec.msgpack.encode(items)

    async def speak(self) -> None:
        while True:
            for payload in self.published:
                await self.pub.send(payload)
            await asyncio.sleep(0.02)

    async def answer(self) -> None:
        answers = {
            feed.SnapshotRequest: "snapshot_part",
            feed.ReplayRequest: "replay_part",
            feed.CanaryClaim: "claim_answer",
        }
        while True:
            *way, question = await self.router.recv_multipart()
            asked = feed.decode_request(question)
            self.asked.append(type(asked))
            await self.router.send_multipart([*way, self.payload(answers[type(asked)], _1=asked.id)])


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


async def followed(version: int, ip: str) -> None:
    context = zmq.asyncio.Context()
    player = Player(version, ip, context)
    public, secret = zmq.curve_keypair()
    fleet = Fleet(Metrics())
    worker = fleet.join(Member("pod-1", "pod-1", ip, "worker", "worker"))
    seen: list[feed.ImageObservation] = []
    fleet.on_sighting(lambda _, sighting: seen.append(sighting))
    reader = FeedClient(worker, fleet, CurveKeys(public, secret, player.public), context, Metrics())
    tasks = [asyncio.create_task(each) for each in (player.speak(), player.answer(), reader.run())]
    try:
        await listened(player, reader, fleet, worker, seen)
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
        context.destroy(linger=0)


async def listened(
    player: Player, reader: FeedClient, fleet: Fleet, worker: Worker, seen: list[feed.ImageObservation]
) -> None:
    """Heartbeat and snapshot, then load, sighting and deltas with one missing, a question, a burst."""
    await until(lambda: worker.sync.synced and worker.heartbeat is not None)
    assert (worker.id, worker.sync.epoch, worker.sync.seq) == ("pod-1/0a1b2c3d", 7, 3)
    assert worker.routable
    assert fleet.index.holds(worker.slots[0], KEY[4])

    # Number 4 is missing: it is replayed, and 5, which has waited, is applied after it.
    player.published += [player.payload("delta", _2=5), player.payload("load"), player.payload("sighting")]
    await until(lambda: worker.sync.seq == 5)
    assert feed.ReplayRequest in player.asked
    assert fleet.index.holds(worker.slots[0], KEY[5])
    assert fleet.index.holds(worker.slots[1], KEY[1])
    await until(lambda: fleet.usage(worker, 1).others and seen)
    assert fleet.usage(worker, 1).others == 2.0
    assert seen[0].identity == b"\3" * 32

    player.published.append(player.payload("heartbeat_canary"))
    await until(lambda: worker.canary == "False")
    answers = await reader.request(lambda number: feed.CanaryClaim(number, 7, "router-a", 30.0))
    assert answers == [feed.ClaimAnswer(answers[0].id, False, "router-b")]

    # More messages than one read takes, then none that would wake the client.
    player.published.clear()
    end = worker.sync.seq + 3 * DRAIN + 7
    for seq in range(worker.sync.seq + 1, end + 1):
        await player.pub.send(feed.encode(feed.Delta(7, seq, 0.0, 0, 0, "GPU", b"", b"")))
    await until(lambda: worker.sync.seq == end)


@pytest.mark.parametrize("version", feed.ACCEPTED)
def test_feeds_of_all_accepted_versions_are_followed(version: int) -> None:
    asyncio.run(followed(version, f"127.97.{os.getpid() // 250 % 250 + 1}.{os.getpid() % 250 + 1}"))
