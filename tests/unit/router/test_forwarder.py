"""Retries before the first byte, against engines on loopback addresses."""

import asyncio
import json

import pytest
from unit.router.rig import BLOCK, cancelled, fingerprint, no_free_descriptors, outcomes, refused, spans_of, value
from unit.router.rig import http_answer as answer
from unit.router.scripted_engines import DIES, IDS, OK, PAIR, WRONG
from waiting import until

from mmrouter_router.dispatch.engine_client import EngineClient
from mmrouter_router.dispatch.forwarder import Forwarder
from mmrouter_router.dispatch.stages import Stages
from mmrouter_router.scheduling.disaggregation import OffloadPolicy
from mmrouter_router.scheduling.offload_comparison import Waiting, WayComparison

BUSY = answer(503, b"busy")
DRAINING = answer(500, b'{"error":{"message":"cannot schedule new futures after shutdown"}}')
BROKEN = answer(500, b'{"error":"boom"')
HEADERS_ONLY = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture
async def rig(make_rig):
    """A deployment with one pool of vLLM."""
    return make_rig(roles=("worker",), engine={"type": "vllm", "blockSize": BLOCK})


@pytest.mark.parametrize(
    ("says", "cause"),
    [
        (None, "connect"),
        (BUSY, "busy"),
        (DRAINING, "draining"),
        (DIES, "engine_lost"),
        (DIES + DRAINING[:-20], "engine_lost"),
        (DIES + HEADERS_ONLY, "engine_lost"),
    ],
)
async def test_another_worker_is_tried_before_the_first_byte(rig, says, cause):
    await rig.serve(w1=says, w2=OK)
    reply = await rig.send()
    assert (reply.answer.status, reply.first) == (200, b"ok")
    assert outcomes(reply) == [("w1", cause), ("w2", "answered 200")]
    assert value(rig.metrics.retries.labels(cause)) == 1
    reply.close()
    await rig.nothing_is_booked()


async def test_a_router_without_free_descriptors_says_so_and_accuses_no_engine(rig):
    await rig.serve(w1=OK, w2=OK)
    with no_free_descriptors():
        error = await refused(rig.send())
    assert (error.status, error.code, error.headers["Retry-After"]) == (503, "router_exhausted", "1")
    await rig.nothing_is_booked()
    reply = await rig.send()
    assert reply.first == b"ok"
    reply.close()


@pytest.mark.parametrize(("says", "cause"), [(None, "connect"), (BUSY, "busy")])
async def test_each_attempt_has_a_span_with_its_error(rig, says, cause):
    await rig.serve(w1=says, w2=OK)

    async def send() -> None:
        (await rig.send()).close()

    spans = await spans_of(send)
    engine_spans = [span for span in spans if span.name == "engine"]
    assert [span.attributes["mmrouter.worker"] for span in engine_spans] == ["w1", "w2"]
    assert [span.attributes.get("error.type") for span in engine_spans] == [cause, None]
    assert [span.attributes["mmrouter.attempt"] for span in engine_spans] == [1, 2]
    assert [event.name for event in engine_spans[1].events] == ["first byte"]
    assert sum(span.name == "schedule" for span in spans) == 2


async def test_engine_500_is_not_retried(rig):
    _, second = await rig.serve(w1=BROKEN, w2=OK)
    reply = await rig.send()
    assert (reply.answer.status, second.asked) == (500, [])
    reply.close()


async def test_request_is_quarantined_after_two_deaths(rig):
    engines = await rig.serve(w1=DIES, w2=DIES, w3=DIES)
    for _ in range(2):
        assert (await refused(rig.send())).code == "request_quarantined"
        assert sum(len(engine.asked) for engine in engines) == 2
    assert list(rig.forwarder.quarantine) == [b"f"]


async def test_quarantine_does_not_affect_other_requests(rig):
    await rig.serve(w1=DIES, w2=OK)
    for name in (b"one", b"two"):
        (await rig.send(named=fingerprint(name))).close()
    assert b"one" not in rig.forwarder.quarantine


async def test_a_request_is_hashed_only_while_requests_are_in_quarantine(rig):
    hashed = []

    async def named() -> bytes:
        hashed.append(1)
        return b"other"

    await rig.serve(w1=OK)
    (await rig.send(named=named)).close()
    assert hashed == []
    rig.forwarder.quarantine.append(b"f")
    (await rig.send(named=named)).close()
    assert hashed == [1]


async def test_no_worker_left_is_503_with_retry_after(rig):
    await rig.serve(w1=None)
    error = await refused(rig.send())
    assert (error.status, error.headers["Retry-After"]) == (503, "1")


async def test_cancelled_request_releases_its_booking(rig):
    engine = await rig.engine("w1", b"")
    task = asyncio.create_task(rig.send())
    await until(lambda: engine.asked)
    assert rig.fleet.workers["w1"].usage[0].requests == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await rig.nothing_is_booked()


class Watched(WayComparison):
    """Keeps the requests that wait, and the tokens of those that ended."""

    def __init__(self) -> None:
        super().__init__(1.0, lambda: 0.0)
        self.waiting: list[Waiting] = []
        self.ended: list[int] = []

    def begin(self, engine: str, *, elsewhere: bool) -> Waiting:
        self.waiting.append(super().begin(engine, elsewhere=elsewhere))
        return self.waiting[-1]

    def end(self, request: Waiting, tokens: int) -> None:
        super().end(request, tokens)
        self.waiting.remove(request)
        self.ended.append(tokens)


@pytest.mark.parametrize(("says", "tokens"), [(OK, len(IDS)), (BUSY, 0), (DIES, 0), (BROKEN, 0), (WRONG, 0), (b"", 0)])
async def test_a_prompt_of_a_prefill_engine_counts_once_and_as_work_only_when_it_was_answered(make_rig, says, tokens):
    """The engine that says nothing is left by the client."""

    async def prefill(target, request_id, path, body, headers):
        return 200, json.dumps({"kv_transfer_params": {"do_remote_prefill": True}}).encode()

    rig = make_rig(roles=PAIR, engine={"type": "vllm", "blockSize": BLOCK})
    rig.stages = Stages("vllm", PAIR, rig.fleet, rig.placer, rig.metrics, prefill, offload=OffloadPolicy(len(IDS)))
    rig.forwarder = Forwarder(rig.placer, EngineClient(rig.upstream, "vllm", "secret"), rig.metrics, rig.stages)
    watched = rig.stages.offload.comparison = Watched()
    await rig.serve(p1=OK)
    decode = await rig.engine("d1", says, proved=True)
    task = asyncio.create_task(rig.send())
    if not says:
        await until(lambda: decode.asked)
        assert len(watched.waiting) == 1
        await cancelled(task)
    else:
        (await task).close()
    assert (watched.waiting, watched.ended) == ([], [tokens])
