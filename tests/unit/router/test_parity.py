"""Live parity: what a request predicted is what its worker holds, or the first difference is named by its cause."""

import asyncio
from array import array
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
from unit.router.rig import Rig, counts, running, value
from waiting import until

from mmrouter_lib import feed
from mmrouter_lib.block_keys import Span, block_keys
from mmrouter_lib.cache_layout import CacheGroup, cache_layout
from mmrouter_lib.engines.base.events import Stored
from mmrouter_lib.engines.vllm.events import decode_batch
from mmrouter_lib.media_identity import to_wire
from mmrouter_router.explain.decisions import DecisionTrace
from mmrouter_router.explain.differences import Prediction, first_difference
from mmrouter_router.explain.parity_check import ExpectedBlocks, check_parity, expected_blocks, verdict_json
from mmrouter_router.fleet.feed_client import FeedRequestError
from mmrouter_router.fleet.workers import Fleet, Target
from mmrouter_router.request.prepared import Prepared
from mmrouter_router.telemetry.metrics import Metrics
from mmrouter_router.verify import sampling
from mmrouter_router.verify.sampling import ParitySampler

BLOCK, PAD, SEED = 4, 99, 5
A, B = b"a" * 32, b"b" * 32
IDS = [1, 2, 3, 4, 5, *[PAD] * 6, 7, 8, 9, 10, 11, 12]
SPANS = (Span(5, 6, A),)


class Sidecar:
    """A worker's feed client that returns published batches."""

    def __init__(self, batches=(), *, gone: bool = False, silent: bool = False) -> None:
        self.batches, self.gone, self.silent, self.asked = batches, gone, silent, []

    async def request(self, build):
        if self.silent:
            raise FeedRequestError("no answer")
        self.asked.append(build(1))
        raw = tuple(feed.RawBatch(n, 0, n, payload) for n, payload in enumerate(self.batches, 1))
        return [feed.DetailPart(1, raw, True, self.gone)]


def prediction(ids=IDS) -> Prediction:
    return Prediction(array("I", ids), SPANS, BLOCK, None, PAD)


class Parity(Rig):
    """A rig with one unverified worker."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics.parity.describe("vllm", "qwen2_vl")
        self.engine = self.worker("a", canary="")

    def expected(self, ids=IDS) -> ExpectedBlocks:
        keys = block_keys(array("I", ids), BLOCK, SPANS, SEED)
        return ExpectedBlocks("uid-a", 0, 1, 0, keys, prediction(ids))

    def stores(self, keys) -> None:
        self.delta(self.engine, keys)


@pytest.fixture
def rig() -> Parity:
    return Parity()


def batch(ids=IDS, spans=SPANS, salt=None, *, start=0, end=None, size=BLOCK, name=100) -> bytes:
    """What a vLLM engine publishes for blocks ``start`` to ``end`` of a prompt that it understands so."""
    end = len(ids) // size if end is None else end
    extras = []
    for number in range(start, end):
        begin = number * size
        entry = [[to_wire(s.identity), s.offset - begin] for s in spans if s.offset < begin + size and s.end > begin]
        extras.append((entry + ([salt] if salt and number == 0 else [])) or None)
    event = {
        "type": "BlockStored",
        "block_hashes": list(range(name + start, name + end)),
        "parent_block_hash": name + start - 1 if start else None,
        "token_ids": list(ids[start * size : end * size]),
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": extras,
    }
    return msgspec.msgpack.encode([0.0, [event], 0])


async def verdict(rig: Parity, sidecar: Sidecar):
    return await check_parity(rig.expected(), rig.fleet, sidecar, seconds=0.02)


async def test_held_blocks_match_without_a_request(rig):
    rig.stores(rig.expected().keys)
    sidecar = Sidecar()
    found = await verdict(rig, sidecar)
    assert (found.result, found.cause, found.blocks) == ("True", "", 4)
    assert sidecar.asked == []


async def test_blocks_within_the_timeout_match(rig):
    waiting = asyncio.create_task(check_parity(rig.expected(), rig.fleet, Sidecar(), seconds=5))
    await asyncio.sleep(0)
    keys = rig.expected().keys
    rig.stores(keys[:2])
    await asyncio.sleep(0)
    rig.stores(keys[2:])
    assert (await waiting).result == "True"


@pytest.mark.parametrize(
    ("cause", "published"),
    [
        ("template", {"ids": [*IDS[:12], 80, *IDS[13:]]}),
        ("count", {"ids": [*IDS[:5], PAD, *IDS[5:]], "spans": (Span(5, 7, A),)}),
        ("identity", {"spans": (Span(5, 6, B),)}),
        ("salt", {"salt": "t1"}),
    ],
)
async def test_miss_names_its_cause(rig, cause, published):
    rig.stores([1, 2, 3])
    found = await verdict(rig, Sidecar([batch(**published)]))
    assert (found.result, found.cause) == ("False", cause)


async def test_both_sides_of_a_block_are_shown(rig):
    rig.stores([1])
    found = await verdict(rig, Sidecar([batch(ids=[*IDS[:12], 80, *IDS[13:]])]))
    shown = verdict_json(found, rig.expected(), None)
    assert shown["block"]["number"] == 3
    assert shown["block"]["first_token"] == 12
    assert shown["block"]["predicted"]["tokens"] == IDS[12:16]
    assert shown["block"]["published"]["tokens"] == [80, *IDS[13:16]]
    other = await verdict(rig, Sidecar([batch(spans=(Span(5, 6, B),))]))
    sides = verdict_json(other, rig.expected(), None)["block"]
    assert sides["number"] == 1
    assert sides["predicted"]["images"] == [{"identity": to_wire(A), "starts_at": 1}]
    assert sides["published"]["images"] == [{"identity": to_wire(B), "starts_at": 1}]
    assert sides["predicted"]["text"] == "[5][3 image tokens]"


async def test_blocks_of_other_prompts_give_unknown(rig):
    rig.stores([1])
    other = batch(ids=[1, 2, 3, 4, *range(50, 66)], spans=())
    found = await verdict(rig, Sidecar([other]))
    assert (found.result, found.cause) == ("Unknown", "unknown")
    assert "resembles" in found.difference.message


async def test_missing_evidence_gives_unknown(rig):
    rig.stores([1])
    assert (await verdict(rig, Sidecar(gone=True))).result == "Unknown"
    assert (await verdict(rig, Sidecar(silent=True))).result == "Unknown"
    assert (await check_parity(rig.expected(), rig.fleet, None, seconds=0)).result == "Unknown"
    evicted = await verdict(rig, Sidecar([batch()]))
    assert (evicted.result, "evicted" in evicted.difference.message) == ("Unknown", True)
    assert (await verdict(rig, Sidecar())).cause == "unknown"


async def test_restarted_engine_gives_unknown(rig):
    rig.engine.sync.epoch = 2
    found = await verdict(rig, sidecar := Sidecar([batch(salt="x")]))
    assert found.result == "Unknown"
    assert sidecar.asked == []


def trace(rig: Parity, request_id: str) -> DecisionTrace:
    return DecisionTrace(request_id, None, len(IDS), array("Q"), [], expected=rig.expected())


async def test_sampling_depends_on_the_request_id_only(rig):
    ids = [f"r-{number}" for number in range(4000)]
    tenth = ParitySampler(0.1, rig.fleet, lambda uid: None, rig.metrics)
    again = ParitySampler(0.1, Fleet(Metrics()), lambda uid: None, Metrics())
    chosen = [one for one in ids if tenth.wants(one)]
    assert chosen == [one for one in ids if again.wants(one)]
    assert 300 < len(chosen) < 500
    assert all(ParitySampler(1.0, rig.fleet, lambda uid: None, rig.metrics).wants(one) for one in ids)
    assert not any(ParitySampler(0.0, rig.fleet, lambda uid: None, rig.metrics).wants(one) for one in ids)


async def test_samples_are_checked_in_the_background(rig, monkeypatch):
    monkeypatch.setattr(sampling, "EVENTS_SECONDS", 0.02)
    sidecar = Sidecar([batch(salt="t1")])
    sampler = ParitySampler(1.0, rig.fleet, lambda uid: sidecar, rig.metrics)
    rig.stores(rig.expected().keys)
    good = trace(rig, "r-good")
    bad = DecisionTrace("r-bad", None, 0, array("Q"), [], expected=rig.expected(ids=[*IDS[:16], 3, 3, 3, 3]))
    sampler.offer(good)
    sampler.offer(bad)
    async with running(sampler.run()):
        await until(lambda: good.parity and bad.parity)
    assert good.parity.result == "True"
    assert bad.parity.cause == "salt"
    counted = counts(rig.metrics.parity._counter, "result", "cause")
    assert {labels: number for labels, number in counted.items() if number} == {("True", ""): 1, ("False", "salt"): 1}
    assert counted["False", "template"] == 0, "the first one of a cause is an increase"


async def test_only_predicted_requests_are_sampled_and_samples_are_bounded(rig, monkeypatch):
    monkeypatch.setattr(sampling, "QUEUE", 2)
    sampler = ParitySampler(1.0, rig.fleet, lambda uid: None, rig.metrics)
    sampler.offer(DecisionTrace("r-1", None, 0, array("Q"), []))  # of a request without a prediction
    assert sampler.queue.empty()
    for number in range(5):
        sampler.offer(trace(rig, f"r-{number}"))
    assert value(rig.metrics.parity_dropped) == 3


def prepared(exactness: str = "exact") -> Prepared:
    image = SimpleNamespace(name=A, resolved=exactness == "exact")
    return Prepared(None, None, (image,), array("I", IDS), SPANS, exactness, (), SEED, 1)


def test_exact_prompt_expects_all_complete_blocks_and_a_partial_one_those_before_its_image(rig):
    whole, partial = (expected_blocks(prepared(kind), Target(rig.engine, 0, BLOCK)) for kind in ("exact", "partial"))
    assert (whole.keys, whole.prediction.placeholder_id) == (rig.expected().keys, PAD)
    assert (partial.keys, partial.prediction.spans) == (rig.expected().keys[:1], ())


async def test_an_engine_with_states_may_keep_the_beginning_of_a_prompt_alone(rig):
    beginning = Sidecar([batch(end=2)])
    for hidden, result in (((), "False"), (("windows",), "False"), (("states",), "True")):
        expected = expected_blocks(replace(prepared(), hidden=hidden), Target(rig.engine, 0, BLOCK))
        rig.stores([1])
        assert (await check_parity(expected, rig.fleet, beginning, seconds=0.02)).result == result
    other = Sidecar([batch(ids=[*IDS[:12], 80, *IDS[13:]])])
    assert (await check_parity(expected, rig.fleet, other, seconds=0.02)).cause == "template"


def test_affinity_or_short_prompt_expects_nothing(rig):
    assert expected_blocks(prepared("affinity"), Target(rig.engine, 0, BLOCK)) is None
    assert expected_blocks(prepared(), Target(rig.engine, 0, 64)) is None


def test_sliding_window_expects_the_blocks_of_a_hit(rig):
    rig.engine.layout = cache_layout([CacheGroup(0, "sliding_window", 5)])
    whole = rig.expected().keys
    found = expected_blocks(prepared(), Target(rig.engine, 0, BLOCK))
    assert found.keys == whole[3:4]


def published(ids=IDS, spans=SPANS, **options) -> Stored:
    (event,) = decode_batch(batch(ids, spans, **options)).events
    return event


def cause(p, *events):
    found = first_difference(p, events)
    return found.cause if found else None


def test_equal_streams_have_no_difference_beside_events_of_other_requests():
    first, rest = published(end=2), published(start=2)
    other = published(ids=[50 + i for i in range(17)], spans=(), name=7)
    for events in ((published(),), (first, rest), (rest,), (other, published())):
        assert cause(prediction(), *events) is None


def test_missing_images_block_size_truncation_and_silence_are_distinct_causes():
    p = prediction()
    assert cause(p, published(spans=())) == "identity"
    assert cause(p, published(size=8)) == "block_size"
    assert cause(p, published(end=2)) == "truncation"
    assert cause(p) == "no_events"


def test_message_names_token_and_block():
    found = first_difference(prediction(), [published(ids=[*IDS[:12], 80, *IDS[13:]])])
    assert "token 12 (block 3): predicted id 8, published 80" in found.message
