"""Requests that two engines serve together, against engines on loopback addresses of their own: all or nothing."""

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
from mmrouter_lib.block_keys import Span, block_keys, pack_keys
from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_router.core.errors import RequestError
from mmrouter_router.dispatch.engine_client import EngineClient
from mmrouter_router.dispatch.forwarder import Forwarder
from mmrouter_router.dispatch.stages import Stages
from mmrouter_router.fleet.workers import Fleet, Member
from mmrouter_router.http.upstream import Upstream
from mmrouter_router.request.engine_request import Outgoing
from mmrouter_router.request.prepare import Prepared
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
"""Seconds after which what hangs is given up; whoever does not hang must answer within them on a busy machine, too."""


class Engine:
    """Answers as ``says`` tells; notes what it got, and who left before it spoke.

    ``MEETS``: it answers once the other engine of the room does its part. ``rooms``: those in which one does.
    """

    def __init__(self, says: bytes, rooms: set[str]) -> None:
        self.says, self.rooms = says, rooms
        self.asked: list[tuple[str, dict[str, str], dict]] = []
        self.left = 0
        self.came, self.gone = asyncio.Event(), asyncio.Event()
        self.ip = f"127.79.{os.getpid() % 250}.{next(_hosts)}"

    async def serve(self) -> None:
        self.server = await asyncio.start_server(self._connection, self.ip, HTTP_PORT)

    async def _connection(self, reader, writer) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines if line)}
                raw = await reader.readexactly(int(headers["content-length"]))
                self.asked.append((first.split()[1], headers, json.loads(raw)))
                self.came.set()
                if self.says == DIES:
                    writer.transport.abort()
                    return
                if self.says in (HANGS, MEETS) and await self._left(reader, headers[ROOM]):
                    self.left += 1
                    self.gone.set()
                    writer.close()
                    return
                if self.says.startswith(b"HTTP/1.1 200") and self.says != STREAMED:
                    self.rooms.add(headers.get(ROOM, ""))
                writer.write(OK if self.says == MEETS else self.says)
                await writer.drain()

    async def _left(self, reader, room: str) -> bool:
        """Wait for whoever comes first: the partner, or the end of the request."""
        reading = asyncio.ensure_future(reader.read(1))
        while not reading.done() and (self.says == HANGS or room not in self.rooms):
            await asyncio.wait((reading,), timeout=0.005)
        if not reading.done():
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            return False
        return True


class Rig:
    """A deployment with pools of SGLang; round robin, so that engines are asked in the order of their names."""

    def __init__(self, policy: str = "roundRobin", prefill_seconds: float = 60, **spec) -> None:
        roles = ("prefill", "decode")
        self.metrics, self.engines = Metrics(), {}
        self.rooms: set[str] = set()
        self.fleet = Fleet(self.metrics)
        self.upstream = Upstream(connect_seconds=10)
        pools = [{"name": role, "role": role, "replicas": 2, "accelerator": {"kind": "cpu"}} for role in roles]
        engine = {"type": "sglang", "image": "i", "blockSize": BLOCK, "kvConnector": {"transferBackend": "nixl"}}
        spec |= {"model": {"id": "m"}, "engine": engine, "routing": {"policy": policy}, "pools": pools}
        resource = {"apiVersion": "mmrouter.io/v1alpha1", "kind": "MMRouterDeployment", "metadata": {"name": "t"}}
        self.placer = Placer(parse_deployment({**resource, "spec": spec}), self.fleet)
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
        worker = self.fleet.join(Member(name, name, engine.ip, role, role, **member))
        self.fleet.feed_connected(worker)
        asked = worker.sync.request_id
        self.fleet.on_reply(worker, feed.SnapshotPart(asked, f"{name}/1", 1, 0, 0, 0, "GPU", pack_keys(keys), True))
        canary = feed.CanaryReport(1, "True") if (role != "decode" if proved is None else proved) else None
        beat = feed.Heartbeat(f"{name}/1", 1, 0, "sglang", "up", "0", BLOCK, "m", "", {}, ranks, False, canary)
        self.fleet.on_published(worker, beat)
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
            if hasattr(engine, "server"):
                engine.server.close()


def outcomes(reply):
    return [(a["worker"], a["outcome"].split(":")[0]) for a in reply.trace.attempts]


def stages(reply):
    return [(note["stage"], note["outcome"], *note["workers"]) for note in reply.trace.stages]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_both_engines_get_one_request_and_meet_in_one_room_and_the_decoder_answers(make, path):
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


async def test_the_decision_is_the_prefills_and_its_stages_have_their_times(make):
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
    assert rig.metrics.chain.labels("prefill", "done")._value.get() == 1


async def test_every_request_has_a_room_of_its_own(make):
    rig = make()
    prefill, decode = await rig.engine("p1"), await rig.engine("d1")
    for _ in range(50):
        (await rig.send()).close()
    rooms = [headers[ROOM] for _, headers, _ in decode.asked]
    assert len(set(rooms)) == 50
    assert sorted(rooms) == sorted(headers[ROOM] for _, headers, _ in prefill.asked)


async def test_ranks_are_told_to_both_and_the_room_leads_to_the_prefills(make):
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
async def test_a_prefill_that_fails_ends_the_decoders_request_and_another_pair_is_tried(make, says, up, cause):
    rig = make()
    await rig.engine("p1", says, up=up)
    await rig.engine("p2")
    decode = await rig.engine("d1", MEETS)
    reply = await rig.send()
    assert (reply.answer.status, reply.first) == (200, b"ok")
    assert outcomes(reply) == [("p1", cause), ("d1", "answered 200")]
    assert stages(reply) == [("prefill", cause, "p1"), ("prefill", "done", "p2"), ("answer", "first_byte", "d1")]
    assert rig.metrics.retries.labels(cause)._value.get() == 1
    reply.close()
    async with asyncio.timeout(15):
        while decode.left < len(decode.asked) - 1:
            await decode.gone.wait()
    await rig.nothing_is_booked()


async def test_a_prefill_that_hangs_is_given_up_in_time_and_another_pair_is_tried(make):
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


async def test_a_decoder_that_hangs_under_two_pairs_is_not_asked_a_third_time(make):
    rig = make(prefill_seconds=SOON)
    prefills = [await rig.engine(name, HANGS) for name in ("p1", "p2", "p3")]
    decodes = [await rig.engine(name, HANGS) for name in ("d1", "d2")]
    with pytest.raises(RequestError) as refused:
        await rig.send()
    assert refused.value.status == 503
    assert [len(engine.asked) for engine in prefills] == [1, 1, 1]
    assert max(len(engine.asked) for engine in decodes) == 2
    await rig.nothing_is_booked()


async def test_an_answer_that_has_begun_is_never_given_up_however_long_its_prefill_takes(make):
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


async def test_what_is_the_clients_fault_reaches_it_as_the_engines_error_and_nobody_else_is_asked(make):
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
    [(DIES, "engine_lost"), (answer(503), "busy"), (answer(500), "transfer"), (STREAMED, "transfer")],
    ids=["dies", "503", "500", "fails-in-stream"],
)
async def test_a_decoder_that_fails_ends_the_prefills_request_and_another_pair_is_tried(make, says, cause):
    rig = make()
    prefill = await rig.engine("p1", MEETS)
    await rig.engine("d1", says)
    await rig.engine("d2")
    reply = await rig.send()
    assert reply.answer.status == 200
    assert outcomes(reply)[0] == ("d1", cause)
    reply.close()
    assert prefill.left == len(prefill.asked) - 1
    await rig.nothing_is_booked()


async def test_a_decoder_that_cannot_be_reached_ends_the_prefills_request(make):
    rig = make()
    prefill = await rig.engine("p1", MEETS)
    await rig.engine("d1", up=False)
    await rig.engine("d2")
    reply = await rig.send()
    assert outcomes(reply) == [("d1", "connect"), ("d2", "answered 200")]
    reply.close()
    assert prefill.left == len(prefill.asked) - 1
    await rig.nothing_is_booked()


async def test_a_decoders_error_of_the_client_is_passed_on_and_ends_the_prefills_request(make):
    rig = make()
    prefill = await rig.engine("p1", HANGS)
    await rig.engine("d1", WRONG)
    reply = await rig.send()
    assert (reply.answer.status, outcomes(reply)) == (400, [("d1", "answered 400")])
    reply.close()
    if prefill.asked:
        await asyncio.wait_for(prefill.gone.wait(), 5)
    await rig.nothing_is_booked()


async def test_a_client_that_leaves_ends_both(make):
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


async def test_a_client_that_leaves_in_the_middle_of_its_answer_ends_both(make):
    rig = make()
    prefill = await rig.engine("p1", HANGS)
    await rig.engine("d1", b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nfirst")
    reply = await rig.send()
    assert reply.first == b"first"
    await asyncio.wait_for(prefill.came.wait(), 5)
    reply.close()
    await asyncio.wait_for(prefill.gone.wait(), 5)
    await rig.nothing_is_booked()


async def test_a_prefills_answer_is_read_to_its_end_though_the_clients_was_whole_before(make):
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


async def test_under_two_engines_that_end_a_request_is_refused_from_then_on(make):
    rig = make()
    prefills = [await rig.engine("p1", DIES), await rig.engine("p2", DIES)]
    await rig.engine("d1", HANGS)
    for _ in range(2):
        with pytest.raises(RequestError) as refused:
            await rig.send()
        assert refused.value.status == 400
    assert [len(prefill.asked) for prefill in prefills] == [1, 1]
    assert rig.metrics.quarantined._value.get() == 2
    await rig.nothing_is_booked()


async def test_only_engines_of_one_layout_make_a_pair(make):
    rig = make()
    old, new = await rig.engine("p1", compatibility="old"), await rig.engine("p2", compatibility="new")
    await rig.engine("d0", compatibility="alone")
    await rig.engine("d1", compatibility="new")
    for _ in range(4):
        (await rig.send()).close()
    assert (len(old.asked), len(new.asked)) == (0, 4)
    assert rig.engines["d0"].asked == []


@pytest.mark.parametrize("alone", ["p1", "d1"])
async def test_without_a_pair_nobody_is_asked(make, alone):
    rig = make()
    engine = await rig.engine(alone)
    with pytest.raises(RequestError) as refused:
        await rig.send()
    assert (refused.value.status, engine.asked) == (503, [])
    assert rig.metrics.degraded.labels("no_pair")._value.get() == 1


async def test_engines_of_unequal_layouts_count_as_no_pair_and_the_form_says_so(make):
    rig = make()
    engines = [await rig.engine("p1", compatibility="old"), await rig.engine("d1", compatibility="new")]
    assert rig.stages.form().degraded == ("no_pair",)
    with pytest.raises(RequestError) as refused:
        await rig.send()
    assert (refused.value.status, [engine.asked for engine in engines]) == (503, [[], []])
    assert rig.metrics.degraded.labels("no_pair")._value.get() == 1
    await rig.engine("d2", compatibility="old")
    assert rig.stages.form().degraded == ()
    (await rig.send()).close()
    assert rig.metrics.degraded.labels("no_pair")._value.get() == 1


async def test_when_every_prefill_has_failed_the_client_may_try_again(make):
    rig = make()
    await rig.engine("p1", answer(500))
    await rig.engine("d1", HANGS)
    with pytest.raises(RequestError) as refused:
        await rig.send()
    assert refused.value.status == 503
    assert "retry-after" in {name.lower() for name in refused.value.headers}
    await rig.nothing_is_booked()


async def test_each_half_is_a_span_of_its_own_that_says_how_it_failed(make):
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


async def test_equal_engines_of_both_roles_take_turns(make):
    rig = make()
    engines = [await rig.engine(name) for name in ("p1", "p2", "d1", "d2")]
    for _ in range(4):
        (await rig.send()).close()
    assert [len(engine.asked) for engine in engines] == [2, 2, 2, 2]


async def test_a_prefill_engine_is_proved_together_with_a_decode_engine_of_its_layout(make):
    rig = make()
    other = await rig.engine("d0", compatibility="b")
    prefill, decode = await rig.engine("p1", compatibility="a", ranks=2), await rig.engine("d1", compatibility="a")
    await rig.prove("p1", rank=1)
    ((_, one, body), (_, two, same)) = (*prefill.asked, *decode.asked)
    assert (body, other.asked) == (same, [])
    assert one[ROOM] == two[ROOM]
    assert (int(one[ROOM]) % 2, one["x-data-parallel-rank"]) == (1, "1")


@pytest.mark.parametrize(("prefill", "decode"), [(answer(500), HANGS), (HANGS, answer(500)), (DIES, HANGS)])
async def test_a_proof_that_fails_on_one_side_leaves_nobody_waiting(make, prefill, decode):
    rig = make()
    engines = [await rig.engine("p1", prefill), await rig.engine("d1", decode)]
    with pytest.raises(ProbeRequestError):
        await rig.prove("p1")
    for engine in engines:
        if engine.says == HANGS and engine.asked:
            await asyncio.wait_for(engine.gone.wait(), 5)


async def test_without_a_decode_engine_nothing_is_proved(make):
    rig = make()
    prefill = await rig.engine("p1")
    with pytest.raises(ProbeRequestError, match="decode"):
        await rig.prove("p1")
    assert prefill.asked == []


async def test_a_decode_engine_is_proved_by_its_half_of_an_answer(make):
    rig = make()
    prefill, decode = await rig.engine("p1", ranks=2), await rig.engine("d1", answer(200, b'{"usage": {}}'), ranks=2)
    await rig.engine("p2", compatibility="other")
    said = await rig.prove("d1", rank=1)
    ((_, one, body), (_, two, same)) = (*prefill.asked, *decode.asked)
    assert (said, body, rig.engines["p2"].asked) == (b'{"usage": {}}', same, [])
    assert (one[ROOM], two["x-override-routed-dp-rank"]) == (two[ROOM], "1")
    assert one["x-override-routed-dp-rank"] == two["x-override-disagg-prefill-dp-rank"] == str(int(one[ROOM]) % 2)


async def test_an_engine_that_hangs_keeps_nobody_waiting_for_its_proof(make):
    rig = make()
    engines = [await rig.engine("p1", MEETS), await rig.engine("d1", HANGS)]
    with pytest.raises(ProbeRequestError, match=r"p1 and d1 gave no answer within 0\.4 s"):
        await rig.prove("d1", seconds=SOON)
    for engine in engines:
        await asyncio.wait_for(engine.gone.wait(), 5)


async def test_a_proved_partner_is_asked_and_else_any_so_that_one_that_hangs_keeps_nobody_unproved(make):
    rig = make()
    for name in ("p1", "p2", "p3"):
        await rig.engine(name, proved=name == "p3")
    await rig.engine("d1")
    await rig.engine("d2")
    decode, prefill = rig.fleet.workers["d1"], rig.fleet.workers["p1"]
    assert {rig.placer.partner(decode).worker.member.name for _ in range(64)} == {"p3"}
    assert {rig.placer.partner(prefill).worker.member.name for _ in range(64)} == {"d1", "d2"}


async def test_a_decode_engine_that_never_proved_itself_is_not_used_where_what_is_unproved_is_refused(make):
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
