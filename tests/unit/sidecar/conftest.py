"""A fake engine and a fake router on loopback, with the sidecar under test between them."""

import asyncio
import itertools
import json
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import web
from unit.engines.conftest import deployment, role
from unit.sidecar.janitor_rig import node  # noqa: F401  (a fixture)

from mmrouter_lib import feed
from mmrouter_lib.api import to_json as to_json_object
from mmrouter_lib.block_keys import namespace_seed, unpack_keys
from mmrouter_lib.cache_layout import cache_layout
from mmrouter_lib.engines.vllm.events import decode_batch
from mmrouter_router.fleet.cache_query import hit_rule
from mmrouter_router.fleet.holder_table import mask_of
from mmrouter_router.fleet.index import Index
from mmrouter_sidecar import app
from mmrouter_sidecar.app import Sidecar
from mmrouter_sidecar.blocks.ledger import Ledger
from mmrouter_sidecar.blocks.ledger_ops import LedgerOp
from mmrouter_sidecar.engine import engine_probe as probe
from mmrouter_sidecar.settings import CurveKeys, Settings

END = b"\xff" * 8
_hosts = itertools.count(os.getpid() * 64)


def loopback() -> str:
    """An address of its own for every test, so that the real ports can be used."""
    number = next(_hosts) % (250 * 250 * 100)
    return f"127.{100 + number // 62500 % 100}.{number // 250 % 250 + 1}.{number % 250 + 1}"


def stored(
    hashes: list[int], parent: int | None = None, *, ids: list[int] | None = None, size: int = 2, **more: Any
) -> Any:
    """A BlockStored event whose tokens follow from its hashes unless given."""
    event = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": ids if ids is not None else [h % 1000 * size + n for h in hashes for n in range(size)],
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
    }
    return event | more


def removed(*hashes: int, **more: Any) -> Any:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", "group_idx": 0} | more


CLEARED = {"type": "AllBlocksCleared"}


def batch(*events: Any, rank: int = 0, ts: float = 1.0) -> bytes:
    return msgspec.msgpack.encode([ts, list(events), rank])


class FakeEngine:
    """A publisher with vLLM's sockets: PUB that connects, ROUTER that replays, numbers from 0."""

    def __init__(self, host: str, *, rank: int = 0, buffer: int = 10_000, topic: bytes = b"kv") -> None:
        self._context = zmq.asyncio.Context()
        self._topic, self._buffer, self._limit = topic, {}, buffer
        self.next = 0
        self.replays: list[int] = []
        self.answer_replays = True
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.RECONNECT_IVL, 10)
        self._monitor = self._pub.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED)
        self._pub.connect(f"tcp://{host}:{5557 + rank}")
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(f"tcp://{host}:{5657 + rank}")
        self._task = asyncio.create_task(self._serve())

    async def connected(self) -> None:
        """Wait until the sidecar's socket took the connection."""
        await self._monitor.recv_multipart()

    async def publish(self, payload: bytes, *, live: bool = True) -> int:
        """Publish a batch; with ``live`` false it is dropped on the way, as at a high-water mark."""
        seq, self.next = self.next, self.next + 1
        self._buffer[seq] = payload
        self._buffer.pop(seq - self._limit, None)
        if live:
            await self.send(seq, payload)
        return seq

    async def send(self, seq: int, payload: bytes) -> None:
        await self._pub.send_multipart([self._topic, seq.to_bytes(8, "big"), payload])

    async def _serve(self) -> None:
        while True:
            client, empty, start = await self._router.recv_multipart()
            first = int.from_bytes(start, "big")
            self.replays.append(first)
            if not self.answer_replays:
                continue
            for seq, payload in sorted(self._buffer.items()):
                if seq >= first:
                    await self._router.send_multipart([client, empty, self._topic, seq.to_bytes(8, "big"), payload])
            await self._router.send_multipart([client, empty, b"", END, b""])

    def kill(self) -> None:
        """Die as a killed process does: every connection ends at once."""
        self._task.cancel()
        self._context.destroy(linger=0)


def feed_socket(context: zmq.asyncio.Context, kind: int, host: str, keys: dict[str, bytes], who: str) -> Any:
    """Connect to a sidecar's feed with the keys of ``who``, or without CURVE if empty."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 10)
    if who:
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys[f"{who}_secret"])
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys[f"{who}_public"])
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys["sidecar_public"])
    if kind == zmq.SUB:
        socket.subscribe(b"")
    socket.connect(f"tcp://{host}:{7557 if kind == zmq.SUB else 7558}")
    return socket


class FakeRouter:
    """Keeps every frame, and an index made of nothing but a snapshot and deltas."""

    def __init__(self, host: str, keys: dict[str, bytes]) -> None:
        self._context = zmq.asyncio.Context()
        self._sub, self._dealer = (
            feed_socket(self._context, kind, host, keys, "router") for kind in (zmq.SUB, zmq.DEALER)
        )
        self.frames: list[feed.Published] = []
        self._news = asyncio.Condition()
        self._ids = itertools.count(1)
        self._task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        while True:
            frame = feed.decode_published(await self._sub.recv())
            async with self._news:
                self.frames.append(frame)
                self._news.notify_all()

    async def until(self, condition: Callable[[], Any], seconds: float = 15.0) -> Any:
        """Wait until a condition over the frames holds; returns its value. ``seconds`` end a hang, no more."""
        async with asyncio.timeout(seconds), self._news:
            while not (value := condition()):
                await self._news.wait()
            return value

    async def heartbeat(self, condition: Callable[[feed.Heartbeat], bool] = lambda beat: True) -> feed.Heartbeat:
        """Wait for the next heartbeat for which a condition holds."""
        start = len(self.frames)
        return await self.until(
            lambda: next((f for f in self.frames[start:] if isinstance(f, feed.Heartbeat) and condition(f)), None)
        )

    def of(self, kind: type) -> list[Any]:
        return [frame for frame in self.frames if isinstance(frame, kind)]

    async def ask(self, build: Callable[[int], feed.Request]) -> list[Any]:
        return await self.ask_raw(feed.encode(build(next(self._ids))))

    async def ask_raw(self, payload: bytes) -> list[Any]:
        await self._dealer.send_multipart([b"", payload])
        parts: list[Any] = []
        async with asyncio.timeout(60):
            while not parts or not parts[-1].last:
                parts.append(feed.decode_reply((await self._dealer.recv_multipart())[-1]))
        return parts

    async def snapshot(self) -> dict[tuple[int, int, str], set[int]]:
        return keys_of(await self.ask(feed.SnapshotRequest))

    def close(self) -> None:
        self._task.cancel()
        self._context.destroy(linger=0)


def keys_of(parts: list[feed.SnapshotPart]) -> dict[tuple[int, int, str], set[int]]:
    index: dict[tuple[int, int, str], set[int]] = {}
    for part in parts:
        index.setdefault((part.rank, part.group, part.medium), set()).update(unpack_keys(part.keys))
    return {place: keys for place, keys in index.items() if keys}


def follow(index: dict[tuple[int, int, str], set[int]], delta: feed.Delta) -> None:
    """Apply a delta as a router does; what is stored was absent, what is removed was present."""
    if delta.cleared:
        for place in [place for place in index if place[0] == delta.rank]:
            del index[place]
    keys = index.setdefault((delta.rank, delta.group, delta.medium), set())
    gone, new = set(unpack_keys(delta.removed)), set(unpack_keys(delta.stored))
    assert gone <= keys
    assert not new & keys
    keys -= gone
    keys |= new
    if not keys:
        del index[delta.rank, delta.group, delta.medium]


KEY = bytes(range(32))


def seed(lora: str | None = None, salt: str | None = None) -> int:
    return namespace_seed(KEY, model="m", lora=lora, salt=salt)


class Routed:
    """A ledger that reads engine batches, and an index that follows it, with a slot per cache group."""

    def __init__(self) -> None:
        self.ledger, self.index = Ledger(seed), Index()
        self.slots: defaultdict[int, int] = defaultdict(self.index.join)
        self.ops: list[LedgerOp] = []

    def apply(self, payload: bytes) -> set[int]:
        """Take a batch; return the keys that became held."""
        self.ledger.apply(decode_batch(payload), 0)
        taken = self.ledger.take()
        self.ops += taken.ops
        for change in taken.changes:
            self.index.remove(self.slots[change.place.group], change.removed)
            self.index.store(self.slots[change.place.group], change.stored)
        return {key for change in taken.changes for key in change.stored}

    def overlap(self, keys: Any, size: int, chunk: int = 0) -> int:
        """Return the blocks of ``size`` tokens that a router expects a prompt to hit. ``chunk``: of the model."""
        layout = cache_layout(self.ledger.groups, chunk=chunk)
        rule = hit_rule(layout, size, lambda groups: mask_of(self.slots[group] for group in groups))
        slot = self.slots[layout.primary]
        return self.index.match_groups(keys, {slot: rule})[slot]


@pytest.fixture(scope="session")
def curve() -> dict[str, bytes]:
    pairs = {name: zmq.curve_keypair() for name in ("sidecar", "router", "stranger")}
    halves = (("public", 0), ("secret", 1))
    return {f"{name}_{half}": pair[place] for name, pair in pairs.items() for half, place in halves}


@pytest.fixture
def settings(tmp_path: Path, curve: dict[str, bytes]) -> Settings:
    host = loopback()
    return Settings(
        pod_uid="pod-1",
        pod_ip=host,
        loopback=host,
        engine="vllm",
        model="org/model",
        revision="main",
        ranks=1,
        identity_key=bytes(range(32)),
        curve=CurveKeys(curve["sidecar_public"], curve["sidecar_secret"], (curve["router_public"],)),
        buffer_events=1000,
        state_dir=tmp_path / "state",
        model_dir=tmp_path / "model",
        hub_dir=tmp_path / "hub",
        secrets_dir=tmp_path / "secrets",
    )


class Running:
    """A sidecar in this process."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.sidecar = settings, Sidecar(settings)
        self.task = asyncio.create_task(self.sidecar.run())

    def metric(self, name: str, **labels: str) -> float:
        return self.sidecar.metrics.registry.get_sample_value(f"mmrouter_sidecar_{name}", labels) or 0.0

    async def ready(self) -> None:
        await asyncio.wait({self.task, asyncio.create_task(self.sidecar.ready.wait())}, return_when="FIRST_COMPLETED")
        assert self.sidecar.ready.is_set(), self.task.exception()

    async def stop(self) -> None:
        self.sidecar.stop()
        await self.task


@pytest.fixture
async def start(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[..., Awaitable[Running]]]:
    """Starts sidecars whose periods are shorter than in life, so that no test waits for a heartbeat."""
    for module, period in ((app, "BEAT_SECONDS"), (probe, "PERIOD"), (probe, "LOAD_PERIOD")):
        monkeypatch.setattr(module, period, 0.03)
    running: list[Running] = []

    async def begin(changed: Settings | None = None) -> Running:
        running.append(Running(changed or settings))
        await running[-1].ready()
        return running[-1]

    yield begin
    for sidecar in running:
        if not sidecar.task.done():
            await sidecar.stop()


@pytest.fixture
async def engines(settings: Settings) -> AsyncIterator[Callable[..., FakeEngine]]:
    alive: list[FakeEngine] = []

    def make(**options: Any) -> FakeEngine:
        alive.append(FakeEngine(settings.loopback, **options))
        return alive[-1]

    yield make
    for engine in alive:
        engine.kill()


@pytest.fixture
async def router(settings: Settings, curve: dict[str, bytes]) -> AsyncIterator[FakeRouter]:
    fake = FakeRouter(settings.pod_ip, curve)
    yield fake
    fake.close()


@pytest.fixture
async def http_engine(settings: Settings) -> AsyncIterator[dict[str, Any]]:
    """An engine's HTTP side; tests change what it says."""
    says: dict[str, Any] = {"health": 200, "version": "0.32.0", "metrics": "", "server": {}, "model": {}}
    says["asked"] = []

    async def answer(request: web.Request) -> web.Response:
        match request.path:
            case "/health" | "/ready":
                says["asked"].append(request.path)
                return web.Response(status=says["health"])
            case "/version":
                return web.json_response({"version": says["version"]})
            case "/metrics":
                return web.Response(text=says["metrics"])
            case path:
                return web.json_response(says[path.strip("/").removesuffix("_info")])

    site = web.Application()
    site.add_routes([web.get("/{path}", answer)])
    runner = web.AppRunner(site)
    await runner.setup()
    await web.TCPSite(runner, settings.pod_ip, 8000).start()
    yield says
    await runner.cleanup()


@pytest.fixture
def environment(tmp_path: Path, settings: Settings) -> dict[str, str]:
    """Files and variables as a rendered pod has them."""
    secrets = tmp_path / "config" / "secrets"
    secrets.mkdir(parents=True)
    worker = role("worker", accelerator={"kind": "nvidia", "count": 2}, parallelism={"data": 2})
    model = {"id": "org/model", "revision": "v1"}
    resource = deployment(worker, engine="vllm", model=model, sidecar={"bufferEvents": 500})
    (tmp_path / "config" / "deployment.json").write_text(json.dumps(to_json_object(resource)))
    (secrets / "identity.key").write_bytes(bytes(range(32)))
    (secrets / "engine.key").write_text("engine-secret\n")
    curve, names = settings.curve, ("sidecar.curve.public", "sidecar.curve.secret", "router.curve.public")
    for name, key in zip(names, (curve.public, curve.secret, *curve.clients), strict=True):
        (secrets / name).write_bytes(key + b"\n")
    return {
        "MMROUTER_CONFIG": str(tmp_path / "config"),
        "MMROUTER_STATE_DIR": str(tmp_path / "state"),
        "MMROUTER_MODEL_DIR": str(tmp_path / "model"),
        "MMROUTER_POOL": "worker",
        "POD_UID": "pod-7",
        "POD_IP": settings.pod_ip,
        "POD_LOOPBACK": settings.loopback,
    }
