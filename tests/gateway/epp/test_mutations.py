"""Mutated message sequences, drawn by seed: a picker answers in order, ends the stream, and serves the next request.

``MMROUTER_EPP_SEQUENCES`` takes another number of sequences, ``MMROUTER_EPP_SEED`` another seed.
"""

import os
import random

import grpc
from gateway.epp import driver
from gateway.epp.driver import out_of_order
from long_form import IS_LONG

SEQUENCES = int(os.environ.get("MMROUTER_EPP_SEQUENCES", "10000" if IS_LONG else "100"))
SEED = int(os.environ.get("MMROUTER_EPP_SEED", "22"))
ENDS = {
    None,  # unknown: see Outcome
    grpc.StatusCode.OK,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.CANCELLED,
}


def drawn(rnd: random.Random, chat: bytes, endpoints: tuple[str, ...]) -> list[driver.Message]:
    """A whole exchange, with up to four mutations."""
    size = rnd.choice((7, 60, 5000))
    messages = [driver.headers(), *driver.body(chat, size=size)]
    messages += [driver.answer_headers(rnd.choice((200, 200, 400, 503)), end=rnd.random() < 0.1)]
    messages += driver.body(b'{"usage": {}}' * rnd.randrange(4), size=size, kind="response_body")
    for _ in range(rnd.randrange(5)):
        at = rnd.randrange(len(messages)) if messages else 0
        match rnd.randrange(8):
            case 0:
                del messages[at : at + 1]
            case 1:
                messages[at:at] = messages[at : at + 1]
            case 2:
                rnd.shuffle(messages)
            case 3:
                del messages[at:]
            case 4:
                messages.insert(at, driver.trailers(rnd.choice(("request_trailers", "response_trailers"))))
            case 5 if messages:
                flip(messages, at)
            case 6 if messages:
                hint = driver.subset(*rnd.sample(endpoints, rnd.randrange(len(endpoints) + 1)))
                messages[at] = driver.with_metadata(copied(messages[at]), hint)
            case 7:
                messages.insert(at, driver.ProcessingRequest())
    return messages


def copied(message: driver.Message) -> driver.Message:
    return type(message).FromString(message.SerializeToString())


def flip(messages: list[driver.Message], at: int) -> None:
    """Change whether a message ends its direction, or a byte of a body."""
    messages[at] = message = copied(messages[at])
    kind = message.WhichOneof("kind")
    if kind and kind.endswith(("headers", "body")):
        part = getattr(message, kind)
        if kind.endswith("body") and part.body:
            part.body = part.body[:-1] + bytes([part.body[-1] ^ 0x1F])
        else:
            part.end_of_stream = not part.end_of_stream


async def test_no_sequence_breaks_the_order_or_the_next_request(epp):
    for number in range(SEQUENCES):
        rnd = random.Random(f"{SEED}.{number}")
        messages = drawn(rnd, epp.chat("x" * rnd.randrange(300)), epp.endpoints)
        outcome = await epp.driver.ask(messages)
        title = f"sequence {number} of seed {SEED}: {[message.WhichOneof('kind') for message in messages]}"
        assert out_of_order(outcome) == "", title
        assert outcome.code in ENDS, f"{title}: {outcome.code}"
    await epp.settled()
    talk = epp.driver.talk()
    await talk.send(driver.headers(), *driver.body(epp.chat()))
    await talk.until_body_ends("request_body")
    assert talk.outcome.destination in epp.endpoints
