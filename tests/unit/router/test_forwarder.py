"""Retries before the first byte, against engines on loopback addresses."""

import asyncio
from array import array

import pytest
import pytest_asyncio
from unit.router.rig import LoopbackEngine, http_answer, outcomes, refused, resource, spans_of, synced, until, value

from mmrouter_router.dispatch.engine_client import EngineClient
from mmrouter_router.dispatch.forwarder import Forwarder, Quarantine
from mmrouter_router.dispatch.stages import ForwardCall
from mmrouter_router.fleet.workers import Fleet, Member
from mmrouter_router.http.upstream import Upstream
from mmrouter_router.request.prepared import Outgoing, Prepared
from mmrouter_router.scheduling.placer import Placer
from mmrouter_router.telemetry.metrics import Metrics

OK = http_answer(200, b"ok")
BUSY = http_answer(503, b"busy")
DRAINING = http_answer(500, b'{"error":{"message":"cannot schedule new futures after shutdown"}}')
BROKEN = http_answer(500, b'{"error":"boom"')
HEADERS_ONLY = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Engine(LoopbackEngine):
    """Answers every request with ``answer``; ``dies`` closes the connection after it."""

    def __init__(self, answer: bytes, *, dies: bool = False) -> None:
        super().__init__()
        self.answer, self.dies = answer, dies

    @property
    def asked(self) -> int:
        return len(self.requests)

    async def respond(self, reader, writer, headers) -> bool:
        writer.write(self.answer)
        await writer.drain()
        if self.dies:
            writer.transport.abort()
        return not self.dies


class Rig:
    """Engines named a, b, c...; round robin sends to them in the order of their names."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.fleet = Fleet(self.metrics)
        self.upstream = Upstream(connect_seconds=10)
        self.engines: list[Engine] = []
        self.placer = Placer(resource(routing={"policy": "roundRobin"}), self.fleet)
        self.forwarder = Forwarder(self.placer, EngineClient(self.upstream, "vllm", "secret"), self.metrics)

    async def engine(self, says: bytes | None, *, dies: bool = False) -> Engine:
        engine = Engine(says or b"", dies=dies)
        if says is not None:
            await engine.serve()
        name = "abcdef"[len(self.engines)]
        self.engines.append(engine)
        synced(self.fleet, Member(name, name, engine.ip, "worker", "worker"))
        return engine

    async def send(self, fingerprint: bytes = b"f"):
        prepared = Prepared(None, None, (), array("I", range(40)), (), "exact", (), 1, 1)
        return await self.forwarder.send(ForwardCall("r-1", prepared, Outgoing("/v1/x", {}), {}), fingerprint)


@pytest_asyncio.fixture
async def rig():
    rig = Rig()
    yield rig
    rig.upstream.close()
    for engine in rig.engines:
        engine.close()


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
async def test_another_worker_is_tried_before_the_first_byte(rig, says, dies, cause):
    await rig.engine(says, dies=dies)
    await rig.engine(OK)
    reply = await rig.send()
    assert (reply.answer.status, reply.first) == (200, b"ok")
    assert outcomes(reply) == [("a", cause), ("b", "answered 200")]
    assert value(rig.metrics.retries.labels(cause)) == 1
    reply.close()
    assert all(usage.requests == 0 for worker in rig.fleet for usage in worker.usage.values())


@pytest.mark.parametrize(("says", "dies", "cause"), [(None, False, "connect"), (BUSY, False, "busy")])
async def test_each_attempt_has_a_span_with_its_error(rig, says, dies, cause):
    await rig.engine(says, dies=dies)
    await rig.engine(OK)

    async def send() -> None:
        (await rig.send()).close()

    spans = await spans_of(send)
    told = [span for span in spans if span.name == "engine"]
    assert [span.attributes["mmrouter.worker"] for span in told] == ["a", "b"]
    assert [span.attributes.get("error.type") for span in told] == [cause, None]
    assert [span.attributes["mmrouter.attempt"] for span in told] == [1, 2]
    assert [event.name for event in told[1].events] == ["first byte"]
    assert sum(span.name == "schedule" for span in spans) == 2


async def test_engine_500_is_not_retried(rig):
    await rig.engine(BROKEN)
    second = await rig.engine(OK)
    reply = await rig.send()
    assert reply.answer.status == 500
    assert second.asked == 0
    reply.close()


async def test_request_is_quarantined_after_two_deaths(rig):
    for _ in range(3):
        await rig.engine(b"", dies=True)
    for _ in range(2):
        assert (await refused(rig.send())).code == "request_quarantined"
        assert sum(engine.asked for engine in rig.engines) == 2


async def test_quarantine_does_not_affect_other_requests(rig):
    await rig.engine(b"", dies=True)
    await rig.engine(OK)
    (await rig.send(b"one")).close()
    (await rig.send(b"two")).close()
    assert b"one" not in rig.forwarder.quarantine


async def test_no_worker_left_is_503_with_retry_after(rig):
    await rig.engine(None)
    error = await refused(rig.send())
    assert (error.status, error.headers["Retry-After"]) == (503, "1")


async def test_cancelled_request_releases_its_booking(rig):
    engine = await rig.engine(b"")
    task = asyncio.create_task(rig.send())
    await until(lambda: engine.asked)
    assert rig.fleet.workers["a"].usage[0].requests == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.fleet.workers["a"].usage[0].requests == 0


def test_quarantine_is_bounded():
    quarantine = Quarantine(size=3)
    for number in range(5):
        quarantine.add(b"%d" % number)
    assert [b"%d" % n in quarantine for n in range(5)] == [False, False, True, True, True]
