"""Requests served by a prefill and a decode engine of SGLang, against engines on loopback addresses."""

import asyncio
import itertools
from array import array

import pytest
import pytest_asyncio
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from unit.router.rig import LoopbackEngine, outcomes, resource, synced, value

from mmrouter_lib.block_keys import Span, block_keys
from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_router.core.errors import RequestError
from mmrouter_router.dispatch.engine_client import EngineClient
from mmrouter_router.dispatch.forwarder import Forwarder
from mmrouter_router.dispatch.stages import Stages
from mmrouter_router.fleet.workers import Fleet, Member
from mmrouter_router.http.upstream import Upstream
from mmrouter_router.request.engine_request import Outgoing
from mmrouter_router.request.prepared import Prepared
from mmrouter_router.scheduling.placer import Placer
from mmrouter_router.telemetry.metrics import Metrics
from mmrouter_router.telemetry.otlp_export import OtlpTracing
from mmrouter_router.telemetry.tracing import enter
from mmrouter_router.verify.probe_requests import ProbeRequest, ProbeRequestError, ProbeRequests

BLOCK, SEED = 16, 1
IDS = array("Q", range(80))
KEYS = block_keys(IDS, BLOCK, (), SEED)
ROOM = "x-override-bootstrap-room"
_hosts = itertools.count(1)


def answer(status: int, body: bytes = b"{}") -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


OK = answer(200, b"ok")
WRONG = answer(400, b'{"object":"error","message":"The prompt is empty.","code":400}')
STREAMED = answer(200, b'data: {"error": {"message": "KVTransferError", "code": 500}}\n\n')
HANGS, DIES, MEETS = b"hangs", b"dies", b"meets"
SOON = 0.4
"""Timeout of a hanging engine; a healthy one answers within it on a busy machine, too."""


class Engine(LoopbackEngine):
    """Answers as ``says`` tells, and counts requests that were aborted before the answer.

    ``MEETS``: it answers once the other engine of the bootstrap room does its part. ``rooms``: those in which one does.
    """

    def __init__(self, says: bytes, rooms: set[str]) -> None:
        super().__init__()
        self.says, self.rooms = says, rooms
        self.left = 0
        self.came, self.gone = asyncio.Event(), asyncio.Event()

    @property
    def asked(self) -> list[tuple[str, dict[str, str], dict]]:
        return self.requests

    async def respond(self, reader, writer, headers) -> bool:
        self.came.set()
        if self.says == DIES:
            writer.transport.abort()
            return False
        if self.says in (HANGS, MEETS) and await self._left(reader, headers[ROOM]):
            self.left += 1
            self.gone.set()
            writer.close()
            return False
        if self.says.startswith(b"HTTP/1.1 200") and self.says != STREAMED:
            self.rooms.add(headers.get(ROOM, ""))
        writer.write(OK if self.says == MEETS else self.says)
        return True

    async def _left(self, reader, room: str) -> bool:
        """Wait for the partner or the end of the request; return whether it was the latter."""
        reading = asyncio.ensure_future(reader.read(1))
        while not reading.done() and (self.says == HANGS or room not in self.rooms):
            await asyncio.wait((reading,), timeout=0.005)
        if not reading.done():
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            return False
        return True


class Rig:
    """A deployment with pools of SGLang; round robin sends to engines in the order of their names."""

    def __init__(self, policy: str = "roundRobin", prefill_seconds: float = 60, **spec) -> None:
        roles = ("prefill", "decode")
        self.metrics, self.engines = Metrics(), {}
        self.rooms: set[str] = set()
        self.fleet = Fleet(self.metrics)
        self.upstream = Upstream(connect_seconds=10)
        pools = [{"name": role, "role": role, "replicas": 2, "accelerator": {"kind": "cpu"}} for role in roles]
        engine = {"type": "sglang", "image": "i", "blockSize": BLOCK, "kvConnector": {"transferBackend": "nixl"}}
        spec |= {"engine": engine, "routing": {"policy": policy}, "pools": pools}
        self.placer = Placer(resource(**spec), self.fleet)
        self.stages = Stages("sglang", roles, self.fleet, self.placer, self.metrics, None)
        exchange = EngineClient(self.upstream, "sglang", "secret")
        self.forwarder = Forwarder(
            self.placer, exchange, self.metrics, stages=self.stages, prefill_seconds=prefill_seconds
        )

    async def engine(self, name: str, says: bytes = OK, *, keys=(), ranks=1, up=True, proved=None, **member) -> Engine:
        """``p1`` prefills and is ``proved``, ``d1`` decodes and is not; it is not there where it is not ``up``."""
        engine = self.engines[name] = Engine(says, self.rooms)
        if up:
            await engine.serve()
        role = {"p": "prefill", "d": "decode"}[name[0]]
        canary = "True" if (role != "decode" if proved is None else proved) else ""
        synced(self.fleet, Member(name, name, engine.ip, role, role, **member), keys, canary, ranks, engine="sglang")
        return engine

    async def send(self, fields=(), path: str = "/v1/chat/completions", fingerprint: bytes = b"f"):
        prepared = Prepared(None, None, (), IDS, (), "exact", (), SEED, 1)
        async with asyncio.timeout(15):
            return await self.forwarder.send("r-1", prepared, Outgoing(path, dict(fields)), fingerprint, {})

    async def prove(self, name: str, rank: int = 0, seconds: float = 60) -> bytes:
        """Ask a question of the router's own."""
        own = ProbeRequests("sglang", None, self.upstream, "secret", "m", b"", self.placer.partner, seconds)
        question = ProbeRequest(b'{"model": "m"}', IDS, Span(0, 1, b""))
        async with asyncio.timeout(15):
            return await own.send(self.fleet.workers[name], rank, question)

    async def nothing_is_booked(self) -> None:
        async with asyncio.timeout(15):
            while any((u.requests, u.prefill, u.active) != (0, 0, 0) for w in self.fleet for u in w.usage.values()):
                await asyncio.sleep(0.005)


@pytest_asyncio.fixture
async def make():
    rigs = []

    def build(**options) -> Rig:
        rigs.append(Rig(**options))
        return rigs[-1]

    yield build
    for rig in rigs:
        rig.upstream.close()
        for engine in rig.engines.values():
            engine.close()


def stages(reply):
    return [(note["stage"], note["outcome"], *note["workers"]) for note in reply.trace.stages]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_both_engines_get_the_request_and_the_decoder_answers(make, path):
    rig = make()
    prefill = await rig.engine("p1", answer(200, b"one token"))
    decode = await rig.engine("d1", answer(200, b"many tokens"))
    reply = await rig.send({"messages": ["x"], "stream": True}, path)
    assert (reply.first, reply.trace.form, reply.trace.answers) == (b"many tokens", "prefill-decode", "d1")
    reply.close()
    ((at, one, body), (also_at, other, also)) = (*prefill.asked, *decode.asked)
    assert (at, body) == (also_at, also) == (path, {"messages": ["x"], "stream": True})
    told = {"x-override-bootstrap-host": prefill.ip, "x-override-bootstrap-port": "8998", "x-override-rid": "r-1"}
    for headers in (one, other):
        assert {name: headers[name] for name in told} == told
        assert headers["authorization"] == "Bearer secret"
    assert 0 <= int(one[ROOM]) == int(other[ROOM]) < 1 << 63
    await rig.nothing_is_booked()


async def test_reply_has_the_prefill_decision_and_stage_times(make):
    rig = make(policy="kv")
    await rig.engine("p1")
    await rig.engine("p2", keys=KEYS[:4])
    await rig.engine("d1")
    reply = await rig.send()
    reply.close()
    assert (reply.decision.target.worker.member.name, reply.decision.choice.winner.overlap) == ("p2", 4)
    assert reply.decision.exactness == "exact"
    assert stages(reply) == [("prefill", "done", "p2"), ("answer", "first_byte", "d1")]
    assert all(note["seconds"] > 0 for note in reply.trace.stages)
    assert value(rig.metrics.chain.labels("prefill", "done")) == 1


async def test_each_request_has_its_own_bootstrap_room(make):
    rig = make()
    prefill, decode = await rig.engine("p1"), await rig.engine("d1")
    for _ in range(50):
        (await rig.send()).close()
    rooms = [headers[ROOM] for _, headers, _ in decode.asked]
    assert len(set(rooms)) == 50
    assert sorted(rooms) == sorted(headers[ROOM] for _, headers, _ in prefill.asked)


async def test_ranks_are_sent_to_both_engines(make):
    rig = make(policy="kv")
    prefill, decode = await rig.engine("p1", ranks=2), await rig.engine("d1", ranks=2)
    # The first rank of both is busy.
    for worker in rig.fleet:
        rig.fleet.usage(worker, 0).queue(100.0)
    (await rig.send()).close()
    ((_, one, _), (_, other, _)) = (*prefill.asked, *decode.asked)
    assert int(one[ROOM]) % 2 == 1
    assert one["x-override-routed-dp-rank"] == other["x-override-routed-dp-rank"] == "1"
    assert other["x-override-disagg-prefill-dp-rank"] == "1"


@pytest.mark.parametrize(
    ("says", "up", "cause"),
    [
        (OK, False, "connect"),
        (DIES, True, "engine_lost"),
        (answer(503), True, "busy"),
        (answer(500), True, "prefill"),
        (answer(429), True, "prefill"),
        (STREAMED, True, "prefill"),
    ],
    ids=["not-there", "dies", "503", "500", "429", "fails-in-stream"],
)
async def test_failed_prefill_aborts_the_decoder_and_retries(make, says, up, cause):
    rig = make()
    await rig.engine("p1", says, up=up)
    await rig.engine("p2")
    decode = await rig.engine("d1", MEETS)
    reply = await rig.send()
    assert (reply.answer.status, reply.first) == (200, b"ok")
    assert outcomes(reply) == [("p1", cause), ("d1", "answered 200")]
    assert stages(reply) == [("prefill", cause, "p1"), ("prefill", "done", "p2"), ("answer", "first_byte", "d1")]
    assert value(rig.metrics.retries.labels(cause)) == 1
    reply.close()
    async with asyncio.timeout(15):
        while decode.left < len(decode.asked) - 1:
            await decode.gone.wait()
    await rig.nothing_is_booked()


async def test_hung_prefill_times_out_and_retries(make):
    rig = make(prefill_seconds=SOON)
    hangs = await rig.engine("p1", HANGS)
    await rig.engine("p2")
    decode = await rig.engine("d1", MEETS)
    reply = await rig.send()
    assert (reply.answer.status, reply.first) == (200, b"ok")
    assert outcomes(reply) == [("p1", "timeout"), ("d1", "answered 200")]
    assert stages(reply) == [("prefill", "timeout", "p1"), ("prefill", "done", "p2"), ("answer", "first_byte", "d1")]
    reply.close()
    for engine in (hangs, decode):
        await asyncio.wait_for(engine.gone.wait(), 5)
    await rig.nothing_is_booked()


async def test_decoder_hung_in_two_pairs_is_excluded(make):
    rig = make(prefill_seconds=SOON)
    prefills = [await rig.engine(name, HANGS) for name in ("p1", "p2", "p3")]
    decodes = [await rig.engine(name, HANGS) for name in ("d1", "d2")]
    with pytest.raises(RequestError) as refused:
        await rig.send()
    assert refused.value.status == 503
    assert [len(engine.asked) for engine in prefills] == [1, 1, 1]
    assert max(len(engine.asked) for engine in decodes) == 2
    await rig.nothing_is_booked()


async def test_started_answer_is_never_timed_out(make):
    rig = make(prefill_seconds=SOON)
    prefill = await rig.engine("p1", HANGS)
    await rig.engine("p2")
    await rig.engine("d1")
    reply = await rig.send()
    assert (reply.answer.status, reply.first) == (200, b"ok")
    await asyncio.sleep(SOON + 0.1)  # longer than a prefill may take; nothing is there to wait for
    assert (len(prefill.asked), prefill.left, rig.engines["p2"].asked) == (1, 0, [])
    assert outcomes(reply) == [("d1", "answered 200")]
    reply.close()


async def test_client_error_of_the_prefill_is_returned_without_retry(make):
    rig = make()
    await rig.engine("p1", WRONG)
    other, decode = await rig.engine("p2"), await rig.engine("d1", HANGS)
    reply = await rig.send()
    assert reply.answer.status == 400
    assert b"The prompt is empty." in reply.first
    assert await reply.answer.piece() == b""
    reply.close()
    assert other.asked == []
    if decode.asked:
        await asyncio.wait_for(decode.gone.wait(), 5)
    await rig.nothing_is_booked()


@pytest.mark.parametrize(
    ("says", "cause"),
    [
        (None, "connect"),
        (DIES, "engine_lost"),
        (answer(503), "busy"),
        (answer(500), "transfer"),
        (STREAMED, "transfer"),
    ],
    ids=["not-there", "dies", "503", "500", "fails-in-stream"],
)
async def test_failed_decoder_aborts_the_prefill_and_retries(make, says, cause):
    rig = make()
    prefill = await rig.engine("p1", MEETS)
    await rig.engine("d1", says or OK, up=says is not None)
    await rig.engine("d2")
    reply = await rig.send()
    assert reply.answer.status == 200
    assert outcomes(reply)[0] == ("d1", cause)
    assert says is not None or outcomes(reply)[1:] == [("d2", "answered 200")]
    reply.close()
    assert prefill.left == len(prefill.asked) - 1
    await rig.nothing_is_booked()


async def test_client_error_of_the_decoder_is_returned_and_aborts_the_prefill(make):
    rig = make()
    prefill = await rig.engine("p1", HANGS)
    await rig.engine("d1", WRONG)
    reply = await rig.send()
    assert (reply.answer.status, outcomes(reply)) == (400, [("d1", "answered 400")])
    reply.close()
    if prefill.asked:
        await asyncio.wait_for(prefill.gone.wait(), 5)
    await rig.nothing_is_booked()


async def test_disconnected_client_aborts_both(make):
    rig = make()
    prefill, decode = await rig.engine("p1", HANGS), await rig.engine("d1", HANGS)
    work = asyncio.create_task(rig.send())
    async with asyncio.timeout(15):
        await asyncio.gather(prefill.came.wait(), decode.came.wait())
        # The prompt weighs on the engine that computes it, the answer on the other one.
        computing, answering = (rig.fleet.workers[name].usage[0] for name in ("p1", "d1"))
        assert computing.prefill > 0
        assert (answering.prefill, answering.requests) == (0, 1)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await asyncio.gather(prefill.gone.wait(), decode.gone.wait())
    await rig.nothing_is_booked()


async def test_client_disconnecting_mid_answer_aborts_both(make):
    rig = make()
    prefill = await rig.engine("p1", HANGS)
    await rig.engine("d1", b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nfirst")
    reply = await rig.send()
    assert reply.first == b"first"
    await asyncio.wait_for(prefill.came.wait(), 5)
    reply.close()
    await asyncio.wait_for(prefill.gone.wait(), 5)
    await rig.nothing_is_booked()


async def test_prefill_answer_is_drained_after_the_clients(make):
    rig = make()
    prefill = await rig.engine("p1", answer(200, b"x" * 3_000_000))
    await rig.engine("d1")
    for _ in range(3):
        reply = await rig.send()
        reply.close()
        await rig.nothing_is_booked()
    assert len(prefill.asked) == 3
    assert prefill.left == 0
    assert rig.upstream.idle_connections(prefill.ip, HTTP_PORT) == 1  # one connection, given back each time


async def test_pair_request_is_quarantined_after_two_deaths(make):
    rig = make()
    prefills = [await rig.engine("p1", DIES), await rig.engine("p2", DIES)]
    await rig.engine("d1", HANGS)
    for _ in range(2):
        with pytest.raises(RequestError) as refused:
            await rig.send()
        assert refused.value.status == 400
    assert [len(prefill.asked) for prefill in prefills] == [1, 1]
    assert value(rig.metrics.quarantined) == 2
    await rig.nothing_is_booked()


async def test_pair_requires_equal_layouts(make):
    rig = make()
    old, new = await rig.engine("p1", compatibility="old"), await rig.engine("p2", compatibility="new")
    await rig.engine("d0", compatibility="alone")
    await rig.engine("d1", compatibility="new")
    for _ in range(4):
        (await rig.send()).close()
    assert (len(old.asked), len(new.asked)) == (0, 4)
    assert rig.engines["d0"].asked == []


@pytest.mark.parametrize("alone", ["p1", "d1"])
async def test_without_a_pair_no_engine_receives_a_request(make, alone):
    rig = make()
    engine = await rig.engine(alone)
    with pytest.raises(RequestError) as refused:
        await rig.send()
    assert (refused.value.status, engine.asked) == (503, [])
    assert value(rig.metrics.degraded.labels("no_pair")) == 1


async def test_unequal_layouts_degrade_the_form(make):
    rig = make()
    engines = [await rig.engine("p1", compatibility="old"), await rig.engine("d1", compatibility="new")]
    assert rig.stages.form().degraded == ("no_pair",)
    with pytest.raises(RequestError) as refused:
        await rig.send()
    assert (refused.value.status, [engine.asked for engine in engines]) == (503, [[], []])
    assert value(rig.metrics.degraded.labels("no_pair")) == 1
    await rig.engine("d2", compatibility="old")
    assert rig.stages.form().degraded == ()
    (await rig.send()).close()
    assert value(rig.metrics.degraded.labels("no_pair")) == 1


async def test_all_prefills_failed_is_a_retryable_error(make):
    rig = make()
    await rig.engine("p1", answer(500))
    await rig.engine("d1", HANGS)
    with pytest.raises(RequestError) as refused:
        await rig.send()
    assert refused.value.status == 503
    assert "retry-after" in {name.lower() for name in refused.value.headers}
    await rig.nothing_is_booked()


async def test_each_half_has_a_span_with_its_error(make):
    rig = make()
    await rig.engine("p1", answer(500))
    await rig.engine("p2")
    await rig.engine("d1", MEETS)
    collected = InMemorySpanExporter()
    tracer = OtlpTracing(collected, Resource({}), lambda what, count: None)
    request = tracer.request("POST", "/v1/x", [])
    enter(request)
    reply = await rig.send()
    reply.close()
    await rig.nothing_is_booked()
    request.end()
    tracer.close()
    spans = collected.get_finished_spans()
    for name, told in (
        ("prefill", [("p1", "answered_500"), ("p2", None)]),
        ("engine", [("d1", "prefill"), ("d1", None)]),
    ):
        found = [span for span in spans if span.name == name]
        assert [(s.attributes["mmrouter.worker"], s.attributes.get("error.type")) for s in found] == told


async def test_equal_engines_take_turns(make):
    rig = make()
    engines = [await rig.engine(name) for name in ("p1", "p2", "d1", "d2")]
    for _ in range(4):
        (await rig.send()).close()
    assert [len(engine.asked) for engine in engines] == [2, 2, 2, 2]


async def test_prefill_engine_is_probed_with_a_decoder_of_its_layout(make):
    rig = make()
    other = await rig.engine("d0", compatibility="b")
    prefill, decode = await rig.engine("p1", compatibility="a", ranks=2), await rig.engine("d1", compatibility="a")
    await rig.prove("p1", rank=1)
    ((_, one, body), (_, two, same)) = (*prefill.asked, *decode.asked)
    assert (body, other.asked) == (same, [])
    assert one[ROOM] == two[ROOM]
    assert (int(one[ROOM]) % 2, one["x-data-parallel-rank"]) == (1, "1")


@pytest.mark.parametrize(("prefill", "decode"), [(answer(500), HANGS), (HANGS, answer(500)), (DIES, HANGS)])
async def test_failed_probe_aborts_the_other_half(make, prefill, decode):
    rig = make()
    engines = [await rig.engine("p1", prefill), await rig.engine("d1", decode)]
    with pytest.raises(ProbeRequestError):
        await rig.prove("p1")
    for engine in engines:
        if engine.says == HANGS and engine.asked:
            await asyncio.wait_for(engine.gone.wait(), 5)


async def test_probe_needs_a_partner(make):
    rig = make()
    prefill = await rig.engine("p1")
    with pytest.raises(ProbeRequestError, match="decode"):
        await rig.prove("p1")
    assert prefill.asked == []


async def test_decode_engine_is_probed_by_its_half(make):
    rig = make()
    prefill, decode = await rig.engine("p1", ranks=2), await rig.engine("d1", answer(200, b'{"usage": {}}'), ranks=2)
    await rig.engine("p2", compatibility="other")
    said = await rig.prove("d1", rank=1)
    ((_, one, body), (_, two, same)) = (*prefill.asked, *decode.asked)
    assert (said, body, rig.engines["p2"].asked) == (b'{"usage": {}}', same, [])
    assert (one[ROOM], two["x-override-routed-dp-rank"]) == (two[ROOM], "1")
    assert one["x-override-routed-dp-rank"] == two["x-override-disagg-prefill-dp-rank"] == str(int(one[ROOM]) % 2)


async def test_probe_of_a_hung_engine_times_out(make):
    rig = make()
    engines = [await rig.engine("p1", MEETS), await rig.engine("d1", HANGS)]
    with pytest.raises(ProbeRequestError, match=r"p1 and d1 gave no answer within 0\.4 s"):
        await rig.prove("d1", seconds=SOON)
    for engine in engines:
        await asyncio.wait_for(engine.gone.wait(), 5)


async def test_verified_partner_is_preferred_for_probes(make):
    rig = make()
    for name in ("p1", "p2", "p3"):
        await rig.engine(name, proved=name == "p3")
    await rig.engine("d1")
    await rig.engine("d2")
    decode, prefill = rig.fleet.workers["d1"], rig.fleet.workers["p1"]
    assert {rig.placer.partner(decode).worker.member.name for _ in range(64)} == {"p3"}
    assert {rig.placer.partner(prefill).worker.member.name for _ in range(64)} == {"d1", "d2"}


async def test_unverified_decoder_is_unused_under_refuse(make):
    rig = make(verification={"onFailure": "Refuse", "timeoutSeconds": 1})
    await rig.engine("p1")
    silent, proved = await rig.engine("d1"), await rig.engine("d2", proved=True)
    assert rig.placer.eligibility(rig.fleet.workers["d1"]) == "pending"
    for worker in rig.fleet:
        worker.since -= 60
    assert [rig.placer.eligibility(rig.fleet.workers[name]) for name in ("d1", "d2")] == ["refused", "verified"]
    for _ in range(4):
        (await rig.send()).close()
    assert (silent.asked, len(proved.asked)) == ([], 4)
    rig.fleet.mark_stale(rig.fleet.workers["d2"])
    assert rig.placer.eligibility(rig.fleet.workers["d2"]) == "unsynced"
