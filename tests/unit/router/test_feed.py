"""The router's end of the feed: under any loss it ends with what the sidecar holds, or knows that it does not.

With real sockets the sidecar is a player of the golden frames, byte for byte as each accepted version wrote them. Only
numbers that a real one would set are set: an answer has the number of its question, a second delta follows the first.
"""

import asyncio
import json
import random
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st
from unit.router.rig import loopback, running
from waiting import until

from mmrouter_lib import feed
from mmrouter_lib.block_keys import pack_keys, unpack_keys
from mmrouter_lib.feed import Delta, Heartbeat, ReplayPart, ReplayRequest, SnapshotPart, SnapshotRequest
from mmrouter_router.core.settings import CurveKeys
from mmrouter_router.fleet import feed_client
from mmrouter_router.fleet.feed_client import DRAIN, PUB_PORT, ROUTER_PORT, FeedClient
from mmrouter_router.fleet.feed_sync import OLDER_BEATS, FeedSync
from mmrouter_router.fleet.workers import Fleet, Member
from mmrouter_router.http.server import raise_open_files
from mmrouter_router.telemetry.metrics import Metrics

RING = 6


class Sidecar:
    """The other end as the feed defines it: a stream of deltas, a ring, snapshots at (epoch, seq)."""

    def __init__(self) -> None:
        self.worker, self.epoch, self.seq = "pod/boot-1", 1, 0
        self.held: set[int] = set()
        self.ring: list[Delta] = []

    def change(self, stored: set[int], removed: set[int]) -> Delta:
        stored, removed = stored - self.held, (removed & self.held) - stored
        self.held = (self.held | stored) - removed
        self.seq += 1
        delta = Delta(self.epoch, self.seq, 0.0, 0, 0, "GPU", pack_keys(sorted(stored)), pack_keys(sorted(removed)))
        self.ring = [*self.ring, delta][-RING:]
        return delta

    def restart(self) -> None:
        self.epoch += 1
        self.worker, self.seq, self.held, self.ring = f"pod/boot-{self.epoch}", 0, set(), []

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(self.worker, self.epoch, self.seq, "vllm", "up", "0", 16, "m", "main", {})

    def answer(self, ask: SnapshotRequest | ReplayRequest):
        if isinstance(ask, SnapshotRequest):
            keys = pack_keys(sorted(self.held))
            return SnapshotPart(ask.id, self.worker, self.epoch, self.seq, 0, 0, "GPU", keys, True)
        have = [d for d in self.ring if d.seq >= ask.first]
        gone = ask.epoch != self.epoch or (ask.first <= self.seq and (not have or have[0].seq > ask.first))
        return ReplayPart(ask.id, tuple(have) if not gone else (), True, gone)


class View:
    """What an index would hold, driven by the follower's steps."""

    def __init__(self) -> None:
        self.sync = FeedSync()
        self.held: set[int] = set()
        self.asked: list[SnapshotRequest | ReplayRequest] = []
        self.take(self.sync.start())

    def take(self, steps) -> None:
        for step in steps:
            match step:
                case "reset":
                    self.held = set()
                case Delta():
                    self.held -= set(unpack_keys(step.removed))
                    self.held |= set(unpack_keys(step.stored))
                case SnapshotPart():
                    self.held |= set(unpack_keys(step.keys))
                case SnapshotRequest() | ReplayRequest():
                    self.asked.append(step)
                case "synced":
                    assert self.sync.synced

    def receive(self, frame: Delta | Heartbeat | SnapshotPart | ReplayPart) -> None:
        handlers = {Delta: self.sync.on_delta, Heartbeat: self.sync.on_heartbeat}
        handlers |= {SnapshotPart: self.sync.on_snapshot, ReplayPart: self.sync.on_replay}
        self.take(handlers[type(frame)](frame))


@given(st.integers(0, 2**32), st.integers(5, 60))
def test_index_converges_under_loss_duplication_and_delay(seed, rounds):
    rng = random.Random(seed)
    sidecar, view = Sidecar(), View()
    air: list = []
    for _ in range(rounds):
        action = rng.random()
        if action < 0.6:
            delta = sidecar.change({rng.randrange(30) for _ in range(3)}, {rng.randrange(30) for _ in range(2)})
            if rng.random() < 0.75:
                air.extend([delta] * rng.choice([1, 1, 2]))
        elif action < 0.65:
            sidecar.restart()
        elif action < 0.8:
            air.append(sidecar.heartbeat())
        elif view.asked:
            ask = view.asked.pop(rng.randrange(len(view.asked)))
            if rng.random() < 0.8:
                air.append(sidecar.answer(ask))
        while air and rng.random() < 0.6:
            view.receive(air.pop(rng.choice([0, 0, rng.randrange(len(air))])))
        if view.sync.synced and view.sync.seq == sidecar.seq and view.sync.epoch == sidecar.epoch:
            assert view.held == sidecar.held
    for frame in air:
        view.receive(frame)
    for _ in range(20):  # the air is clean now: a bounded number of exchanges must be enough
        view.receive(sidecar.heartbeat())
        asks, view.asked = view.asked, []
        if not asks:
            view.take(view.sync.on_silence())
        for ask in asks:
            view.receive(sidecar.answer(ask))
    assert view.sync.synced
    assert view.held == sidecar.held


def synced_view(sidecar: Sidecar) -> View:
    view = View()
    view.receive(sidecar.answer(view.asked.pop()))
    view.receive(sidecar.heartbeat())
    assert view.sync.synced
    return view


def test_new_epoch_resets_before_applying():
    sidecar = Sidecar()
    sidecar.change({1, 2, 3}, set())
    view = synced_view(sidecar)
    sidecar.restart()
    view.receive(sidecar.change({9}, set()))
    assert view.held == set()
    assert not view.sync.synced
    view.receive(sidecar.answer(view.asked.pop()))
    assert view.held == {9}


def test_late_delta_of_an_ended_epoch_is_ignored():
    sidecar = Sidecar()
    late = sidecar.change({1}, set())
    sidecar.restart()
    view = synced_view(sidecar)
    view.receive(late)
    assert view.held == set()
    assert view.sync.synced


def test_an_epoch_of_a_clock_that_was_set_back_is_followed_after_some_heartbeats():
    sidecar = Sidecar()
    sidecar.epoch = 10
    sidecar.change({1}, set())
    view = synced_view(sidecar)
    late = sidecar.heartbeat()
    sidecar.restart()
    sidecar.epoch = 3
    sidecar.change({2}, set())
    for _ in range(OLDER_BEATS - 1):
        view.receive(sidecar.heartbeat())
    assert (view.held, view.asked) == ({1}, []), "as late as this a frame may be"
    view.receive(late)
    for _ in range(OLDER_BEATS):
        assert view.held == {1}
        view.receive(sidecar.heartbeat())
    assert (view.held, view.sync.synced) == (set(), False)
    view.receive(sidecar.answer(view.asked.pop()))
    assert view.held == {2}


def test_heartbeat_reveals_a_lost_last_delta():
    sidecar = Sidecar()
    view = synced_view(sidecar)
    sidecar.change({5}, set())
    view.receive(sidecar.heartbeat())
    assert view.asked == [ReplayRequest(3, 1, 1)]
    view.receive(sidecar.answer(view.asked.pop()))
    assert view.held == {5}


def test_stale_feed_requests_one_snapshot():
    sidecar = Sidecar()
    view = synced_view(sidecar)
    view.sync.synced = False  # it was silent for too long
    sidecar.change({5}, set())
    for _ in range(3):
        view.receive(sidecar.heartbeat())
    assert view.asked == [SnapshotRequest(3)]
    view.receive(sidecar.answer(view.asked.pop()))
    assert (view.sync.synced, view.held) == (True, {5})


def test_case_48_gap_ends_in_one_snapshot_and_the_stream_continues():
    sidecar, view = Sidecar(), View()
    view.receive(sidecar.answer(view.asked.pop()))
    for number in range(RING + 3):
        sidecar.change({number}, set())
    view.receive(sidecar.ring[-1])
    view.receive(sidecar.answer(view.asked.pop()))  # the replay is gone
    (ask,) = view.asked
    view.asked.clear()
    view.receive(sidecar.answer(ask))
    assert (view.sync.seq, view.held) == (sidecar.seq, sidecar.held)
    view.receive(sidecar.heartbeat())
    view.receive(sidecar.change({99}, set()))
    assert view.asked == [], "no request is repeated"
    assert view.held == sidecar.held


GOLDEN = Path(__file__).parents[1] / "feed" / "golden"
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


@pytest.fixture
async def context():
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@pytest.mark.parametrize("version", feed.ACCEPTED)
async def test_feeds_of_all_accepted_versions_are_followed(version, context):
    """Heartbeat and snapshot, then load, sighting and deltas with one missing, a question, a burst."""
    player = Player(version, ip := loopback(), context)
    public, secret = zmq.curve_keypair()
    fleet = Fleet(Metrics())
    worker = fleet.join(Member("pod-1", "pod-1", ip, "worker", "worker"))
    seen: list[feed.ImageObservation] = []
    fleet.sighting_listeners.append(lambda _, sighting: seen.append(sighting))
    reader = FeedClient(worker, fleet, (CurveKeys(public, secret, player.public),), context, Metrics())
    async with running(player.speak(), player.answer(), reader.run()):
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


async def test_a_feed_waits_for_sockets_and_takes_none_meanwhile(context, monkeypatch, caplog):
    monkeypatch.setattr(feed_client, "RETRY_SECONDS", 0.05)
    player = Player(feed.ACCEPTED[-1], ip := loopback(), context)
    public, secret = zmq.curve_keypair()
    fleet = Fleet(Metrics())
    worker = fleet.join(Member("pod-1", "pod-1", ip, "worker", "worker"))
    small = zmq.asyncio.Context()
    small.set(zmq.MAX_SOCKETS, 2)
    other = small.socket(zmq.PUB)
    reader = FeedClient(worker, fleet, (CurveKeys(public, secret, player.public),), small, Metrics())
    async with running(player.speak(), player.answer(), reader.run()):
        await until(lambda: caplog.text.count("waits for free file descriptors") > 2)
        assert not worker.routable
        other.close(0)
        await until(lambda: worker.routable)
    small.destroy(linger=0)


async def test_feeds_of_a_thousand_workers_have_their_sockets():
    raise_open_files()
    context = feed_client.feed_context()
    opened = [context.socket(kind) for _ in range(1000) for kind in (zmq.SUB, zmq.DEALER)]
    assert len(opened) == 2000
    context.destroy(linger=0)


class Network:
    """Connections to a feed. ``lose``: those that exist get nothing through any more, and both ends stay open."""

    def __init__(self, target: str) -> None:
        self._target, self._losses = target, 0

    async def serve(self, ip: str) -> None:
        for port in (PUB_PORT, ROUTER_PORT):
            await asyncio.start_server(partial(self._connection, port), ip, port)

    def lose(self) -> None:
        self._losses += 1

    async def _connection(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(self._target, port)
        with suppress(ConnectionError):
            await asyncio.gather(self._pass(reader, there[1]), self._pass(there[0], writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        losses = self._losses
        while data := await reader.read(1 << 16):
            if losses == self._losses:
                writer.write(data)


async def test_a_connection_whose_other_end_is_gone_without_a_word_is_replaced(context, monkeypatch):
    monkeypatch.setattr(feed_client, "HEARTBEAT_MS", 200)
    player, network = Player(feed.ACCEPTED[-1], target := loopback(), context), Network(target)
    await network.serve(ip := loopback())
    public, secret = zmq.curve_keypair()
    fleet = Fleet(Metrics())
    worker = fleet.join(Member("pod-1", "pod-1", ip, "worker", "worker"))
    reader = FeedClient(worker, fleet, (CurveKeys(public, secret, player.public),), context, Metrics())
    async with running(player.speak(), player.answer(), reader.run()):
        await until(lambda: worker.routable)
        network.lose()
        player.published.append(player.payload("delta", _2=4))
        await until(lambda: worker.sync.seq == 4)
        assert await reader.request(lambda number: feed.CanaryClaim(number, 7, "router-a", 30.0))
