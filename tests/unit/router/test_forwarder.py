"""Retries before the first byte, against real engines on loopback addresses of their own."""

import asyncio
import contextlib
import itertools
import json
import os
from array import array

import pytest
import pytest_asyncio
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mmrouter_lib import feed
from mmrouter_lib.api import parse_deployment
from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_router.core.errors import RequestError
from mmrouter_router.dispatch.engine_client import EngineClient
from mmrouter_router.dispatch.forwarder import Forwarder, Quarantine
from mmrouter_router.fleet.workers import Fleet, Member
from mmrouter_router.http.upstream import Upstream
from mmrouter_router.request.engine_request import Outgoing
from mmrouter_router.request.prepare import Prepared
from mmrouter_router.scheduling.placer import Placer
from mmrouter_router.telemetry.metrics import Metrics
from mmrouter_router.telemetry.otlp_export import OtlpTracing
from mmrouter_router.telemetry.tracing import enter

_hosts = itertools.count(1)
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
BUSY = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nbusy"
DRAIN_TEXT = b'{"error":{"message":"cannot schedule new futures after shutdown"}}'
DRAINING = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: %d\r\n\r\n%s" % (len(DRAIN_TEXT), DRAIN_TEXT)
BROKEN = b'HTTP/1.1 500 Internal Server Error\r\ncontent-length: 15\r\n\r\n{"error":"boom"}'[:-1]
HEADERS_ONLY = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Engine:
    """Answers every request with ``says``; ``dies`` closes the connection after it."""

    def __init__(self, says: bytes, *, dies: bool = False) -> None:
        self.says, self.dies, self.asked = says, dies, 0
        self.ip = f"127.77.{os.getpid() % 250}.{next(_hosts)}"

    async def serve(self) -> None:
        self.server = await asyncio.start_server(self._connection, self.ip, HTTP_PORT)

    async def _connection(self, reader, writer) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if b"content-length" in line)
                await reader.readexactly(length)
                self.asked += 1
                writer.write(self.says)
                await writer.drain()
                if self.dies:
                    writer.transport.abort()
                    return


class Rig:
    """Engines named a, b, c...; round robin, so that they are asked in the order of their names."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.fleet = Fleet(self.metrics)
        self.upstream = Upstream(connect_seconds=10)
        self.engines: list[Engine] = []
        spec = {
            "model": {"id": "m"},
            "engine": {"type": "vllm", "blockSize": 16},
            "routing": {"policy": "roundRobin"},
            "pools": [{"name": "worker", "role": "worker", "replicas": 3, "accelerator": {"kind": "cpu"}}],
        }
        resource = {"apiVersion": "mmrouter.io/v1alpha1", "kind": "MMRouterDeployment", "metadata": {"name": "t"}}
        self.placer = Placer(parse_deployment({**resource, "spec": spec}), self.fleet)
        self.forwarder = Forwarder(self.placer, EngineClient(self.upstream, "vllm", "secret"), self.metrics)

    async def engine(self, says: bytes | None, *, dies: bool = False) -> Engine:
        engine = Engine(says or b"", dies=dies)
        if says is not None:
            await engine.serve()
        name = "abcdef"[len(self.engines)]
        self.engines.append(engine)
        worker = self.fleet.join(Member(name, name, engine.ip, "worker", "worker"))
        self.fleet.feed_connected(worker)
        part = feed.SnapshotPart(worker.sync.request_id, f"{name}/1", 1, 0, 0, 0, "GPU", b"", True)
        self.fleet.on_reply(worker, part)
        canary = feed.CanaryReport(1, "True")
        beat = feed.Heartbeat(f"{name}/1", 1, 0, "vllm", "up", "0", 16, "m", "", {}, 1, False, canary)
        self.fleet.on_published(worker, beat)
        return engine

    async def send(self, fingerprint: bytes = b"f"):
        prepared = Prepared(None, None, (), array("I", range(40)), (), "exact", (), 1, 1)
        return await self.forwarder.send("r-1", prepared, Outgoing("/v1/x", {}), fingerprint, {})


@pytest_asyncio.fixture
async def rig():
    rig = Rig()
    yield rig
    rig.upstream.close()
    for engine in rig.engines:
        if hasattr(engine, "server"):
            engine.server.close()


def outcomes(reply):
    return [(a["worker"], a["outcome"].split(":")[0]) for a in reply.trace.attempts]


@pytest.mark.parametrize(
    ("says", "dies", "cause"),
    [
        (None, False, "connect"),
        (BUSY, False, "busy"),
        (DRAINING, False, "draining"),
        (b"", True, "engine_lost"),
        (DRAINING[:-20], True, "engine_lost"),
        (HEADERS_ONLY, True, "engine_lost"),
    ],
)
async def test_before_the_first_byte_another_worker_is_asked(rig, says, dies, cause):
    await rig.engine(says, dies=dies)
    await rig.engine(OK)
    reply = await rig.send()
    assert (reply.answer.status, reply.first) == (200, b"ok")
    assert outcomes(reply) == [("a", cause), ("b", "answered 200")]
    assert rig.metrics.retries.labels(cause)._value.get() == 1
    reply.close()
    assert all(usage.requests == 0 for worker in rig.fleet for usage in worker.usage.values())


@pytest.mark.parametrize(("says", "dies", "cause"), [(None, False, "connect"), (BUSY, False, "busy")])
async def test_each_attempt_is_a_span_of_its_own_that_says_how_it_failed(rig, says, dies, cause):
    await rig.engine(says, dies=dies)
    await rig.engine(OK)
    collected = InMemorySpanExporter()
    tracer = OtlpTracing(collected, Resource({}), lambda what, count: None)
    request = tracer.request("POST", "/v1/x", [])
    enter(request)
    reply = await rig.send()
    reply.close()
    request.end()
    tracer.close()
    told = [s for s in collected.get_finished_spans() if s.name == "engine"]
    assert [span.attributes["mmrouter.worker"] for span in told] == ["a", "b"]
    assert [span.attributes.get("error.type") for span in told] == [cause, None]
    assert [span.attributes["mmrouter.attempt"] for span in told] == [1, 2]
    assert [event.name for event in told[1].events] == ["first byte"]
    assert len([s for s in collected.get_finished_spans() if s.name == "schedule"]) == 2


async def test_an_engines_own_500_is_not_tried_elsewhere(rig):
    await rig.engine(BROKEN)
    second = await rig.engine(OK)
    reply = await rig.send()
    assert reply.answer.status == 500
    assert second.asked == 0
    reply.close()


async def test_no_request_takes_down_a_third_engine_or_a_second_one_twice(rig):
    for _ in range(3):
        await rig.engine(b"", dies=True)
    with pytest.raises(RequestError) as caught:
        await rig.send()
    assert 400 <= caught.value.status < 500
    assert sum(engine.asked for engine in rig.engines) == 2
    with pytest.raises(RequestError):
        await rig.send()
    assert sum(engine.asked for engine in rig.engines) == 2
    assert json.loads(caught.value.to_body())["error"]["message"]


async def test_another_request_is_not_held_responsible(rig):
    await rig.engine(b"", dies=True)
    await rig.engine(OK)
    (await rig.send(b"one")).close()
    (await rig.send(b"two")).close()
    assert b"one" not in rig.forwarder.quarantine


async def test_nobody_left_is_a_503_that_says_when_to_come_back(rig):
    await rig.engine(None)
    with pytest.raises(RequestError) as caught:
        await rig.send()
    assert caught.value.status == 503
    assert int(caught.value.headers["Retry-After"]) >= 1


async def test_a_cancelled_request_leaves_no_booking(rig):
    engine = await rig.engine(b"")
    task = asyncio.create_task(rig.send())
    while not engine.asked:
        await asyncio.sleep(0.01)
    assert rig.fleet.workers["a"].usage[0].requests == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.fleet.workers["a"].usage[0].requests == 0


def test_the_quarantine_is_bounded():
    quarantine = Quarantine(size=3)
    for number in range(5):
        quarantine.add(b"%d" % number)
    assert [b"%d" % n in quarantine for n in range(5)] == [False, False, True, True, True]
