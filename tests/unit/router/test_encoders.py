"""Images on their way to encoders, and encoders announced to the sidecars of SGLang engines."""

import asyncio
import json

import pytest
from unit.router.rig import cancelled, heartbeat, refused, running
from waiting import until

from mmrouter_lib import feed
from mmrouter_router.encoding.encoder_pods import ANNOUNCE_AGAIN_SECONDS, EncoderAnnouncer, heard_encoders
from mmrouter_router.encoding.encoder_queue import Encoder, Image
from mmrouter_router.encoding.image_sender import EncodeError, ImageSender, ImageToEncode
from mmrouter_router.encoding.scheduler import EncoderScheduler
from mmrouter_router.fleet.feed_client import FeedRequestError
from mmrouter_router.fleet.workers import Fleet, Member
from mmrouter_router.http.engine_connection import UpstreamError
from mmrouter_router.media.content import Media
from mmrouter_router.request.prepared import OutgoingImage
from mmrouter_router.telemetry.metrics import Metrics


def shown(name, tokens=100):
    outgoing = OutgoingImage(0, 0, name, Media(name.encode(), "image/png", "data"))
    return ImageToEncode(Image(name.encode(), tokens), outgoing)


class Pool:
    """Encoders that answer when they are let, and what each was sent."""

    def __init__(self):
        self.sent = []  # (encoder, image)
        self.gates = {}  # image -> Event, for images that are held up
        self.answers = {}  # encoder -> status, or an error to raise
        self.cancelled = []
        self.traced = {}  # image -> headers that it was sent with
        self.size = {}  # what encoders say of an embedding

    async def post(self, encoder, image, headers, transfers):
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
    async with running(made.run()):
        yield made


async def failing(encoding, *images) -> str:
    return (await refused(encoding.encode("r", images), EncodeError)).reason


@pytest.fixture
def rig():
    return Rig()


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
    encoding.update([Encoder("c", "cpu", cache_bytes=100)])
    for name in ("x", "y", "x"):
        await encoding.encode(name + str(len(pool.sent)), [shown(name)])
    assert [name for _, name in pool.sent] == ["x", "y", "x"]
    assert [(len(queue.held), queue.held.bytes) for queue in encoding.scheduler.queues.values()] == [(1, 60)]


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
    await cancelled(first)
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
    assert await failing(encoding, shown("x")) == "attempts"


async def test_refused_image_is_not_retried(encoding, pool):
    pool.answers["a"] = pool.answers["b"] = 400
    assert await failing(encoding, shown("x")) == "image_refused"
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
    assert await failing(encoding, *(shown(f"i{number}") for number in range(50))) == "encoders_full"
    assert pool.sent == []
    encoding.update([])
    assert not encoding.able
    assert await failing(encoding, shown("x")) == "encoders_full"


async def test_stalled_work_moves_by_the_timer(encoding, pool):
    for number in range(10):  # both become known to be quick
        await encoding.encode(f"warm{number}", [shown(f"w{number}a"), shown(f"w{number}b")])
    pool.hold("x")
    asked = asyncio.create_task(encoding.encode("r1", [shown("x")]))
    await until(lambda: ("a", "x") in pool.sent or ("b", "x") in pool.sent)
    del pool.gates["x"]  # the next encoder answers at once
    async with asyncio.timeout(30):
        await asked
    assert pool.cancelled == ["x"]


PATIENCE = 60.0


class Sidecar:
    """A feed that records the announcements."""

    def __init__(self):
        self.told, self.silent = [], False

    async def request(self, build):
        if self.silent:
            raise FeedRequestError("no answer")
        self.told.append(build(1))
        return [feed.Accepted(1)]


class Rig:
    def __init__(self):
        self.now = 0.0
        self.fleet = Fleet(Metrics(), clock=lambda: self.now)
        self.sidecars = {}
        self.encoders = EncoderAnnouncer("r1", self.fleet, self.sidecars.get, PATIENCE, lambda: self.now)

    def pod(self, name, role, *, state="up", draining=False, admitted=True):
        worker = self.fleet.join(Member(name, name, f"10.0.0.{len(self.sidecars)}", role, role, admitted=admitted))
        self.sidecars.setdefault(name, Sidecar())
        self.beat(worker, state, draining)
        return worker

    def beat(self, worker, state="up", draining=False):
        heartbeat(self.fleet, worker, engine="sglang", engine_state=state, draining=draining)

    async def names(self):
        """Tell, and return what each sidecar was newly told."""
        before = {name: len(sidecar.told) for name, sidecar in self.sidecars.items()}
        await self.encoders.announce()
        return {
            name: [[one for one, _ in word.encoders] for word in sidecar.told[before[name] :]]
            for name, sidecar in self.sidecars.items()
            if len(sidecar.told) > before[name]
        }


@pytest.mark.parametrize("role", ["worker", "prefill"])
async def test_only_engines_that_ask_encoders_get_the_list(rig, role):
    rig.pod("asks", role)
    rig.pod("d1", "decode")
    rig.pod("e2", "encoder")
    rig.pod("e1", "encoder")
    rig.pod("e3", "encoder", state="starting")
    rig.pod("e4", "encoder", draining=True)
    assert await rig.names() == {"asks": [["e1", "e2"]]}
    assert dict(rig.sidecars["asks"].told[0].encoders)["e1"] == rig.fleet.workers["e1"].member.ip


async def test_change_of_even_an_empty_list_is_announced_at_once_and_repeated(rig):
    rig.pod("w", "worker")
    assert await rig.names() == {"w": [[]]}
    one = rig.pod("e1", "encoder")
    assert await rig.names() == {"w": [["e1"]]}
    assert await rig.names() == {}
    rig.pod("e2", "encoder")
    assert await rig.names() == {"w": [["e1", "e2"]]}
    rig.beat(one, state="down")
    assert await rig.names() == {"w": [["e2"]]}
    rig.now += ANNOUNCE_AGAIN_SECONDS
    assert await rig.names() == {"w": [["e2"]]}


async def test_unadmitted_encoder_is_listed_alone_or_after_the_timeout(rig):
    rig.pod("w", "worker")
    new = rig.pod("e1", "encoder", admitted=False)
    assert await rig.names() == {"w": [["e1"]]}
    rig.pod("e2", "encoder")
    assert await rig.names() == {"w": [["e2"]]}
    rig.now = new.since + PATIENCE
    assert await rig.names() == {"w": [["e1", "e2"]]}


async def test_silent_sidecar_is_retried_without_blocking_others(rig):
    rig.pod("w1", "worker")
    rig.pod("w2", "worker")
    rig.sidecars["w1"].silent = True
    rig.pod("e1", "encoder")
    assert await rig.names() == {"w2": [["e1"]]}
    rig.sidecars["w1"].silent = False
    assert await rig.names() == {"w1": [["e1"]]}


def test_a_silent_sidecar_gets_no_claims_of_embeddings(rig):
    """Each claim would wait for its answer in vain."""
    pods = [rig.pod(name, role) for name, role in (("e1", "encoder"), ("e2", "encoder"), ("w", "worker"))]
    for worker in pods:
        worker.sync.synced = True
    assert heard_encoders(rig.fleet) == ["e1", "e2"]
    rig.fleet.mark_stale(pods[0])
    assert heard_encoders(rig.fleet) == ["e2"]
