"""The endpoint picker protocol 1.0.0, against any picker (``MMROUTER_EPP``), and what ours adds to it."""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from gateway.epp import driver
from gateway.epp.driver import DESTINATION, LIMIT, Talk, out_of_order
from unit.router.rig import loopback, value
from waiting import until

from mmrouter_router.http.server import Shutdown
from mmrouter_router.intake import PARSERS
from mmrouter_router.picker.engine_choice import MAX_COLD_ANSWER, EngineChoice
from mmrouter_router.picker.server import PICKER_PORT, Picker

SERVING, NOT_SERVING = 1, 2


async def forwarded(epp, *messages) -> Talk:
    """A stream on which the picker has answered a whole request."""
    talk = epp.driver.talk()
    await talk.send(*(messages or (driver.headers(), *driver.body(epp.chat()))))
    await talk.until_body_ends("request_body")
    return talk


async def test_destination_is_in_header_and_metadata_and_is_an_endpoint(epp):
    outcome = (await forwarded(epp)).outcome
    metadata = outcome.messages[0].dynamic_metadata.fields["envoy.lb"].struct_value.fields
    assert metadata[DESTINATION].string_value == outcome.destination
    assert set(outcome.destination.split(",")) <= set(epp.endpoints)


async def test_headers_are_answered_when_the_body_is_whole(epp):
    first, *rest = driver.body(epp.chat("x" * 2000), size=500)
    talk = epp.driver.talk()
    await talk.send(driver.headers(), first)
    received = asyncio.ensure_future(talk.receive())
    await epp.driver.health("")  # answered on the same connection, behind what was sent before
    assert not received.done()
    await talk.send(*rest)
    assert (await received).WhichOneof("kind") == "request_headers"


@pytest.mark.parametrize("size", [1, LIMIT - 1, LIMIT, 3 * LIMIT + 7, 1_400_000])
async def test_body_of_any_size_comes_back_in_messages_within_the_limit(epp, size):
    talk = await forwarded(epp, driver.headers(), *driver.body(epp.chat("é" * size)))
    outcome = talk.outcome
    assert json.loads(outcome.body())["messages"][0]["content"] == "é" * size
    assert [piece.end_of_stream for piece in outcome.pieces()][:-1] == [False] * (len(outcome.pieces()) - 1)
    assert out_of_order(outcome) == ""
    if "content-length" in outcome.set_headers():
        assert int(outcome.set_headers()["content-length"]) == len(outcome.body())


@pytest.mark.parametrize("as_list", [True, False])
async def test_subset_hint_is_obeyed(epp, as_list):
    for endpoint in epp.endpoints:
        hint = driver.subset(endpoint, as_list=as_list)
        talk = await forwarded(epp, *driver.hinted(hint, driver.headers(), *driver.body(epp.chat())))
        assert talk.outcome.destination == endpoint
        talk.cancel()


@pytest.mark.parametrize("hint", [driver.subset(), driver.subset("10.255.255.1:8000"), driver.subset(as_list=False)])
async def test_subset_without_an_engine_is_answered_503(epp, hint):
    outcome = await epp.driver.ask(driver.hinted(hint, driver.headers(), *driver.body(epp.chat())))
    assert outcome.immediate.status.code == 503


async def test_selection_header_of_conformance_tests_is_obeyed(epp):
    for endpoint in epp.endpoints:
        talk = await forwarded(epp, driver.headers(test_epp_endpoint_selection=endpoint), *driver.body(epp.chat()))
        assert talk.outcome.destination == endpoint
        talk.cancel()


async def test_answer_passes_as_it_arrives(epp):
    talk = await forwarded(epp)
    await talk.send(driver.answer_headers(x_engine="7"), *driver.body(b"one", kind="response_body", end=False))
    await talk.receive(2)
    assert talk.outcome.body("response_body") == b"one"  # the end has not been sent yet
    await talk.send(*driver.body(b"two", kind="response_body"))
    await talk.until_body_ends("response_body")
    outcome = await talk.finish()
    assert outcome.body("response_body") == b"onetwo"
    assert (outcome.code, out_of_order(outcome)) == (grpc.StatusCode.OK, "")


async def test_trailers_of_both_directions_are_answered(epp):
    talk = epp.driver.talk()
    await talk.send(driver.headers(), *driver.body(epp.chat(), end=False), driver.trailers("request_trailers"))
    while talk.outcome.kinds[-1:] != ["request_trailers"]:
        await talk.receive()
    assert not any(piece.end_of_stream for piece in talk.outcome.pieces())
    await talk.send(driver.answer_headers(), *driver.body(b"{}", kind="response_body", end=False))
    await talk.send(driver.trailers("response_trailers"))
    outcome = await talk.finish()
    assert (outcome.kinds[-1], outcome.code) == ("response_trailers", grpc.StatusCode.OK)


@pytest.mark.parametrize(
    "messages",
    [
        driver.body(b"{}"),
        [driver.answer_headers()],
        [driver.trailers("request_trailers")],
        [driver.headers(), driver.headers()],
        [driver.headers(), driver.answer_headers()],
        [driver.headers(), *driver.body(b"{}", kind="response_body")],
    ],
    ids=["body first", "answer first", "trailers first", "headers twice", "answer before the end", "answer's body"],
)
async def test_message_out_of_place_ends_the_stream_with_invalid_argument(epp, messages):
    outcome = await epp.driver.ask(messages)
    assert (outcome.kinds, outcome.code) == ([], grpc.StatusCode.INVALID_ARGUMENT)
    await forwarded(epp)


async def test_stream_without_messages_is_no_error(epp):
    assert (await epp.driver.ask([])).code == grpc.StatusCode.OK


@pytest.mark.parametrize("service", ["", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"])
async def test_health_services_are_known(epp, service):
    assert await epp.driver.health(service) == SERVING


async def test_unknown_health_service_is_not_found(epp):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await epp.driver.health("other")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


# -- what ours adds


@contextlib.asynccontextmanager
async def asking(choice: EngineChoice) -> AsyncIterator[driver.Driver]:
    """A gateway's connection to a picker with another choice."""
    shutdown, ip = Shutdown(), loopback()
    serving = asyncio.create_task(Picker(choice, shutdown, lambda: True, host=ip).serve(30.0))
    made = driver.Driver(f"{ip}:{PICKER_PORT}")
    try:
        yield made
    finally:
        await made.close()
        shutdown.stop("the test has ended")
        await serving


async def test_selection_header_of_conformance_tests_is_ignored_without_the_flag(epp):
    choice = EngineChoice(epp.router.client_app(), PARSERS.keys(), epp.router.chat.answer)
    async with asking(choice) as other:
        talk = other.talk()
        await talk.send(driver.headers(test_epp_endpoint_selection="10.255.255.1:8000"), *driver.body(epp.chat()))
        await talk.until_body_ends("request_body")
        assert talk.outcome.destination in epp.endpoints
        talk.cancel()
        await epp.settled()


async def test_rank_of_an_engine_with_several_is_named_in_the_headers(epp):
    named, epp.ranks = set(), 2
    await until(lambda: {worker.ranks for worker in epp.router.fleet} == {2})
    for number in range(2 * len(epp.endpoints)):
        # All are under way at once, so that each rank of each engine has one.
        talk = await forwarded(epp, driver.headers(), *driver.body(epp.chat(f"request {number} " * 50)))
        named.add((talk.outcome.destination, talk.outcome.set_headers()["x-data-parallel-rank"]))
    assert named == {(endpoint, rank) for endpoint in epp.endpoints for rank in ("0", "1")}


async def test_readiness_ends_with_draining_and_liveness_does_not(epp):
    epp.router.shutdown.drain("a test")
    assert [await epp.driver.health(name) for name in ("readiness", "liveness")] == [NOT_SERVING, SERVING]


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"{", 400, "invalid_json", None),
        (b"", 400, "invalid_json", None),
        (b'{"model": "other", "messages": []}', 404, "model_not_found", "model"),
        (b'{"model": "t"}', 400, "missing_required_parameter", "messages"),
    ],
)
async def test_bad_request_is_answered_as_by_the_frontend(epp, body, status, code, param):
    _ = epp.router
    answered, error = (await epp.driver.ask([driver.headers(), *driver.body(body)])).refusal
    assert (answered, error["code"], error["param"]) == (status, code, param)


async def test_body_over_the_limit_is_answered_413_before_its_end(epp):
    limit = epp.router.chat._limits.max_request_bytes
    talk = epp.driver.talk()
    await talk.send(driver.headers(content_length=str(limit + 1)), *driver.body(b"x" * 10, end=False))
    await talk.receive()
    assert talk.outcome.refusal[0] == 413


async def test_full_queues_are_answered_429_with_retry_after(epp):
    epp.router.placer._max_queued = 0
    outcome = await epp.driver.ask([driver.headers(), *driver.body(epp.chat())])
    assert outcome.refusal[0] == 429
    assert int(outcome.set_headers("immediate_response")["Retry-After".lower()]) > 0


async def test_engine_gets_the_routers_key_and_none_of_the_clients_headers(epp):
    _ = epp.router
    secret = driver.headers(authorization="Bearer of-the-client", cookie="a=b", x_mmrouter_control="t")
    outcome = (await forwarded(epp, secret, *driver.body(epp.chat()))).outcome
    assert outcome.set_headers()["authorization"] == "Bearer k"
    removed = set(outcome.messages[0].request_headers.response.header_mutation.remove_headers)
    assert {"cookie", "x-mmrouter-control"} <= removed


async def test_the_gateway_keeps_the_route_that_it_chose_by_headers_which_are_removed(epp):
    _ = epp.router
    outcome = (await forwarded(epp, driver.headers(x_gateway_model_name="t"), *driver.body(epp.chat()))).outcome
    changed = outcome.messages[0].request_headers.response
    assert "x-gateway-model-name" in changed.header_mutation.remove_headers
    assert not changed.clear_route_cache


async def test_image_gets_its_identity_in_the_body_that_goes_on(epp):
    _ = epp.router
    from mmrouter_cli.sample_images import data_uri, picture

    image = {"type": "image_url", "image_url": {"url": data_uri(picture("a"))}}
    fields = {"messages": [{"role": "user", "content": [image]}]}
    outcome = (await forwarded(epp, driver.headers(), *driver.body(epp.chat(**fields)))).outcome
    sent = json.loads(outcome.body())["messages"][0]["content"][0]
    assert sent["uuid"]
    assert base64.b64decode(sent["image_url"]["url"].partition(",")[2])


async def test_engine_error_is_answered_in_openai_shape_without_addresses(epp):
    _ = epp.router
    talk = await forwarded(epp)
    broken = json.dumps({"message": "10.1.2.3:8000 failed", "code": 400}).encode()
    await talk.send(driver.answer_headers(400), *driver.body(broken, kind="response_body"))
    outcome = await talk.finish()
    answer = outcome.messages[-1].immediate_response
    assert answer.status.code == 400
    assert json.loads(answer.body)["error"]["message"] == "(address) failed"


async def test_other_engine_than_the_chosen_one_is_in_the_decision(epp):
    _ = epp.router
    talk = await forwarded(epp)
    report = {"envoy.lb": {"x-gateway-destination-endpoint-served": "10.9.9.9:8000"}}
    await talk.send(driver.with_metadata(driver.answer_headers(), report))
    await talk.send(*driver.body(b"{}", kind="response_body"))
    outcome = await talk.finish()
    trace = epp.router.decisions.get(outcome.set_headers("response_headers")["x-mmrouter-request-id"])
    assert [attempt["outcome"] for attempt in trace.attempts] == ["answered 200 by 10.9.9.9:8000"]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/t", "/v1/models/%74", "/health", "/nothing"])
async def test_cold_routes_are_answered_by_the_picker(epp, path):
    _ = epp.router
    outcome = await epp.driver.ask([driver.headers(path, "GET", end=True)])
    assert outcome.immediate.status.code == (404 if path == "/nothing" else 200)


async def test_an_answer_beyond_the_bound_of_cold_routes_is_a_500_and_not_gathered(epp):
    piece, sent = bytes(1 << 20), 0

    async def large(scope, receive, send):
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            sent += len(piece)

    async with asking(EngineChoice(large, (), epp.router.chat.answer)) as other:
        outcome = await other.ask([driver.headers("/any", "GET", end=True)])
    assert outcome.immediate.status.code == 500
    assert sent == MAX_COLD_ANSWER


async def test_a_stored_response_is_not_streamed_because_the_gateway_would_buffer_it(epp):
    _ = epp.router
    path = "/v1/responses/resp_1?starting_after=3&stream=true"
    status, error = (await epp.driver.ask([driver.headers(path, "GET", end=True)])).refusal
    assert (status, error["param"], error["code"]) == (400, "stream", "unsupported_parameter")


@pytest.mark.parametrize("phase", ["headers", "body", "forwarded", "answered"])
async def test_gateway_that_ends_the_stream_leaves_nothing_booked(epp, phase):
    _ = epp.router
    talk = epp.driver.talk()
    await talk.send(driver.headers())
    await until(lambda: epp.router.metrics.in_flight == 1)
    if phase != "headers":
        await talk.send(*driver.body(epp.chat(), end=phase != "body"))
    if phase in ("forwarded", "answered"):
        await talk.until_body_ends("request_body")
        assert sum(usage.requests for worker in epp.router.fleet for usage in worker.usage.values()) == 1
    if phase == "answered":
        await talk.send(driver.answer_headers(), *driver.body(b"data", kind="response_body", end=False))
        await talk.receive(2)
    talk.cancel()
    await epp.settled()
    assert value(epp.router.metrics.disconnects) == 1
    await forwarded(epp)


async def test_picker_that_stops_answers_what_is_under_way(epp):
    _ = epp.router
    talk = await forwarded(epp)
    epp.router.shutdown.stop("a test")
    await talk.send(driver.answer_headers(), *driver.body(b"whole", kind="response_body"))
    outcome = await talk.finish()
    assert (outcome.body("response_body"), outcome.code) == (b"whole", grpc.StatusCode.OK)


async def test_mode_other_than_full_duplex_is_refused_with_the_reason(epp):
    _ = epp.router
    message = driver.headers()
    message.protocol_config.response_body_mode = 0
    outcome = await epp.driver.ask([message])
    assert outcome.code == grpc.StatusCode.INVALID_ARGUMENT
