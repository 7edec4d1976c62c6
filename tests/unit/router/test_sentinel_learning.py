"""Requests, sightings and decisions together: what was learned makes the next request exact, and nothing else does."""

import json
from array import array
from dataclasses import replace
from types import SimpleNamespace

import pytest
from unit.router.rig import BLOCK, Rig

from mmrouter_lib import feed
from mmrouter_lib.block_keys import Span, block_keys, pack_keys
from mmrouter_lib.engines.sglang.identity import sentinels
from mmrouter_router.media.content import Media
from mmrouter_router.request.prepared import Prepared, ResolvedImage
from mmrouter_router.sentinels.evidence import BLIND_SECONDS, SentinelStore
from mmrouter_router.sentinels.table import fill_sentinels
from mmrouter_router.telemetry.metrics import Metrics
from mmrouter_router.verify import sentinel_learning as learning
from mmrouter_router.verify.sentinel_learning import ENOUGH_REQUESTS, MAX_PROBES, SentinelLearning

TEXT, TOKENS, SEED, PLACEHOLDER = 40, 20, 5, 9
FACTS = {"model_type": "llava", "architectures": json.dumps(["Llava"])}
TRUTH = {name: sentinels(number, legacy=False) for number, name in enumerate((b"a", b"b"))}


class Learner(Rig):
    """One SGLang engine, followed by a router that has been alone for long enough."""

    def __init__(self) -> None:
        super().__init__()
        self.known = SentinelStore(clock=self.clock)
        self.learning = SentinelLearning(self.known, self.fleet, None, lambda uid: None, Metrics())
        self.engine = self.worker("a", engine="sglang", engine_version="0.5.23", facts=FACTS)
        self.clock.now += BLIND_SECONDS
        self.beat(self.engine, engine="sglang", engine_version="0.5.23", facts=FACTS)

    def request(self, *names: bytes) -> Prepared:
        ids, spans, images = array("I", range(TEXT)), [], []
        for number, name in enumerate(names):
            spans.append(Span(len(ids), TOKENS, name))
            ids.extend([PLACEHOLDER] * TOKENS + list(range(TEXT)))
            media = Media(name, "image/png", "data")
            images.append(ResolvedImage(0, number, f"image {number}", media, name, 1, 1, TOKENS))
        request = SimpleNamespace(media=(), body={})
        return Prepared(request, None, tuple(images), ids, tuple(spans), "exact", (), SEED, 7, self.known)

    def send(self, prepared: Prepared):
        decision = self.placer.place(prepared)
        self.learning.on_send(decision, prepared)
        return decision

    def serve(self, *names: bytes):
        """Send a request, whose prompt the engine stores and its sidecar reports; return the decision."""
        prepared = self.request(*names)
        decision = self.send(prepared)
        ids = fill_sentinels(prepared.ids, prepared.spans, TRUTH.get).ids
        keys = block_keys(ids, BLOCK, (), SEED)
        delta = feed.Delta(1, self.engine.sync.seq + 1, 0.0, 0, 0, "GPU", pack_keys(keys), b"")
        self.fleet.on_published(self.engine, delta)
        for span in prepared.spans:
            before = span.offset // BLOCK
            sighting = feed.ImageObservation(
                0, 0, keys[before - 1], span.offset % BLOCK, span.length, b"", TRUTH[span.identity]
            )
            self.fleet.on_published(self.engine, sighting)
        return decision


@pytest.fixture
def rig():
    return Learner()


def test_image_becomes_exact_once_its_blocks_are_seen(rig):
    decision = rig.serve(b"a")
    assert (decision.exactness, decision.reasons) == ("partial", ("learning:image 0",))
    again = rig.placer.place(rig.request(b"a"))
    assert (again.exactness, again.reasons, again.choice.winner.overlap) == ("exact", (), again.choice.winner.blocks)
    other = rig.placer.place(rig.request(b"b"))
    assert (other.exactness, other.choice.winner.overlap) == ("partial", TEXT // BLOCK)


def test_images_of_a_request_are_learned_in_order(rig):
    assert rig.serve(b"a", b"b").reasons == ("learning:image 0",)
    again = rig.placer.place(rig.request(b"a", b"b"))
    assert (again.exactness, again.choice.winner.overlap) == ("exact", again.choice.winner.blocks)
    swapped = rig.placer.place(rig.request(b"b", b"a"))
    assert (swapped.exactness, swapped.choice.winner.overlap) == ("exact", TEXT // BLOCK)


def test_unaligned_images_suspend_alignment(rig):
    unplaced = rig.request(b"b")
    unplaced.exactness, unplaced.ids, unplaced.spans = "affinity", array("I"), ()
    rig.send(unplaced)
    rig.serve(b"a")
    assert rig.placer.place(rig.request(b"a")).exactness == "partial"


def test_image_is_probed_when_requested_again(rig):
    questions = rig.learning.probes
    for number, waiting in ((1, 0), (2, 1), (3, 1), (4, 2)):
        rig.send(rig.request(b"a"))
        assert questions.qsize() == waiting, number
    assert questions.get_nowait().image.data == b"a"
    for number in range(2 * MAX_PROBES):
        for _ in range(2):
            rig.send(rig.request(bytes([number])))
    assert questions.full()


def test_an_engine_of_a_release_that_makes_other_prompts_gets_no_probe(rig):
    for release, probes in (((0, 5, 24), 0), ((0, 5, 23), 1)):
        for _ in range(ENOUGH_REQUESTS):
            request = SimpleNamespace(media=(), body={}, prompt_field="messages")
            rig.send(replace(rig.request(b"a"), request=request, first_release=release))
        assert rig.learning.probes.qsize() == probes


def test_waiting_probes_are_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr(learning, "MAX_PROBE_BYTES", 10)
    rig = Learner()
    waiting = rig.learning.probes
    for name, count in ((b"x" * 11, 1), (b"y", 1)):  # one that is too large alone, and nothing beside it
        for _ in range(2):
            rig.send(rig.request(name))
        assert waiting.qsize() == count
    rig = Learner()
    for name, count in ((b"x" * 6, 1), (b"y" * 5, 1), (b"z" * 4, 2)):
        for _ in range(2):
            rig.send(rig.request(name))
        assert rig.learning.probes.qsize() == count


def test_other_flags_are_another_scope(rig):
    rig.serve(b"a")
    before = rig.engine.scope
    rig.beat(rig.engine, engine="sglang", engine_version="0.5.23", facts={**FACTS, "dtype": '"float16"'})
    assert rig.engine.scope != before
    assert rig.placer.place(rig.request(b"a")).exactness == "partial"
