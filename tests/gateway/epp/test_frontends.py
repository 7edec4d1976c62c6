"""The picker of frontends over gRPC: which frontend it chooses, and bodies that pass as they arrive."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
import pytest
from gateway.epp import driver
from gateway.epp.driver import LIMIT, Driver, Talk, out_of_order
from gateway.epp.test_mutations import ENDS, SEED, SEQUENCES, drawn
from unit.router.rig import loopback
from waiting import until

from mmrouter_router.http.server import Shutdown
from mmrouter_router.picker.frontend_choice import FrontendChoice
from mmrouter_router.picker.server import PICKER_PORT, Picker

FRONTENDS = ("127.84.1.2", "127.84.1.3", "127.84.1.4")
ENDPOINTS = tuple(f"{ip}:8000" for ip in FRONTENDS)


@dataclass
class UnderTest:
    """``ready``: the frontends that are Ready."""

    choice: FrontendChoice
    driver: Driver
    ready: list[str] = field(default_factory=list)

    async def begun(self, *messages: driver.Message) -> Talk:
        """A stream on which a frontend has been chosen."""
        talk = self.driver.talk()
        await talk.send(*(messages or (driver.headers(),)))
        await talk.receive()
        return talk


@pytest.fixture
async def picker() -> AsyncIterator[UnderTest]:
    ready, shutdown, ip = list(FRONTENDS), Shutdown(), loopback()
    choice = FrontendChoice(lambda: ready, 8000, test_selection=True)
    task = asyncio.create_task(Picker(choice, shutdown, lambda: True, host=ip).serve(30.0))
    channel = Driver(f"{ip}:{PICKER_PORT}")
    try:
        yield UnderTest(choice, channel, ready)
    finally:
        await channel.close()
        shutdown.stop("the test has ended")
        await task


async def test_requests_under_way_are_spread_over_the_ready_frontends(picker):
    picker.ready.remove(FRONTENDS[0])
    talks = [await picker.begun() for _ in range(6)]
    assert Counter(talk.outcome.destination for talk in talks) == {ENDPOINTS[1]: 3, ENDPOINTS[2]: 3}
    for talk in talks:
        if talk.outcome.destination == ENDPOINTS[2]:
            talk.cancel()
    await until(lambda: not picker.choice.under_way[FRONTENDS[2]])
    later = [await picker.begun() for _ in range(3)]
    assert [talk.outcome.destination for talk in later] == [ENDPOINTS[2]] * 3


async def test_without_a_ready_frontend_the_answer_is_503_in_openais_shape(picker):
    picker.ready.clear()
    outcome = await picker.driver.ask([driver.headers(), *driver.body(b"{}")])
    assert (outcome.refusal[0], outcome.refusal[1]["code"]) == (503, "no_frontend")
    assert int(outcome.set_headers("immediate_response")["retry-after"]) > 0


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_subset_hint_and_selection_header_are_obeyed(picker, endpoint):
    hinted = driver.with_metadata(driver.headers(), driver.subset(endpoint))
    for first in (hinted, driver.headers(test_epp_endpoint_selection=endpoint)):
        assert (await picker.begun(first)).outcome.destination == endpoint


async def test_subset_without_a_frontend_is_answered_503(picker):
    hinted = driver.with_metadata(driver.headers(), driver.subset("10.255.255.1:8000"))
    assert (await picker.driver.ask([hinted])).immediate.status.code == 503


async def test_destination_is_in_header_and_metadata_and_no_header_of_the_client_changes(picker):
    (message,) = (await picker.begun(driver.headers(authorization="Bearer of-the-client"))).outcome.messages
    metadata = message.dynamic_metadata.fields["envoy.lb"].struct_value.fields
    mutation = message.request_headers.response.header_mutation
    assert [each.header.key for each in mutation.set_headers] == [driver.DESTINATION]
    assert mutation.set_headers[0].header.raw_value.decode() == metadata[driver.DESTINATION].string_value
    assert not mutation.remove_headers


@pytest.mark.parametrize("size", [1, LIMIT - 1, LIMIT, 1_400_000])
async def test_bodies_of_both_directions_pass_as_they_arrive(picker, size):
    talk = await picker.begun()
    for kind in ("request_body", "response_body"):
        if kind == "response_body":
            await talk.send(driver.answer_headers())
        await talk.send(*driver.body(b"x" * size, kind=kind, end=False))
        while len(talk.outcome.body(kind)) < size:
            await talk.receive()
        await talk.send(*driver.body(b"end", kind=kind))
        await talk.until_body_ends(kind)
        assert talk.outcome.body(kind) == b"x" * size + b"end"
    outcome = await talk.finish()
    assert (outcome.code, out_of_order(outcome)) == (grpc.StatusCode.OK, "")


async def test_trailers_of_both_directions_are_passed_on(picker):
    outcome = await picker.driver.ask(
        [
            driver.headers(),
            *driver.body(b"{}", end=False),
            driver.trailers("request_trailers"),
            driver.answer_headers(),
            *driver.body(b"{}", kind="response_body", end=False),
            driver.trailers("response_trailers"),
        ]
    )
    assert outcome.kinds == [
        f"{way}_{part}" for way in ("request", "response") for part in ("headers", "body", "trailers")
    ]
    assert outcome.code == grpc.StatusCode.OK


@pytest.mark.parametrize(
    "messages",
    [
        driver.body(b"{}"),
        [driver.headers(), driver.headers()],
        [driver.headers(), *driver.body(b"{}"), *driver.body(b"{}")],
        [driver.headers(), *driver.body(b"{}", kind="response_body")],
        [driver.headers(), driver.ProcessingRequest()],
    ],
    ids=["body first", "headers twice", "body behind its end", "answer's body", "unknown"],
)
async def test_message_out_of_place_ends_the_stream_with_invalid_argument(picker, messages):
    assert (await picker.driver.ask(messages)).code == grpc.StatusCode.INVALID_ARGUMENT
    await until(lambda: not picker.choice.under_way)


async def test_no_mutated_sequence_breaks_the_order_or_leaves_a_request_counted(picker):
    for number in range(SEQUENCES):
        rnd = random.Random(f"{SEED}.{number}")
        outcome = await picker.driver.ask(drawn(rnd, b"x" * rnd.randrange(300), ENDPOINTS))
        assert out_of_order(outcome) == "", f"sequence {number} of seed {SEED}"
        assert outcome.code in ENDS, f"sequence {number} of seed {SEED}: {outcome.code}"
    await until(lambda: not picker.choice.under_way)
