"""Stages before an answer: the fullest form that the pods can serve, what is skipped, and fallbacks."""

import asyncio
import json
import time
from array import array
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.router.rig import BLOCK, SEED, Rig, cancelled, fingerprint, synced

from mmrouter_lib.block_keys import Span, block_keys
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.vllm.stage_requests import BlockLeases
from mmrouter_router.dispatch.stages import ForwardCall, Stages
from mmrouter_router.encoding.encoder_queue import Encoder
from mmrouter_router.encoding.image_sender import ImageSender
from mmrouter_router.encoding.scheduler import EncoderScheduler
from mmrouter_router.fleet.workers import Member
from mmrouter_router.http.engine_connection import UpstreamError
from mmrouter_router.media.content import Media
from mmrouter_router.request.prepared import Outgoing, OutgoingImage, Prepared
from mmrouter_router.scheduling.disaggregation import SHORT_TOKENS, OffloadPolicy, canary_applies, choose_form
from mmrouter_router.scheduling.offload_comparison import PERIOD

LENGTH = 2 * SHORT_TOKENS
IDS = array("I", range(LENGTH))
SPANS = (Span(100, 64, b"a" * 32), Span(600, 64, b"b" * 32))
KEYS = block_keys(IDS, BLOCK, SPANS, SEED)
MESSAGES = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": ""}} for _ in SPANS]}]
PARAMS = {"do_remote_prefill": True, "remote_request_id": "x"}


def prepared(spans=SPANS) -> Prepared:
    images = tuple(SimpleNamespace(identity=span.identity, tokens=64, resolved=True) for span in SPANS)
    return Prepared(None, None, images, IDS, spans, "exact", (), SEED, 77)


class Staging(Rig):
    """A deployment with pools of these roles and scripted answers of engines and encoders."""

    def __init__(self, *roles: str) -> None:
        super().__init__()
        self.prefills: list[dict] = []
        self.encoded: list[str] = []
        self.prefill_answer: tuple[int, dict] | Exception | asyncio.Event = (200, {"kv_transfer_params": PARAMS})
        self.encode_status = 200
        self.encoding = ImageSender(EncoderScheduler(), self.encode) if "encoder" in roles else None
        if self.encoding is not None:
            self.encoding.update([Encoder("e1", "cpu")])
        self.stages = Stages("vllm", roles, self.fleet, self.placer, self.metrics, self.ask, self.encoding)

    def engine(self, role: str, name: str, keys=(), **beat):
        return synced(self.fleet, Member(f"uid-{name}", name, "127.0.0.1", "worker", role), keys, **beat)

    async def ask(self, target, request_id, path, body, headers):
        self.prefills.append(json.loads(body) | {"at": target.worker.member.name})
        if isinstance(self.prefill_answer, asyncio.Event):  # hangs
            self.prefill_answer.set()
            await asyncio.Event().wait()
        if isinstance(self.prefill_answer, Exception):
            raise self.prefill_answer
        status, answer = self.prefill_answer
        return status, json.dumps(answer).encode()

    async def encode(self, encoder, image, headers, transfers):
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
        staged = await self.stages.before(
            ForwardCall("r", wanted, outgoing, {}, fingerprint()), shape, decision, **options
        )
        return staged, json.loads(outgoing.body(staged.fields)), [(note.stage, note.outcome) for note in staged.reports]


def beside_encoders(keys=(), **beat) -> Staging:
    rig = Staging("encoder", "worker")
    rig.engine("worker", "w1", keys, **beat)
    return rig


@pytest.fixture
async def rig():
    rig = Staging("prefill", "decode")
    rig.engine("prefill", "p1")
    rig.engine("decode", "d1")
    return rig


async def test_prompt_is_prefilled_at_the_best_holder(rig):
    rig.engine("prefill", "p2", KEYS[:30])
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
async def test_failed_prefill_falls_back_to_the_decoder(rig, answer, outcome, lost):
    rig.prefill_answer = answer
    staged, body, notes = await rig.before()
    assert notes == [("prefill", outcome)]
    assert "kv_transfer_params" not in body
    assert (staged.prefilled, staged.lost) == (None, lost)
    (usage,) = rig.fleet.workers["uid-p1"].usage.values()
    assert (usage.requests, usage.prefill, usage.active) == (0, 0, 0)


ONE_ENGINE = [("n", 2, "several_answers"), ("prompt_logprobs", 1, "prompt_logprobs"), ("alone", "transfer", "transfer")]


@pytest.mark.parametrize(("name", "value", "outcome"), ONE_ENGINE)
async def test_unsplittable_request_stays_at_one_engine(rig, name, value, outcome):
    options = {"alone": value} if name == "alone" else {"fields": {name: value}}
    _, _, notes = await rig.before(**options)
    assert (notes, rig.prefills) == ([("prefill", outcome)], [])


@pytest.mark.parametrize(
    ("blocks", "encoded"), [(0, ["m1-a", "m1-b"]), (10, ["m1-a", "m1-b"]), (11, ["m1-b"]), (41, ["m1-b"]), (42, [])]
)
async def test_images_with_missing_blocks_are_encoded(blocks, encoded):
    rig = beside_encoders(KEYS[:blocks])
    _, body, notes = await rig.before()
    assert rig.encoded == encoded
    assert notes == [("encode", "done" if encoded else "held")]
    places = {name: params["item_indices"] for name, params in body.get("ec_transfer_params", {}).items()}
    assert places == {name: [number] for number, name in enumerate(("m1-a", "m1-b")) if name in encoded}


async def test_unverified_blocks_and_unpredicted_prompts_do_not_skip_encoding():
    unverified, unpredicted = beside_encoders(KEYS, canary=""), beside_encoders()
    await unverified.before()
    await unpredicted.before(replace(prepared(), spans=(), ids=array("I")))
    assert unverified.encoded == unpredicted.encoded == ["m1-a", "m1-b"]


async def test_failed_encoding_falls_back_to_the_worker():
    rig = beside_encoders()
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


async def test_form_omits_a_pool_without_pods_and_pods_that_failed_the_request(rig):
    three = Staging("encoder", "prefill", "decode")
    three.encoding.update([])
    three.engine("decode", "d1")
    shape = three.stages.form()
    assert (shape.name, shape.degraded) == ("whole", ("no_prefill", "no_encoder"))
    decode = rig.fleet.workers["uid-d1"]
    assert rig.stages.form().answers == {"decode"}
    again = rig.stages.form({decode.member.uid})
    assert (again.answers, again.prefills, again.degraded) == ({"prefill"}, False, ("no_decode",))
    rig.engine("decode", "d2")
    assert rig.stages.form({decode.member.uid}).answers == {"decode"}


async def test_cancelled_stages_leave_no_booking(rig):
    prefill = rig.fleet.workers["uid-p1"]
    hangs = rig.prefill_answer = asyncio.Event()
    work = asyncio.create_task(rig.before())
    await hangs.wait()
    assert prefill.usage[0].requests == 1
    await cancelled(work)
    assert (prefill.usage[0].requests, prefill.usage[0].active) == (0, 0)


async def test_prompts_take_the_cheaper_way_although_earlier_ones_ended_without_an_answer(rig):
    now, outcomes = 0.0, []
    rig.stages.offload = OffloadPolicy(clock=lambda: now)
    hangs = rig.prefill_answer = asyncio.Event()
    work = asyncio.create_task(rig.before())
    await hangs.wait()
    await cancelled(work)
    rig.prefill_answer = (200, {"kv_transfer_params": PARAMS})
    while now < 4 * PERIOD:
        staged, _, ((_, outcome),) = await rig.before()
        outcomes.append(outcome)
        now += 2 if outcome == "done" else 3
        report = rig.stages.answered(staged, "d1")
    assert (report.stage, report.workers) == ("answer", ("d1",))
    assert (set(outcomes), outcomes[-1]) == ({"done", "slower"}, "done")


ROLES = ("encoder", "prefill", "decode", "worker")
subsets = st.frozensets(st.sampled_from(ROLES))
PAIR = frozenset({"prefill", "decode"})
resources = subsets.map(lambda pools: pools | PAIR if pools & PAIR else pools)
"""Roles of a resource: one of a pair is refused without the other."""


@given(st.sampled_from(["vllm", "sglang"]), resources, subsets)
def test_form_uses_able_pods_and_lists_degraded_pools(engine, pools, up):
    able = pools & up
    found = choose_form(engine, pools, able)
    assert found.answers <= able
    if found.prefills:
        assert {"prefill", "decode"} <= able
    if found.encodes:
        assert "encoder" in able
    assert (not found.degraded) == (able >= pools - {"worker"})


@given(resources, subsets)
def test_vllm_answers_while_any_language_model_is_up(pools, up):
    able = pools & up
    assert bool(choose_form("vllm", pools, able).answers) == bool(able - {"encoder"})


@pytest.mark.parametrize(
    ("engine", "pools", "able", "name", "degraded"),
    [
        ("vllm", "worker", "worker", "whole", ()),
        ("vllm", "encoder worker", "encoder worker", "encode-whole", ()),
        ("vllm", "encoder worker", "worker", "whole", ("no_encoder",)),
        ("vllm", "prefill decode", "prefill decode", "prefill-decode", ()),
        ("vllm", "prefill decode", "decode", "whole", ("no_prefill",)),
        ("vllm", "prefill decode", "prefill", "whole", ("no_decode",)),
        ("vllm", "encoder prefill decode", "encoder prefill decode", "encode-prefill-decode", ()),
        ("vllm", "encoder prefill decode", "prefill decode", "prefill-decode", ("no_encoder",)),
        ("vllm", "encoder prefill decode", "encoder decode", "whole", ("no_prefill",)),
        ("vllm", "encoder prefill decode", "encoder prefill", "encode-whole", ("no_decode",)),
        ("sglang", "prefill decode", "prefill decode", "prefill-decode", ()),
        ("sglang", "prefill decode worker", "decode worker", "whole", ("no_pair",)),
        ("sglang", "encoder worker", "worker", "whole", ("no_encoder",)),
        ("sglang", "encoder prefill decode", "encoder prefill decode", "prefill-decode", ()),
    ],
)
def test_form_degrades_with_a_pool_down(engine, pools, able, name, degraded):
    found = choose_form(engine, pools.split(), able.split())
    assert (found.name, found.degraded) == (name, degraded)
    assert found.answers
    assert found.paired == (engine == "sglang" and found.prefills)


@pytest.mark.parametrize(("engine", "roles"), [("vllm", "worker prefill decode"), ("sglang", "worker prefill")])
def test_canary_roles_and_publishing_roles(engine, roles):
    assert {role for role in (*ROLES, "renderer") if role in adapter(engine).publishing_roles} == set(roles.split())
    assert {role for role in (*ROLES, "renderer") if canary_applies(role)} == {"worker", "prefill", "decode"}


@pytest.mark.parametrize("able", ["prefill", "decode", "encoder", ""])
def test_half_an_sglang_pair_answers_nothing(able):
    assert not choose_form("sglang", ("encoder", "prefill", "decode"), able.split()).answers


def test_bound_of_0_always_offloads():
    assert [OffloadPolicy(0).reason_local(tokens) for tokens in (0, 6000)] == ["", ""]


def test_short_prompts_are_computed_locally_whatever_a_prefill_engine_costs():
    policies = OffloadPolicy(), OffloadPolicy(always=True)
    for policy in policies:
        assert [policy.reason_local(tokens) for tokens in (SHORT_TOKENS - 1, SHORT_TOKENS)] == ["short", ""]


async def test_blocks_are_read_before_the_end_of_their_lease(rig):
    """A sixth is left for the decode engine's first renewal of the lease."""
    rig.stages = Stages(
        "vllm", ("prefill", "decode"), rig.fleet, rig.placer, rig.metrics, rig.ask, leases=BlockLeases(30.0)
    )
    before = time.monotonic()
    staged, _, _ = await rig.before()
    assert before + 25 <= staged.read_by <= time.monotonic() + 25
    alone, body, notes = await rig.before(alone="expired")
    assert (alone.read_by, notes) == (None, [("prefill", "expired")])
    assert "kv_transfer_params" not in body
