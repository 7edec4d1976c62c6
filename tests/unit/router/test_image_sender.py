"""Images on their way to encoders: sent once, moved when an encoder fails, withdrawn when no request waits."""

import asyncio
import json

import pytest

from mmrouter_router.encoding.image_sender import EncodeError, ImageSender, ImageToEncode
from mmrouter_router.encoding.scheduler import EncoderScheduler
from mmrouter_router.encoding.types import Encoder, Image
from mmrouter_router.http.upstream import UpstreamError
from mmrouter_router.media import Media
from mmrouter_router.request.engine_request import OutgoingImage


def shown(name, tokens=100):
    return ImageToEncode(
        Image(name.encode(), tokens), OutgoingImage(0, 0, name, Media(name.encode(), "image/png", "data"))
    )


class Pool:
    """Encoders that answer when they are let, and what each was sent."""

    def __init__(self):
        self.sent = []  # (encoder, image)
        self.gates = {}  # image -> Event, for images that are held up
        self.answers = {}  # encoder -> status, or an error to raise
        self.cancelled = []
        self.traced = {}  # image -> headers that it was sent with
        self.size = {}  # what encoders say of an embedding

    async def post(self, encoder, image, headers, told):
        name = image.uuid
        assert image.media.data == name.encode()
        self.sent.append((encoder, name))
        self.traced[name] = dict(headers)
        try:
            if gate := self.gates.get(name):
                await gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        answer = self.answers.get(encoder, 200)
        if isinstance(answer, Exception):
            raise answer
        params = {name: {"item_indices": [0], "peer_host": encoder, **self.size}}
        return answer, json.dumps({"ec_transfer_params": params} if answer == 200 else {"error": "x"}).encode()

    def hold(self, *names):
        self.gates |= {name: asyncio.Event() for name in names}


@pytest.fixture
async def pool():
    return Pool()


@pytest.fixture
async def encoding(pool):
    made = ImageSender(EncoderScheduler(), pool.post)
    made.update([Encoder("a", "cpu", queue=4), Encoder("b", "cpu", queue=4)])
    task = asyncio.create_task(made.run())
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def until(condition):
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0)


async def test_answers_are_returned_unchanged_by_identity(encoding, pool):
    done = await encoding.encode("r1", [shown("x"), shown("y"), shown("x")])
    where = {name: encoder for encoder, name in pool.sent}
    assert done.params == {name: {"item_indices": [0], "peer_host": where[name]} for name in ("x", "y")}
    assert len(pool.sent) == 2
    assert len(done.placed) == 3
    assert done.seconds >= 0


async def test_shared_image_is_sent_once(encoding, pool):
    pool.hold("x")
    waiting = [asyncio.create_task(encoding.encode(f"r{n}", [shown("x")])) for n in range(5)]
    await until(lambda: pool.sent)
    pool.gates["x"].set()
    await asyncio.gather(*waiting)
    await encoding.encode("later", [shown("x")])
    assert [name for _, name in pool.sent] == ["x"]


async def test_reported_embedding_size_counts_against_the_cache_bound(encoding, pool):
    pool.size = {"size_bytes": 60}
    encoding.update([Encoder("a", "cpu", cache_bytes=100)])
    for name in ("x", "y", "x"):
        await encoding.encode(name + str(len(pool.sent)), [shown(name)])
    assert [name for _, name in pool.sent] == ["x", "y", "x"]
    assert [(view.held, view.held_bytes) for view in encoding.scheduler.statuses(0.0)] == [(1, 60)]


async def test_image_belongs_to_the_trace_of_the_first_request(encoding, pool):
    pool.hold("x")
    first = asyncio.create_task(encoding.encode("r1", [shown("x")], {"traceparent": "one"}))
    await until(lambda: pool.sent)
    second = asyncio.create_task(encoding.encode("r2", [shown("x"), shown("y")], {"traceparent": "two"}))
    await until(lambda: len(pool.sent) == 2)
    pool.gates["x"].set()
    await asyncio.gather(first, second)
    assert pool.traced == {"x": {"traceparent": "one"}, "y": {"traceparent": "two"}}


async def test_only_unneeded_images_are_aborted(encoding, pool):
    pool.hold("x", "y")
    first = asyncio.create_task(encoding.encode("r1", [shown("x"), shown("y")]))
    second = asyncio.create_task(encoding.encode("r2", [shown("y")]))
    await until(lambda: len(pool.sent) == 2)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await until(lambda: pool.cancelled)
    pool.gates["y"].set()
    await second
    assert pool.cancelled == ["x"]


@pytest.mark.parametrize("answer", [500, 503, 429, UpstreamError("gone", sent=True)])
async def test_failed_image_is_sent_to_another_encoder(encoding, pool, answer):
    pool.answers["a"] = answer
    for number in range(4):
        done = await encoding.encode(f"r{number}", [shown(f"x{number}")])
        assert done.params[f"x{number}"]["peer_host"] == "b"


async def test_answer_without_the_embedding_fails(encoding, pool):
    pool.answers["a"] = pool.answers["b"] = 204
    with pytest.raises(EncodeError) as error:
        await encoding.encode("r1", [shown("x")])
    assert error.value.reason == "attempts"


async def test_refused_image_is_not_retried(encoding, pool):
    pool.answers["a"] = pool.answers["b"] = 400
    with pytest.raises(EncodeError) as error:
        await encoding.encode("r1", [shown("x")])
    assert error.value.reason == "image_refused"
    assert len(pool.sent) == 1


async def test_work_of_a_removed_encoder_moves(encoding, pool):
    pool.hold("x", "y", "z", "v")
    asked = asyncio.create_task(encoding.encode("r1", [shown(name) for name in "xyzv"]))
    await until(lambda: len(pool.sent) == 2)
    encoding.update([Encoder("b", "cpu", queue=4)])
    for gate in pool.gates.values():
        gate.set()
    await asked
    assert {name for _, name in pool.sent} == set("xyzv")
    assert sum(encoder == "a" for encoder, _ in pool.sent) <= 1


async def test_returning_encoder_starts_with_an_empty_cache(encoding, pool):
    encoding.update([Encoder("a", "cpu")])
    pool.hold("x")
    asked = asyncio.create_task(encoding.encode("r1", [shown("x")]))
    await until(lambda: pool.sent)
    encoding.update([])
    encoding.update([Encoder("a", "cpu")])  # while what it was sent before is still on its way
    await encoding.encode("r2", [shown("y")])
    pool.gates["x"].set()
    await asked
    await encoding.encode("r3", [shown("y")])
    encoding.update([])
    encoding.update([Encoder("a", "cpu")])
    await encoding.encode("r4", [shown("y")])
    assert [name for _, name in pool.sent].count("y") == 2
    assert {encoder for encoder, _ in pool.sent} == {"a"}


async def test_missing_or_full_encoders_fail_at_once(encoding, pool):
    pool.hold("x")
    with pytest.raises(EncodeError) as error:
        await encoding.encode("r1", [shown(f"i{number}") for number in range(50)])
    assert error.value.reason == "encoders_full"
    assert pool.sent == []
    encoding.update([])
    assert not encoding.able
    with pytest.raises(EncodeError):
        await encoding.encode("r2", [shown("x")])


async def test_stalled_work_moves_by_the_timer(pool):
    stalls = ImageSender(EncoderScheduler(), pool.post)
    stalls.update([Encoder("a", "nvidia"), Encoder("b", "cpu")])
    task = asyncio.create_task(stalls.run())
    for number in range(10):  # both become known to be quick
        await stalls.encode(f"warm{number}", [shown(f"w{number}a"), shown(f"w{number}b")])
    held = pool.gates.setdefault("x", asyncio.Event())
    asked = asyncio.create_task(stalls.encode("r1", [shown("x")]))
    await until(lambda: ("a", "x") in pool.sent or ("b", "x") in pool.sent)
    del pool.gates["x"]  # the next encoder answers at once
    async with asyncio.timeout(30):
        await asked
    held.set()
    assert pool.cancelled == ["x"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
