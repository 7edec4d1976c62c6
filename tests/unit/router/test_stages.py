"""Stages before an answer: which run, which are skipped, and that their failures are not fatal."""

import asyncio
import json
from array import array
from dataclasses import dataclass, replace

import pytest
from unit.router.rig import BLOCK, SEED, Rig

from mmrouter_lib.block_keys import Span, block_keys
from mmrouter_router.dispatch.stages import Stages
from mmrouter_router.encoding.image_sender import ImageSender
from mmrouter_router.encoding.scheduler import EncoderScheduler
from mmrouter_router.encoding.types import Encoder
from mmrouter_router.http.upstream import UpstreamError
from mmrouter_router.media import Media
from mmrouter_router.request.engine_request import Outgoing, OutgoingImage
from mmrouter_router.request.prepared import Prepared
from mmrouter_router.scheduling.pipeline_form import SHORT_TOKENS
from mmrouter_router.telemetry.metrics import Metrics

LENGTH = 2 * SHORT_TOKENS
IDS = array("I", range(LENGTH))
SPANS = (Span(100, 64, b"a" * 32), Span(600, 64, b"b" * 32))
KEYS = block_keys(IDS, BLOCK, SPANS, SEED)
MESSAGES = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": ""}} for _ in SPANS]}]
PARAMS = {"do_remote_prefill": True, "remote_request_id": "x"}


@dataclass(frozen=True)
class Picture:
    """The part of a resolved image that stages use."""

    identity: bytes
    tokens: int = 64
    resolved: bool = True


def prepared(spans=SPANS) -> Prepared:
    images = tuple(Picture(span.identity) for span in SPANS)
    return Prepared(None, None, images, IDS, spans, "exact", (), SEED, 77)


class Staging(Rig):
    """A deployment with pools of these roles and scripted answers of engines and encoders."""

    def __init__(self, *roles: str) -> None:
        super().__init__()
        self.roles, self.metrics = roles, Metrics()
        self.prefills: list[dict] = []
        self.encoded: list[str] = []
        self.prefill_answer: tuple[int, dict] | Exception | asyncio.Event = (200, {"kv_transfer_params": PARAMS})
        self.encode_status = 200
        self.encoding = ImageSender(EncoderScheduler(), self.encode) if "encoder" in roles else None
        if self.encoding is not None:
            self.encoding.update([Encoder("e1", "cpu")])
        self.stages = Stages("vllm", roles, self.fleet, self.placer, self.metrics, self.ask, self.encoding)

    def engine(self, role: str, name: str, keys=(), **beat):
        worker = self.worker(name, keys, **beat)
        worker.member = replace(worker.member, role=role)
        return worker

    async def ask(self, target, request_id, path, body, headers):
        self.prefills.append(json.loads(body) | {"at": target.worker.member.name})
        if isinstance(self.prefill_answer, asyncio.Event):  # hangs
            self.prefill_answer.set()
            await asyncio.Event().wait()
        if isinstance(self.prefill_answer, Exception):
            raise self.prefill_answer
        status, answer = self.prefill_answer
        return status, json.dumps(answer).encode()

    async def encode(self, encoder, image, headers, told):
        self.encoded.append(image.uuid)
        params = {image.uuid: {"item_indices": [0], "by": encoder}}
        return self.encode_status, json.dumps({"ec_transfer_params": params}).encode()

    async def before(self, wanted=None, fields=(), **options):
        wanted = wanted or prepared()
        shape = self.stages.form()
        decision = self.placer.place(wanted, roles=shape.answers)
        images = tuple(
            OutgoingImage(0, n, f"m1-{span.identity[:1].decode()}", Media(b"%d" % n, "image/png", "data"))
            for n, span in enumerate(SPANS)
        )
        outgoing = Outgoing("/v1/chat/completions", {"model": "m", "messages": MESSAGES, **dict(fields)}, images)
        staged = await self.stages.before("r", wanted, outgoing, shape, decision, {}, **options)
        return staged, json.loads(outgoing.body(staged.fields)), [(note.stage, note.outcome) for note in staged.reports]


async def test_prompt_is_prefilled_at_the_best_holder():
    rig = Staging("prefill", "decode")
    rig.engine("prefill", "p1")
    rig.engine("prefill", "p2", KEYS[:30])
    rig.engine("decode", "d1")
    staged, body, notes = await rig.before()
    assert notes == [("prefill", "done")]
    assert body["kv_transfer_params"] == PARAMS
    (sent,) = rig.prefills
    assert (sent["at"], sent["max_tokens"]) == ("p2", 1)
    assert staged.prefilled.choice.winner.overlap == 30
    assert "kv_transfer_params" not in json.loads(Outgoing("/", {"model": "m"}).plain)


async def test_prompt_held_by_the_decoder_skips_prefill():
    rig = Staging("prefill", "decode")
    rig.engine("prefill", "p1")
    rig.engine("decode", "d1", KEYS[: (LENGTH - 100) // BLOCK])
    staged, body, notes = await rig.before()
    assert notes == [("prefill", "short")]
    assert rig.prefills == []
    assert staged.prefilled is None
    assert "kv_transfer_params" not in body


async def test_stages_pair_compatible_engines_only():
    rig = Staging("prefill", "decode")
    old, new, decoder = rig.engine("prefill", "p1", KEYS), rig.engine("prefill", "p2"), rig.engine("decode", "d1")
    for worker, layout in ((old, "a"), (new, "b"), (decoder, "b")):
        rig.fleet.join(replace(worker.member, compatibility=layout))
    staged, _, _ = await rig.before()
    assert staged.prefilled.target.worker is new
    rig.fleet.join(replace(new.member, compatibility="c"))
    _, body, notes = await rig.before()
    assert notes == [("prefill", "no_partner")]
    assert "kv_transfer_params" not in body


@pytest.mark.parametrize(
    ("answer", "outcome", "lost"),
    [
        ((500, {}), "answered_500", False),
        ((400, {}), "answered_400", False),
        ((503, {}), "answered_503", False),
        ((200, {}), "unusable", False),
        ((200, {"kv_transfer_params": None}), "unusable", False),
        (UpstreamError("x", sent=False), "connect", False),
        (UpstreamError("x", sent=True), "engine_lost", True),
        (TimeoutError(), "timeout", False),
    ],
)
async def test_failed_prefill_falls_back_to_the_decoder(answer, outcome, lost):
    rig = Staging("prefill", "decode")
    rig.engine("prefill", "p1")
    rig.engine("decode", "d1")
    rig.prefill_answer = answer
    staged, body, notes = await rig.before()
    assert notes == [("prefill", outcome)]
    assert "kv_transfer_params" not in body
    assert (staged.prefilled, staged.lost) == (None, lost)
    usage = [usage for worker in rig.fleet if worker.member.role == "prefill" for usage in worker.usage.values()]
    assert [(each.requests, each.prefill, each.active) for each in usage] == [(0, 0, 0)]


@pytest.mark.parametrize(
    ("fields", "options", "outcome"),
    [
        ({"n": 2}, {}, "several_answers"),
        ({"prompt_logprobs": 1}, {}, "prompt_logprobs"),
        ({}, {"alone": True}, "transfer"),
    ],
)
async def test_unsplittable_request_stays_at_one_engine(fields, options, outcome):
    rig = Staging("prefill", "decode")
    rig.engine("prefill", "p1")
    rig.engine("decode", "d1")
    _, _, notes = await rig.before(fields=fields.items(), **options)
    assert notes == [("prefill", outcome)]
    assert rig.prefills == []


async def test_images_with_missing_blocks_are_encoded():
    rig = Staging("encoder", "worker")
    rig.engine("worker", "w1")
    _, body, notes = await rig.before()
    assert notes == [("encode", "done")]
    assert rig.encoded == ["m1-a", "m1-b"]
    assert {name: said["item_indices"] for name, said in body["ec_transfer_params"].items()} == {
        "m1-a": [0],
        "m1-b": [1],
    }


@pytest.mark.parametrize(("blocks", "encoded"), [(10, ["m1-a", "m1-b"]), (11, ["m1-b"]), (41, ["m1-b"]), (42, [])])
async def test_image_with_held_blocks_is_not_encoded(blocks, encoded):
    rig = Staging("encoder", "worker")
    rig.engine("worker", "w1", KEYS[:blocks])
    _, _, notes = await rig.before()
    assert rig.encoded == encoded
    assert notes == [("encode", "done" if encoded else "held")]


async def test_unverified_blocks_do_not_skip_encoding():
    rig = Staging("encoder", "worker")
    rig.engine("worker", "w1", KEYS, canary="")
    await rig.before()
    assert rig.encoded == ["m1-a", "m1-b"]


async def test_images_of_an_unpredicted_prompt_are_encoded():
    rig = Staging("encoder", "worker")
    rig.engine("worker", "w1")
    await rig.before(replace(prepared(), spans=(), ids=array("I")))
    assert rig.encoded == ["m1-a", "m1-b"]


async def test_failed_encoding_falls_back_to_the_worker():
    rig = Staging("encoder", "worker")
    rig.engine("worker", "w1")
    rig.encode_status = 500
    _, body, ((stage, outcome),) = await rig.before()
    assert (stage, outcome) == ("encode", "attempts")
    assert "ec_transfer_params" not in body


async def test_full_form_passes_embeddings_to_prefill_and_blocks_to_decode():
    rig = Staging("encoder", "prefill", "decode")
    rig.engine("prefill", "p1")
    rig.engine("decode", "d1")
    _, body, notes = await rig.before()
    assert notes == [("encode", "done"), ("prefill", "done")]
    assert set(rig.prefills[0]["ec_transfer_params"]) == {"m1-a", "m1-b"}
    assert "ec_transfer_params" not in body
    assert body["kv_transfer_params"] == PARAMS


async def test_form_omits_a_pool_without_pods():
    rig = Staging("encoder", "prefill", "decode")
    rig.encoding.update([])
    rig.engine("decode", "d1")
    shape = rig.stages.form()
    assert (shape.name, shape.degraded) == ("whole", ("no_prefill", "no_encoder"))


async def test_form_omits_pods_that_failed_the_request():
    rig = Staging("prefill", "decode")
    rig.engine("prefill", "p1")
    decode = rig.engine("decode", "d1")
    assert rig.stages.form().answers == {"decode"}
    again = rig.stages.form({decode.member.uid})
    assert (again.answers, again.prefills, again.degraded) == ({"prefill"}, False, ("no_decode",))
    rig.engine("decode", "d2")
    assert rig.stages.form({decode.member.uid}).answers == {"decode"}


async def test_cancelled_stages_leave_no_booking():
    rig = Staging("prefill", "decode")
    prefill = rig.engine("prefill", "p1")
    rig.engine("decode", "d1")
    hangs = rig.prefill_answer = asyncio.Event()
    work = asyncio.create_task(rig.before())
    await hangs.wait()
    assert prefill.usage[0].requests == 1
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    assert (prefill.usage[0].requests, prefill.usage[0].active) == (0, 0)


async def test_answer_times_of_both_paths_are_measured():
    rig = Staging("prefill", "decode")
    rig.engine("prefill", "p1")
    rig.engine("decode", "d1")
    staged, _, _ = await rig.before()
    note = rig.stages.answered(staged, "d1")
    assert (note.stage, note.workers) == ("answer", ("d1",))
    assert 0 <= note.seconds < 60
    rig.prefill_answer = (500, {})
    staged, _, _ = await rig.before()
    rig.stages.answered(staged, "d1")
    assert (rig.stages.offload.remote.measured, rig.stages.offload.local.measured) == (1, 1)
