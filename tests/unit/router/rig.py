"""Shared fixtures of the router's tests: deployments, synced workers, and engines on loopback addresses."""

import asyncio
import contextlib
import itertools
import json
import os
from array import array

from mmrouter_lib import feed
from mmrouter_lib.api import parse_deployment
from mmrouter_lib.block_keys import block_keys, pack_keys
from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_router.fleet.workers import Fleet, Member, Worker
from mmrouter_router.request.prepared import Prepared
from mmrouter_router.scheduling.placer import Placer
from mmrouter_router.telemetry.metrics import Metrics

BLOCK, SEED = 16, 5
IDS = array("I", range(100))
KEYS = block_keys(IDS, BLOCK, (), SEED)
WORKERS = {"name": "worker", "role": "worker", "replicas": 3, "accelerator": {"kind": "cpu"}}
_hosts = itertools.count(1)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def resource(**spec):
    """A deployment of vLLM with one pool of workers, changed by ``spec``."""
    base = {"model": {"id": "m"}, "engine": {"type": "vllm", "blockSize": BLOCK}, "pools": [WORKERS]}
    metadata = {"apiVersion": "mmrouter.io/v1alpha1", "kind": "MMRouterDeployment", "metadata": {"name": "t"}}
    return parse_deployment({**metadata, "spec": base | spec})


def deployment(*pools, **verification):
    return resource(pools=[WORKERS, *pools], verification={"timeoutSeconds": 60, **verification})


def sync(fleet: Fleet, worker: Worker, keys=(), epoch: int = 1, seq: int = 0, rank: int = 0) -> None:
    """Answer the worker's snapshot request."""
    identity = f"{worker.member.uid}/boot-{epoch}"
    part = feed.SnapshotPart(worker.sync.request_id, identity, epoch, seq, rank, 0, "GPU", pack_keys(keys), True)
    fleet.on_reply(worker, part)


def heartbeat(fleet: Fleet, worker: Worker, canary: str = "True", epoch: int = 1, **values) -> None:
    """Publish a heartbeat with these fields."""
    base = feed.Heartbeat(
        f"{worker.member.uid}/boot-{epoch}", epoch, worker.sync.seq, "vllm", "up", "0.32.0", BLOCK, "m", "", {}
    )
    fields = {name: getattr(base, name) for name in base.__struct_fields__}
    report = feed.CanaryReport(epoch, canary) if canary else None
    fleet.on_published(worker, feed.Heartbeat(**{**fields, "canary": report, **values}))


def synced(fleet: Fleet, member: Member, keys=(), canary: str = "True", ranks: int = 1, **beat) -> Worker:
    """Add a worker whose last rank holds ``keys``."""
    worker = fleet.join(member)
    fleet.feed_connected(worker)
    sync(fleet, worker, keys, rank=ranks - 1)
    heartbeat(fleet, worker, canary, ranks=ranks, **beat)
    return worker


class Rig:
    """A fleet with a placer and a clock of its own."""

    def __init__(self, **verification) -> None:
        self.clock = Clock()
        self.fleet = Fleet(Metrics(), clock=self.clock)
        self.placer = Placer(deployment(**verification), self.fleet)

    def worker(self, name: str, keys=(), canary: str = "True", ranks: int = 1, admitted: bool = True, **beat) -> Worker:
        member = Member(f"uid-{name}", name, "127.0.0.1", "worker", "worker", admitted=admitted)
        return synced(self.fleet, member, keys, canary, ranks, **beat)

    def sync(self, worker: Worker, keys, **position) -> None:
        sync(self.fleet, worker, keys, **position)

    def beat(self, worker: Worker, canary: str = "True", epoch: int = 1, **values) -> None:
        heartbeat(self.fleet, worker, canary, epoch, **values)


def prepared(exactness: str = "exact", ids: array = IDS) -> Prepared:
    return Prepared(None, None, (), ids, (), exactness, (), SEED, 77)


def outcomes(reply):
    """Worker and outcome of each attempt of a reply."""
    return [(a["worker"], a["outcome"].split(":")[0]) for a in reply.trace.attempts]


def value(counter) -> float:
    """The value of one counter."""
    return next(sample.value for metric in counter.collect() for sample in metric.samples if "_total" in sample.name)


class LoopbackEngine:
    """An HTTP server on a loopback address of its own; subclasses answer. ``requests``: path, headers and body."""

    def __init__(self) -> None:
        self.ip = f"127.77.{os.getpid() % 250}.{next(_hosts)}"
        self.requests: list[tuple[str, dict[str, str], dict]] = []

    async def serve(self) -> None:
        self.server = await asyncio.start_server(self._connection, self.ip, HTTP_PORT)

    def close(self) -> None:
        if hasattr(self, "server"):
            self.server.close()

    async def respond(self, reader, writer, headers: dict[str, str]) -> bool:
        """Answer one request; return whether the connection stays open."""
        raise NotImplementedError

    async def _connection(self, reader, writer) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines if line)}
                raw = await reader.readexactly(int(headers["content-length"]))
                self.requests.append((first.split()[1], headers, json.loads(raw or b"{}")))
                if not await self.respond(reader, writer, headers):
                    return
                await writer.drain()
