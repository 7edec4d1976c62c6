"""Streams that lose their engine, against engines on loopback addresses."""

import asyncio
import dataclasses
import json

import pytest
from unit.router.rig import BLOCK, IDS, SEED, counts, fingerprint, outcomes, spans_of
from unit.router.scripted_engines import DIES, HANGS
from unit.router.streams.test_answer import DONE, Engine, received
from waiting import until

from mmrouter_lib.engines.base.answer_takeover import AnswerTraits
from mmrouter_lib.engines.vllm.answer_takeover import CONTINUATION as VLLM_CONTINUATION
from mmrouter_router.core.worker_threads import WorkerThreads
from mmrouter_router.dispatch.continued_stream import Continuations
from mmrouter_router.dispatch.forwarder import AttemptHistory
from mmrouter_router.dispatch.stages import ForwardCall
from mmrouter_router.dispatch.stall_watch import SILENT_SECONDS, StallWatch
from mmrouter_router.request.prepared import CHAT, Outgoing, Prepared

TOKENS = [{"content": text} for text in ("The ", "tide ", "turns ", "at ", "noon.")]
FIRST, SECOND = Engine("a").stream([TOKENS]), Engine("b", (2, 1)).stream([TOKENS])
PART = FIRST[: FIRST.index(b"at ")]  # in the middle of an event
WHOLE = PART[: PART.rindex(b"\n\n") + 2]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
COMPLETIONS = "/v1/completions"
GREEDY = {"model": "m", "temperature": 0, "stream": True}
SAMPLED = {"model": "m", "stream": True}
SEEDED, UNSEEDED, ALIKE = AnswerTraits("seeded"), AnswerTraits(), AnswerTraits("all")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def breaks(events: bytes) -> bytes:
    """The answer of an engine that ends after these events."""
    return DIES + HEAD + chunk(events)


def ends(events: bytes) -> bytes:
    return HEAD + chunk(events) + b"0\r\n\r\n"


class Collected(list):
    full = False
    write = list.append

    def when_writable(self, callback) -> None:
        pass


class Streams:
    """One router's streams to the engines of a rig."""

    def __init__(self, rig, *, enabled: bool = True, seeds: bool = True, by_tokens=None, traits=SEEDED) -> None:
        self.rig, self.moved = rig, []
        self.past = AttemptHistory()
        self.continuations = Continuations(
            rig.forwarder,
            rig.metrics,
            WorkerThreads(),
            enabled=enabled,
            seeds=seeds,
            traits=traits,
            by_tokens=by_tokens,
        )
        self.stream = None

    async def read(self, fields=GREEDY, path: str = CHAT, *, pours: bool = True) -> bytes:
        """Return what a client gets."""
        way, added = self.continuations.plan(path, fields)
        prepared = Prepared(None, None, (), IDS, (), "exact", (), SEED, 1)
        call = ForwardCall("r-1", prepared, Outgoing(path, {**fields, **added}, way=way), {}, fingerprint())
        async with asyncio.timeout(60):
            reply = await self.rig.forwarder.send(call, self.past)
            moved = lambda request_id, trace: self.moved.append(trace)  # noqa: E731
            self.stream = stream = self.continuations.open(call, self.past, reply, moved)
            out = Collected([stream.first])
            try:
                if pours:
                    await stream.pour(out)
                while not pours and (piece := await stream.piece()):
                    out.write(piece)
            finally:
                stream.close()
        await self.rig.nothing_is_booked()
        return b"".join(out)

    @property
    def counted(self) -> dict:
        return counts(self.rig.metrics.stream_breaks, "cause", "outcome")


@pytest.fixture
async def rig(make_rig):
    return make_rig(roles=("worker",), engine={"type": "vllm", "blockSize": BLOCK})


def assert_ends_with(out: bytes, refusal: str, before: bytes) -> None:
    """The client has the whole events before the break, an error event that names the cause, and the last event."""
    *events, error, done = out.split(b"\n\n")[:-1]
    assert (b"\n\n".join([*events, b""]), done + b"\n\n") == (before, DONE)
    failure = json.loads(error.removeprefix(b"data: "))["error"]
    assert (failure["type"], failure["code"], failure["param"]) == ("server_error", f"stream_{refusal}", None)


@pytest.mark.parametrize("pours", [True, False])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_another_engine_continues_a_stream_that_broke(rig, path, pours):
    chat = path == CHAT
    first, second = (Engine(name, chat=chat).stream([TOKENS]) for name in "ab")
    await rig.serve(w1=breaks(first[: first.index(b"at ")]), w2=ends(second))
    streams = Streams(rig)
    out = await streams.read(path=path, pours=pours)
    assert received(out) == received(first)
    assert streams.counted == {("engine_lost", "continued"): 1}
    assert outcomes(streams.stream.reply) == [("w1", "answered 200"), ("w1", "stream broke"), ("w2", "answered 200")]
    assert streams.moved == [streams.stream.reply.trace]
    assert streams.continuations.kept.used == 0


@pytest.mark.parametrize(
    ("says", "cause"),
    [
        (ends(WHOLE + b'data: {"error": {"message": "EngineCore died", "code": 500}}\n\n' + DONE), "engine_failed"),
        (ends(WHOLE), "ended_early"),
    ],
)
async def test_an_engine_that_ends_its_stream_itself_is_replaced(rig, says, cause):
    await rig.serve(w1=says, w2=ends(SECOND))
    streams = Streams(rig)
    assert received(await streams.read()) == received(FIRST)
    assert streams.counted == {(cause, "continued"): 1}


@pytest.mark.parametrize(
    ("fields", "traits"),
    [
        ({"seed": 7}, SEEDED),
        ({}, ALIKE),
        ({"top_k": 1, "temperature": 1}, UNSEEDED),
        ({"temperature": 0.0, "n": 2}, UNSEEDED),
    ],
)
async def test_answers_that_are_the_same_everywhere_are_continued(rig, fields, traits):
    await rig.serve(w1=breaks(PART), w2=ends(SECOND))
    streams = Streams(rig, by_tokens=VLLM_CONTINUATION, traits=traits)
    assert received(await streams.read(SAMPLED | fields)) == received(FIRST)
    assert streams.stream.reply.trace.stream == "repeated"


NOT_BY_IDS = [
    *({"tools": [{"type": "function"}]}, {"response_format": {"type": "json_object"}}, {"presence_penalty": 1}),
    *({"stop": "x"}, {"n": 2}, {"bad_words": ["x"]}, {"include_reasoning": False}, {"a_later_field": 1}, {"seed": -1}),
]


@pytest.mark.parametrize("fields", NOT_BY_IDS, ids=str)
async def test_a_seed_makes_a_sampled_answer_the_same_everywhere(rig, fields):
    engines = await rig.serve(w1=breaks(PART), w2=ends(SECOND))
    streams = Streams(rig, by_tokens=VLLM_CONTINUATION, traits=AnswerTraits("seeded", reasoning="seed" in fields))
    assert received(await streams.read(SAMPLED | fields)) == received(FIRST)
    (first, second) = (body for engine in engines for _, _, body in engine.requests)
    assert (first, second) == (SAMPLED | fields | {"seed": first["seed"]}, first)
    assert (first["seed"] >= 0, streams.stream.reply.trace.stream) == (True, "seeded")


def test_no_two_streams_have_the_same_seed(rig):
    continuations = Streams(rig, by_tokens=VLLM_CONTINUATION).continuations
    seeds = [continuations.plan(CHAT, SAMPLED | {"n": 2})[1]["seed"] for _ in range(100)]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize(
    ("fields", "by_tokens", "traits", "refusal"),
    [
        ({}, None, UNSEEDED, "engine"),
        ({"temperature": 0.7}, None, UNSEEDED, "engine"),
        ({"seed": True}, None, SEEDED, "engine"),
        ({"seed": 7}, None, UNSEEDED, "engine"),
        ({"stop": "x"}, VLLM_CONTINUATION, UNSEEDED, "stop"),
        ({"presence_penalty": 1}, VLLM_CONTINUATION, UNSEEDED, "penalties"),
        ({"prompt": ["x", "x"]}, VLLM_CONTINUATION, SEEDED, "prompts"),
        (GREEDY, None, None, "off"),
    ],
)
async def test_other_answers_end_with_an_error_that_names_the_cause(rig, fields, by_tokens, traits, refusal):
    _, second = await rig.serve(w1=breaks(PART), w2=ends(SECOND))
    streams = Streams(rig, enabled=traits is not None, by_tokens=by_tokens, traits=traits or SEEDED)
    assert_ends_with(await streams.read(SAMPLED | fields), refusal, WHOLE)
    assert streams.stream.reply.trace.stream == refusal
    assert (streams.stream.failed, second.asked) == (True, [])
    assert streams.counted == {("engine_lost", refusal): 1}


async def test_no_seed_is_added_where_the_resource_does_not_ask_for_it(rig):
    first, _ = await rig.serve(w1=breaks(PART), w2=ends(SECOND))
    streams = Streams(rig, seeds=False, by_tokens=VLLM_CONTINUATION)
    assert_ends_with(await streams.read(SAMPLED | {"stop": "x"}), "stop", WHOLE)
    assert [body for _, _, body in first.requests] == [SAMPLED | {"stop": "x"}]


async def test_another_answer_ends_the_stream(rig):
    other = Engine("b").stream([[{"content": "The "}, {"content": "rain "}]])
    await rig.serve(w1=breaks(PART), w2=ends(other))
    streams = Streams(rig)
    assert_ends_with(await streams.read(), "diverged", WHOLE)
    assert streams.counted == {("engine_lost", "diverged"): 1}


async def test_a_stream_of_responses_ends_with_its_own_kind_of_event(rig):
    event = b'event: response.output_text.delta\ndata: {"delta": "x"}\n\n'
    await rig.serve(w1=breaks(event))
    out = await Streams(rig).read(path="/v1/responses")
    kind, data = out.removeprefix(event).strip().split(b"\n")
    assert (kind, json.loads(data.removeprefix(b"data: "))["code"]) == (b"event: error", "stream_route")


async def test_a_complete_stream_of_responses_needs_no_last_event(rig):
    event = b'event: response.completed\ndata: {"response": {}}\n\n'
    await rig.serve(w1=ends(event))
    assert await Streams(rig).read(path="/v1/responses") == event


async def test_a_request_under_which_two_engines_end_is_quarantined(rig):
    engines = await rig.serve(w1=breaks(PART), w2=breaks(PART), w3=breaks(PART))
    streams = Streams(rig)
    assert_ends_with(await streams.read(), "request_quarantined", WHOLE)
    assert (sum(len(engine.asked) for engine in engines), list(rig.forwarder.quarantine)) == (2, [b"f"])
    assert sum(streams.counted.values()) == 2
    assert streams.counted["engine_lost", "request_quarantined"] == 1


async def test_the_end_of_a_draining_engine_does_not_count_for_quarantine(rig):
    streams, reading, _ = await stalled(rig, HEAD + chunk(PART))
    worker = streams.past.answers
    worker.member = dataclasses.replace(worker.member, draining=True)
    for address in rig.upstream.active():
        rig.upstream.end_silent(address, 0)
    assert received(await reading) == received(FIRST)
    assert streams.past.deaths == 0


async def test_a_stream_is_continued_at_most_twice(rig):
    fails = ends(WHOLE + b'data: {"error": {"message": "out of memory", "code": 500}}\n\n' + DONE)
    await rig.serve(**dict.fromkeys(("w1", "w2", "w3", "w4"), fails))
    streams = Streams(rig)
    assert_ends_with(await streams.read(), "limit", WHOLE)
    assert streams.counted == {("engine_failed", "interrupted"): 2, ("engine_failed", "limit"): 1}


async def test_a_stream_without_another_engine_ends_with_an_error_that_names_it(rig):
    await rig.serve(w1=breaks(PART))
    assert_ends_with(await Streams(rig).read(), "no_worker", WHOLE)


async def test_a_continuation_has_a_span(rig):
    await rig.serve(w1=breaks(PART), w2=ends(SECOND))
    spans = await spans_of(Streams(rig).read)
    (span,) = (each for each in spans if each.name == "continue")
    assert (span.attributes["mmrouter.cause"], span.attributes["mmrouter.continuation"]) == ("engine_lost", 1)
    engines = [each for each in spans if each.name == "engine"]
    assert [each.attributes.get("error.type") for each in engines] == ["engine_lost", None]


async def stalled(rig, says: bytes):
    """Pause a stream, with a stall watch that has counted enough silence."""
    await rig.serve(w1=says, w2=ends(SECOND))
    streams = Streams(rig)
    reading = asyncio.create_task(streams.read())
    await until(lambda: streams.stream is not None)
    return streams, reading, StallWatch(rig.fleet, rig.upstream, "/health")


async def test_a_stream_of_an_engine_that_is_gone_and_silent_is_continued(rig):
    streams, reading, watch = await stalled(rig, HEAD + chunk(PART))
    gone = next(worker for worker in rig.fleet if worker.member.name == "w1")
    rig.engines["w1"].server.close()  # a health check is refused
    gone.heartbeat_at = -100.0
    for _ in range(SILENT_SECONDS):
        assert not reading.done()
        await watch.check()
    assert received(await reading) == received(FIRST)
    assert streams.counted == {("stalled", "continued"): 1}


async def test_a_silent_stream_of_a_healthy_engine_is_left_alone(rig):
    streams, reading, watch = await stalled(rig, HEAD + chunk(PART))
    for _ in range(3 * SILENT_SECONDS):
        await watch.check()
    assert (reading.done(), streams.counted) == (False, {})
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


async def test_a_request_that_waits_at_an_engine_that_is_gone_goes_to_another_one(rig):
    await rig.serve(w1=HANGS, w2=ends(SECOND))
    watch = StallWatch(rig.fleet, rig.upstream, "/health")
    streams = Streams(rig)
    reading = asyncio.create_task(streams.read())
    await until(lambda: rig.engines["w1"].asked)
    rig.engines["w1"].server.close()
    next(worker for worker in rig.fleet if worker.member.name == "w1").heartbeat_at = -100.0
    for _ in range(SILENT_SECONDS):
        await watch.check()
    assert received(await reading) == received(SECOND)


async def test_a_small_answer_that_breaks_off_is_requested_again(rig):
    half = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 15\r\n\r\n"
    await rig.serve(w1=DIES + half + b'{"choic', w2=half + b'{"choices": []}')
    reply = await rig.send()
    assert reply.first == b'{"choices": []}'
    reply.close()
