"""Shared fixtures of the router's tests: deployments, synced workers, and engines on loopback addresses."""

import asyncio
import contextlib
import itertools
import json
import os
import resource as limits
import ssl
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from unit.router.certificates import HOST
from waiting import until

from mmrouter_lib import feed
from mmrouter_lib.api import parse_deployment
from mmrouter_lib.block_keys import block_keys, pack_keys
from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_router.core.errors import RequestError
from mmrouter_router.fleet.workers import Fleet, Member, Worker
from mmrouter_router.http.body_budget import BodyBudget, BodyReservation
from mmrouter_router.http.certificate import ServerCertificate
from mmrouter_router.http.server import Server
from mmrouter_router.request.prepared import Prepared
from mmrouter_router.scheduling.placer import Placer
from mmrouter_router.telemetry.metrics import Metrics
from mmrouter_router.telemetry.otlp_export import OtlpTracing
from mmrouter_router.telemetry.tracing import enter

PORT = 8000
BLOCK, SEED = 16, 5
IDS = array("I", range(100))
KEYS = block_keys(IDS, BLOCK, (), SEED)
WORKERS = {"name": "worker", "role": "worker", "replicas": 3, "accelerator": {"kind": "cpu"}}
_hosts = itertools.count(1)


def loopback() -> str:
    """A loopback address that no other server of this process has."""
    number = next(_hosts)
    return f"127.{100 + number // 250}.{os.getpid() % 250}.{number % 250 + 1}"


async def refused(asked, kind=RequestError):
    """Return the error of this kind that something asked for is refused with."""
    with pytest.raises(kind) as caught:
        await asked
    return caught.value


@contextlib.asynccontextmanager
async def running(*works) -> AsyncIterator[list[asyncio.Task]]:
    """Run these coroutines beside a block, and cancel them at its end."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield tasks
    finally:
        await cancelled(*tasks)


async def cancelled(*tasks: asyncio.Task) -> None:
    """Cancel tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def at_rest(measure) -> None:
    """Wait until a measure that is not 0 stays as it is for 50 turns of the loop.

    Elapsed time proves nothing on a busy machine.
    """
    before, still = 0, 0
    async with asyncio.timeout(20):
        while still < 50:
            await asyncio.sleep(0.002)
            still = still + 1 if measure() and measure() == before else 0
            before = measure()


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def manifest(**spec) -> dict:
    """A resource of vLLM with one pool of workers, changed by ``spec``."""
    base = {"model": {"id": "m"}, "engine": {"type": "vllm", "blockSize": BLOCK}, "pools": [WORKERS]}
    metadata = {"apiVersion": "mmrouter.io/v1alpha1", "kind": "MMRouterDeployment", "metadata": {"name": "t"}}
    return {**metadata, "spec": base | spec}


def resource(**spec):
    return parse_deployment(manifest(**spec))


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


def unlimited(refuse=lambda error: None) -> BodyReservation:
    """A reservation that no body exceeds."""
    return BodyReservation(BodyBudget(1 << 40), refuse)


@contextlib.contextmanager
def no_free_descriptors():
    """Let the process open no file: not even in the place of one that is closed meanwhile."""
    before = limits.getrlimit(limits.RLIMIT_NOFILE)
    limits.setrlimit(limits.RLIMIT_NOFILE, (1, before[1]))  # with 0, no socket can be polled
    try:
        yield
    finally:
        limits.setrlimit(limits.RLIMIT_NOFILE, before)


class Rig:
    """A fleet with a placer and a clock of its own."""

    def __init__(self, **verification) -> None:
        self.clock = Clock()
        self.metrics = Metrics()
        self.fleet = Fleet(self.metrics, clock=self.clock)
        self.placer = Placer(deployment(**verification), self.fleet)

    def worker(self, name: str, keys=(), canary: str = "True", ranks: int = 1, admitted: bool = True, **beat) -> Worker:
        member = Member(f"uid-{name}", name, "127.0.0.1", "worker", "worker", admitted=admitted)
        return synced(self.fleet, member, keys, canary, ranks, **beat)

    def sync(self, worker: Worker, keys, **position) -> None:
        sync(self.fleet, worker, keys, **position)

    def delta(
        self, worker: Worker, keys=(), *, rank=0, group=0, medium="GPU", skipped=0, cleared=False, removed=()
    ) -> None:
        """Publish stored keys, after ``skipped`` lost deltas."""
        seq, packed = worker.sync.seq + 1 + skipped, (pack_keys(keys), pack_keys(removed))
        delta = feed.Delta(worker.sync.epoch, seq, 0.0, rank, group, medium, *packed, cleared)
        self.fleet.on_published(worker, delta)

    def beat(self, worker: Worker, canary: str = "True", epoch: int = 1, **values) -> None:
        heartbeat(self.fleet, worker, canary, epoch, **values)


def fingerprint(value: bytes = b"f") -> Callable[[], Awaitable[bytes]]:
    async def compute() -> bytes:
        return value

    return compute


def prepared(exactness: str = "exact", ids: array = IDS, fingerprint: int = 77) -> Prepared:
    return Prepared(None, None, (), ids, (), exactness, (), SEED, fingerprint)


def outcomes(reply):
    """Worker and outcome of each attempt of a reply."""
    return [(a["worker"], a["outcome"].split(":")[0]) for a in reply.trace.attempts]


def value(counter) -> float:
    """The value of one counter."""
    return next(sample.value for metric in counter.collect() for sample in metric.samples if "_total" in sample.name)


def counts(counter, *labels: str) -> dict:
    """The values of a counter by the values of its labels (by the label's value itself if it is one)."""
    (family,) = counter.collect()
    found = [(tuple(s.labels[n] for n in labels), s.value) for s in family.samples if s.name.endswith("_total")]
    return {names if len(labels) > 1 else names[0]: value for names, value in found}


def http_answer(status: int, body: bytes = b"{}") -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


async def spans_of(request) -> tuple[ReadableSpan, ...]:
    """Return the ended spans of what ``request()`` does."""
    collected = InMemorySpanExporter()
    tracer = OtlpTracing(collected, Resource({}), lambda what, count: None)
    span = tracer.request("POST", "/v1/x", [])
    enter(span)
    await request()
    span.end()
    tracer.close()
    return collected.get_finished_spans()


class LoopbackServer:
    """A server of ``app`` on a loopback address of its own. ``trust``: a client's context where it serves TLS."""

    def __init__(self, app, certificate: ServerCertificate | None = None, trust: ssl.SSLContext | None = None) -> None:
        self.ip, self._trust = loopback(), trust
        self.server = Server(app, self.ip, PORT, drain_seconds=1, certificate=certificate)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        name = None if self._trust is None else HOST
        return await asyncio.open_connection(self.ip, PORT, ssl=self._trust, server_hostname=name)

    async def start(self):
        self._task = asyncio.create_task(self.server.serve())
        await until(lambda: self.server.started)
        return self

    async def stop(self, *_: object) -> None:
        self._task.cancel()  # faster than a shutdown, which test_server covers
        for server in self.server.servers:
            server.close()
        for connection in tuple(self.server.server_state.connections):
            connection.transport.abort()
        await asyncio.gather(self._task, *self.server.server_state.tasks, return_exceptions=True)

    __aenter__, __aexit__ = start, stop


class LoopbackEngine:
    """An HTTP server on a loopback address of its own; subclasses answer. ``requests``: path, headers and body."""

    def __init__(self) -> None:
        self.ip = loopback()
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


class Engine(LoopbackEngine):
    """Answers everything with one status; ``seen`` has path, body and authorization of each request.

    ``encodes``: the answer to a chat contains embeddings of its images.
    """

    def __init__(self, status: int = 200, *, encodes: bool = False) -> None:
        super().__init__()
        self.status, self.encodes = status, encodes

    @property
    def seen(self) -> list[tuple[str, dict, str]]:
        return [(path, body, headers["authorization"]) for path, headers, body in self.requests]

    async def __aenter__(self) -> "Engine":
        await self.serve()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def respond(self, reader, writer, headers) -> bool:
        answer = json.dumps(_embeddings(self.requests[-1][2]) if self.encodes else {}).encode()
        writer.write(http_answer(self.status, answer))
        return True


def _embeddings(body: dict) -> dict:
    parts = [part for message in body.get("messages", ()) for part in message["content"]]
    return {"ec_transfer_params": {part["uuid"]: {"item_indices": [0]} for part in parts}}
