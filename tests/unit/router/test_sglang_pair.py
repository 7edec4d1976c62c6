"""Requests served by a prefill and a decode engine of SGLang, against engines on loopback addresses."""

import asyncio

import pytest
from unit.router.rig import cancelled, outcomes, refused, spans_of, value
from unit.router.rig import http_answer as answer
from unit.router.scripted_engines import DIES, HANGS, IDS, KEYS, MEETS, NAMED, OK, ROOM, SEED, SOON, STREAMED, WRONG
from waiting import until

from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_router.dispatch.stages import ForwardCall
from mmrouter_router.request.prepared import Outgoing, Prepared


@pytest.fixture
async def rig(make_rig):
    return make_rig()


def stages(reply):
    return [(note["stage"], note["outcome"], *note["workers"]) for note in reply.trace.stages]


async def test_both_engines_get_the_chat_and_the_decoder_answers(rig):
    prefill, decode = await rig.serve(p1=answer(200, b"one token"), d1=answer(200, b"many tokens"))
    reply = await rig.send({"messages": ["x"], "stream": True})
    assert (reply.first, reply.trace.form, reply.trace.answers) == (b"many tokens", "prefill-decode", "d1")
    reply.close()
    ((at, one, body), (also_at, other, also)) = (*prefill.asked, *decode.asked)
    assert (at, body) == (also_at, also) == ("/v1/chat/completions", {"messages": ["x"], "stream": True})
    both = {"x-override-bootstrap-host": prefill.ip, "x-override-bootstrap-port": "8998", "x-override-rid": "r-1"}
    for headers in (one, other):
        assert headers.items() >= both.items()
        assert headers["authorization"] == "Bearer secret"
    assert 0 <= int(one[ROOM]) == int(other[ROOM]) < 1 << 63
    await rig.nothing_is_booked()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_a_request_whose_endpoint_reads_no_headers_says_in_its_body_where_the_engines_meet(make_rig, path):
    rig = make_rig()
    prefill, decode = await rig.engine("p1", ranks=2), await rig.engine("d1", ranks=2)
    (await rig.send({"prompt": "x"}, path)).close()
    ((at, one, body), (also_at, other, also)) = (*prefill.asked, *decode.asked)
    assert at == also_at == path
    assert ROOM not in one | other
    meeting = {"prompt": "x", "bootstrap_host": prefill.ip, "bootstrap_port": 8998}
    room, prefills, answers = body["bootstrap_room"], body["routed_dp_rank"], also["routed_dp_rank"]
    assert body == meeting | {"bootstrap_room": room, "routed_dp_rank": prefills}
    assert also == body | {"routed_dp_rank": answers, "disagg_prefill_dp_rank": prefills}
    assert (0 <= room < 1 << 63, room % 2) == (True, prefills)


async def test_reply_has_the_prefill_decision_and_stage_times(make_rig):
    rig = make_rig(policy="kv")
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


async def test_each_request_has_its_own_bootstrap_room_and_equal_engines_take_turns(rig):
    engines = await rig.serve(p1=OK, p2=OK, d1=OK, d2=OK)
    for _ in range(40):
        (await rig.send()).close()
    assert [len(engine.asked) for engine in engines] == [20] * 4
    rooms = [headers[ROOM] for engine in engines for _, headers, _ in engine.asked]
    assert len(set(rooms)) == 40
    assert sorted(rooms[:40]) == sorted(rooms[40:])


async def test_ranks_are_sent_to_both_engines(make_rig):
    rig = make_rig(policy="kv")
    prefill, decode = await rig.engine("p1", ranks=2), await rig.engine("d1", ranks=2)
    # The first rank of both is busy.
    for worker in rig.fleet:
        rig.fleet.usage(worker, 0).queue(100.0)
    (await rig.send()).close()
    ((_, one, _), (_, other, _)) = (*prefill.asked, *decode.asked)
    assert int(one[ROOM]) % 2 == 1
    assert one["x-override-routed-dp-rank"] == other["x-override-routed-dp-rank"] == "1"
    assert other["x-override-disagg-prefill-dp-rank"] == "1"


FAILURES = [(None, "connect"), (DIES, "engine_lost"), (answer(503), "busy")]
PREFILL_FAILURES = [*((says, "prefill") for says in (answer(500), answer(429), STREAMED)), (HANGS, "timeout")]


@pytest.mark.parametrize(("says", "cause"), [*FAILURES, *PREFILL_FAILURES])
async def test_failed_prefill_aborts_the_decoder_and_retries(make_rig, says, cause):
    rig = make_rig(prefill_seconds=SOON if says == HANGS else 60)
    failed, _, decode = await rig.serve(p1=says, p2=OK, d1=MEETS)
    reply = await rig.send()
    assert (reply.answer.status, reply.first) == (200, b"ok")
    assert outcomes(reply) == [("p1", cause), ("d1", "answered 200")]
    assert stages(reply) == [("prefill", cause, "p1"), ("prefill", "done", "p2"), ("answer", "first_byte", "d1")]
    assert value(rig.metrics.retries.labels(cause)) == 1
    reply.close()
    await until(lambda: decode.left == len(decode.asked) - 1 and failed.left == (says == HANGS))
    await rig.nothing_is_booked()


async def test_decoder_hung_in_two_pairs_is_excluded(make_rig):
    rig = make_rig(prefill_seconds=SOON)
    *prefills, d1, d2 = await rig.serve(**dict.fromkeys(("p1", "p2", "p3", "d1", "d2"), HANGS))
    assert (await refused(rig.send())).status == 503
    assert [len(engine.asked) for engine in prefills] == [1, 1, 1]
    assert max(len(d1.asked), len(d2.asked)) == 2
    await rig.nothing_is_booked()


async def test_started_answer_is_never_timed_out(make_rig):
    rig = make_rig(prefill_seconds=SOON)
    prefill, other, _ = await rig.serve(p1=HANGS, p2=OK, d1=OK)
    reply = await rig.send()
    assert (reply.answer.status, reply.first) == (200, b"ok")
    await asyncio.sleep(SOON + 0.1)  # longer than a prefill may take; nothing is there to wait for
    assert (len(prefill.asked), prefill.left, other.asked) == (1, 0, [])
    assert outcomes(reply) == [("d1", "answered 200")]
    reply.close()


async def test_client_error_of_the_prefill_is_returned_without_retry(rig):
    _, other, decode = await rig.serve(p1=WRONG, p2=OK, d1=HANGS)
    reply = await rig.send()
    assert reply.answer.status == 400
    assert b"The prompt is empty." in reply.first
    assert await reply.answer.piece() == b""
    reply.close()
    assert other.asked == []
    if decode.asked:
        await decode.aborted()
    await rig.nothing_is_booked()


@pytest.mark.parametrize(("says", "cause"), [*FAILURES, (answer(500), "transfer"), (STREAMED, "transfer")])
async def test_failed_decoder_aborts_the_prefill_and_retries(rig, says, cause):
    prefill, *_ = await rig.serve(p1=MEETS, d1=says, d2=OK)
    reply = await rig.send()
    assert reply.answer.status == 200
    assert outcomes(reply)[0] == ("d1", cause)
    assert says is not None or outcomes(reply)[1:] == [("d2", "answered 200")]
    reply.close()
    assert prefill.left == len(prefill.asked) - 1
    await rig.nothing_is_booked()


async def test_client_error_of_the_decoder_is_returned_and_aborts_the_prefill(rig):
    prefill, _ = await rig.serve(p1=HANGS, d1=WRONG)
    reply = await rig.send()
    assert (reply.answer.status, outcomes(reply)) == (400, [("d1", "answered 400")])
    reply.close()
    if prefill.asked:
        await prefill.aborted()
    await rig.nothing_is_booked()


async def test_disconnected_client_aborts_both(rig):
    prefill, decode = await rig.serve(p1=HANGS, d1=HANGS)
    work = asyncio.create_task(rig.send())
    await until(lambda: prefill.asked and decode.asked)
    # The prompt weighs on the engine that computes it, the answer on the other one.
    computing, answering = (rig.fleet.workers[name].usage[0] for name in ("p1", "d1"))
    assert computing.prefill > 0
    assert (answering.prefill, answering.requests) == (0, 1)
    await cancelled(work)
    await until(lambda: prefill.left and decode.left)
    await rig.nothing_is_booked()


async def test_client_disconnecting_while_its_body_is_written_leaves_nothing_booked(rig):
    await rig.serve(p1=HANGS, d1=HANGS)
    writing = asyncio.Event()

    async def slowly(work, *arguments):
        writing.set()
        await asyncio.Event().wait()

    prepared = Prepared(None, None, (), IDS, (), "exact", (), SEED, 1)
    call = ForwardCall("r-1", prepared, Outgoing("/v1/chat/completions", {}, run=slowly), {}, NAMED)
    work = asyncio.create_task(rig.forwarder.send(call))
    await writing.wait()
    await cancelled(work)
    await rig.nothing_is_booked()


async def test_client_disconnecting_mid_answer_aborts_both(rig):
    prefill, _ = await rig.serve(p1=HANGS, d1=b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n")
    reply = await rig.send()
    assert reply.first == b"first"
    await until(lambda: prefill.asked)
    reply.close()
    await prefill.aborted()
    await rig.nothing_is_booked()


async def test_prefill_answer_is_drained_after_the_clients(rig):
    prefill, _ = await rig.serve(p1=answer(200, b"x" * 3_000_000), d1=OK)
    for _ in range(3):
        reply = await rig.send()
        reply.close()
        await rig.nothing_is_booked()
    assert len(prefill.asked) == 3
    assert prefill.left == 0
    assert rig.upstream.idle_connections(prefill.ip, HTTP_PORT) == 1  # one connection, given back each time


async def test_pair_request_is_quarantined_after_two_deaths(rig):
    *prefills, _ = await rig.serve(p1=DIES, p2=DIES, d1=HANGS)
    for _ in range(2):
        assert (await refused(rig.send())).status == 400
    assert [len(prefill.asked) for prefill in prefills] == [1, 1]
    assert value(rig.metrics.quarantined) == 2
    await rig.nothing_is_booked()


async def test_pair_requires_equal_layouts(rig):
    old, new = await rig.engine("p1", compatibility="old"), await rig.engine("p2", compatibility="new")
    await rig.engine("d0", compatibility="alone")
    await rig.engine("d1", compatibility="new")
    for _ in range(4):
        (await rig.send()).close()
    assert (len(old.asked), len(new.asked)) == (0, 4)
    assert rig.engines["d0"].asked == []


@pytest.mark.parametrize("layouts", [{"p1": "old"}, {"d1": "old"}, {"p1": "old", "d1": "new"}])
async def test_without_a_compatible_pair_no_engine_receives_a_request(rig, layouts):
    engines = [await rig.engine(name, compatibility=layout) for name, layout in layouts.items()]
    assert rig.stages.form().degraded == ("no_pair",)
    assert (await refused(rig.send())).status == 503
    assert not any(engine.asked for engine in engines)
    assert value(rig.metrics.degraded.labels("no_pair")) == 1
    await rig.engine("d2" if "p1" in layouts else "p2", compatibility="old")
    assert rig.stages.form().degraded == ()
    (await rig.send()).close()
    assert value(rig.metrics.degraded.labels("no_pair")) == 1


async def test_each_half_has_a_span_with_its_error(rig):
    await rig.serve(p1=answer(500), p2=OK, d1=MEETS)

    async def send() -> None:
        (await rig.send()).close()
        await rig.nothing_is_booked()

    spans = await spans_of(send)
    expected = {"prefill": [("p1", "answered_500"), ("p2", None)], "engine": [("d1", "prefill"), ("d1", None)]}
    for name, outcomes_of in expected.items():
        found = [span for span in spans if span.name == name]
        assert [(s.attributes["mmrouter.worker"], s.attributes.get("error.type")) for s in found] == outcomes_of


async def test_unverified_decoder_is_unused_under_refuse(make_rig):
    rig = make_rig(verification={"onFailure": "Refuse", "timeoutSeconds": 1})
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
