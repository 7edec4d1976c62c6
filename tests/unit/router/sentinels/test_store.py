"""Which provider names an image, what proves or refutes it, and what is known afterwards."""

import hashlib
import json
import threading
from array import array

import pytest
from unit.router.preparing import SIZE as BLOCK
from unit.router.preparing import chat, image, preparing, settings, text

from mmrouter_cli.sample_images import data_uri, picture
from mmrouter_lib.block_keys import Span, block_keys
from mmrouter_lib.engines.sglang.identity import Fingerprint, artifact_hash_of, sentinels
from mmrouter_router.core.worker_threads import INLINE_BYTES
from mmrouter_router.request import prepare as stage
from mmrouter_router.sentinels import evidence
from mmrouter_router.sentinels.align import SentRequest
from mmrouter_router.sentinels.evidence import BLIND_SECONDS, RankEpoch, SentinelStore, plan_fingerprints
from mmrouter_router.sentinels.table import SentinelTable

PROCESSOR = "sglang.srt.multimodal.processors.qwen_vl.QwenVLImageProcessor"
# Proved against captures of a real engine in tests/unit/engines/test_sglang_identity.py.
QWEN3, QWEN25 = (
    Fingerprint(
        transformers="5.19.0",
        processor_class=PROCESSOR,
        wrapper_class=f"transformers.models.{kind}.processing_{kind}.{name}Processor",
        model_type=kind,
        architectures=(f"{name}ForConditionalGeneration",),
    )
    for kind, name in (("qwen3_vl", "Qwen3VL"), ("qwen2_5_vl", "Qwen2_5_VL"))
)
SCOPE, LINE = ("0.5.23/f", "worker"), RankEpoch("uid", 1, 0)
CANARY, IMAGE, OTHER = b"canary", b"image", b"other"
SIZE, SEED = 4, 5
UNEXPLAINED = (2000001, 2000002, 2000003, 2000004)  # of no known fingerprint


def facts(fingerprint: Fingerprint = QWEN3, **more) -> dict[str, str]:
    facts = {
        "architectures": list(fingerprint.architectures or ()),
        "revision": fingerprint.revision,
        "mm_process_config": fingerprint.mm_process_config,
        "mm_feature_transport": "auto",
        "image_processor_backend": "auto",
        "disable_fast_image_processor": False,
        **more,
    }
    return {"model_type": fingerprint.model_type} | {name: json.dumps(value) for name, value in facts.items()}


def made_of(data: bytes, fingerprint: Fingerprint = QWEN3, *, legacy: bool = False) -> tuple[int, ...]:
    return sentinels(artifact_hash_of(hashlib.sha256(data).hexdigest(), fingerprint, {}), legacy=legacy)


class Rig:
    def __init__(self, facts: dict[str, str], version: str = "0.5.23") -> None:
        self.now = 1000.0
        self.events: list[str] = []
        self.known = SentinelStore(count=self.events.append, clock=lambda: self.now, probe_images=[(CANARY, CANARY)])
        self.known.describe(SCOPE, version, facts)

    def values(self, data: bytes) -> tuple[int, ...] | None:
        return self.known.values(SCOPE, data, data)  # these tests' images are their own identity

    def observed(self, data: bytes, values: tuple[int, ...]) -> None:
        self.known.on_observed(SCOPE, data, data, values)

    def provider(self) -> str:
        return self.known.provider(SCOPE)[0]


def asked(identity: bytes, text: int = 6) -> SentRequest:
    return SentRequest(array("I", [*range(text), *[7] * 5, *range(6)]), (Span(text, 5, identity),), SIZE, SEED)


def place(request: SentRequest) -> tuple[int | None, int]:
    before = request.spans[0].offset // SIZE
    return block_keys(array("Q", request.ids), SIZE, (), SEED)[before - 1], request.spans[0].offset % SIZE


@pytest.fixture
def rig():
    return Rig(facts())


@pytest.mark.parametrize(
    ("version", "model_type", "cache", "predicts"),
    [
        ("0.5.23", "qwen3_vl", 0, True),
        ("0.5.23", "qwen3_vl_moe", 0, True),
        ("0.5.23", "qwen2_5_vl", 256, True),
        ("0.5.23", "qwen2_vl", 64, True),
        ("0.5.23", "qwen2_5_vl", 0, False),
        ("0.5.23", "qwen2_vl", None, False),
        ("0.5.23", "paddleocr_vl", 256, True),
        ("0.5.23", "paddleocr_vl", 0, False),
        ("0.5.23", "glm4v", 256, False),
        ("0.5.23", "llava", 256, False),
        ("0.5.23", "", 256, False),
        ("0.5.10", "qwen3_vl", 0, False),
        ("0.5.22", "qwen3_vl", 0, True),
        ("0.5.22", "qwen2_vl", 0, False),
    ],
)
def test_version_model_type_and_flags_decide_predictability(version, model_type, cache, predicts):
    chosen = plan_fingerprints(version, {"model_type": model_type, "mm_preprocess_cache_size_mb": json.dumps(cache)})
    assert bool(chosen.candidates) is predicts
    assert chosen.why


@pytest.mark.parametrize("fingerprint", [QWEN3, QWEN25])
def test_recorded_fingerprint_is_the_first_candidate_unless_the_engine_is_language_only(fingerprint):
    beside = facts(fingerprint, mm_preprocess_cache_size_mb=64, language_only=True)
    assert plan_fingerprints("0.5.23", beside).candidates == ()
    assert plan_fingerprints("0.5.23", beside | {"language_only": "false"}).candidates[0] == fingerprint


@pytest.mark.parametrize(
    "near", [{}, {"transformers": "5.18.0"}, {"transformers": "5.21.1"}, {"feature_transport": "cuda_ipc"}]
)
def test_predictions_start_with_a_proven_fingerprint_of_any_near_library_or_transport(rig, near):
    fingerprint = Fingerprint(**{name: getattr(QWEN3, name) for name in QWEN3.__struct_fields__} | near)
    assert (rig.provider(), rig.values(IMAGE)) == ("learned", None)
    rig.observed(CANARY, made_of(CANARY, fingerprint))
    assert (rig.provider(), rig.values(IMAGE)) == ("artifact", made_of(IMAGE, fingerprint))
    assert rig.events == ["calibrated"]


def test_an_older_release_is_predicted_to_write_one_sentinel_per_image():
    rig = Rig(facts(), "0.5.22")
    rig.observed(CANARY, made_of(CANARY, legacy=True))
    assert (rig.provider(), rig.values(IMAGE)) == ("artifact", made_of(IMAGE, legacy=True))
    assert len(made_of(IMAGE, legacy=True)) == 1


def test_recalled_sightings_calibrate_a_new_router(rig):
    rig.known.on_sighting(SCOPE, LINE, (123, 2), made_of(CANARY), 4, live=False)
    assert (rig.provider(), rig.values(IMAGE)) == ("artifact", made_of(IMAGE))


def test_unexplained_engine_is_learned(rig):
    rig.observed(CANARY, UNEXPLAINED)
    assert (rig.provider(), rig.values(IMAGE)) == ("learned", None)
    assert rig.values(CANARY) == UNEXPLAINED
    assert rig.events == ["demoted", "learned"]
    rig.known.on_sighting(SCOPE, LINE, (123, 2), made_of(CANARY), 4, live=True)
    assert rig.provider() == "learned"  # what was demoted stays so


def test_contradicted_prediction_demotes_the_scope_and_keeps_proofs(rig):
    rig.observed(CANARY, made_of(CANARY))
    assert rig.values(IMAGE) == made_of(IMAGE)
    assert rig.values(OTHER) == made_of(OTHER)
    rig.observed(IMAGE, UNEXPLAINED)
    assert rig.provider() == "learned"
    assert rig.values(IMAGE) == UNEXPLAINED
    assert rig.values(OTHER) is None
    assert rig.values(CANARY) == made_of(CANARY)
    assert "demoted" in rig.events
    assert "predict" in rig.known.provider(SCOPE)[1]


def test_first_sighting_proves_or_refutes_a_prediction():
    for seen, event in ((made_of(IMAGE), "proven"), (made_of(OTHER, QWEN25), "demoted")):
        rig = Rig(facts())
        rig.now += BLIND_SECONDS
        rig.observed(CANARY, made_of(CANARY))
        assert rig.values(IMAGE) == made_of(IMAGE)
        rig.known.on_request(SCOPE, LINE, asked(IMAGE))
        rig.known.on_sighting(SCOPE, LINE, place(asked(IMAGE)), seen, 5, live=True)
        assert event in rig.events
        assert rig.values(IMAGE) == seen


def test_sightings_are_ignored_while_other_routers_send_images():
    rig = Rig(facts(model_type="llava"))
    values = (2000001,)

    def learned() -> bool:
        rig.known.on_request(SCOPE, LINE, asked(IMAGE))
        rig.known.on_sighting(SCOPE, LINE, place(asked(IMAGE)), values, 5, live=True)
        return rig.values(IMAGE) == values

    assert not learned()  # a router that has just started
    rig.now += BLIND_SECONDS
    rig.known.suspend_alignment()
    assert not learned()  # another frontend is there
    rig.now += BLIND_SECONDS
    assert learned()


def test_ended_epoch_is_dropped():
    rig = Rig(facts(model_type="llava"))
    rig.now += BLIND_SECONDS
    rig.known.on_request(SCOPE, LINE, asked(IMAGE))
    rig.known.on_request(SCOPE, LINE._replace(epoch=2), asked(OTHER))
    rig.known.on_sighting(SCOPE, LINE, place(asked(IMAGE)), (2000001,), 5, live=True)
    assert rig.values(IMAGE) is None


def test_full_table_evicts_the_least_recently_used_image():
    table = SentinelTable(size=2)
    for number, name in enumerate((b"1", b"2")):
        table.put(name, (number,), proven=True)
    table.get(b"1")
    table.put(b"3", (3,), proven=True)
    assert [table.get(name) is not None for name in (b"1", b"2", b"3")] == [True, False, True]
    assert (table.owned((0,)), table.owned((1,)), len(table)) == (True, False, 2)


SCOPES = [("0.5.23/f", pool) for pool in ("large", "small")]


@pytest.fixture
def threads(monkeypatch):
    """The threads in which each image was hashed, by its bytes."""
    seen: dict[bytes, list[threading.Thread]] = {}

    def noted(data: bytes) -> str:
        seen.setdefault(data, []).append(threading.current_thread())
        return hashed(data)

    hashed = evidence.sha256_of
    monkeypatch.setattr(evidence, "sha256_of", noted)
    monkeypatch.setattr(stage, "sha256_of", noted)
    return seen


def known(*, calibrated: bool) -> SentinelStore:
    sentinels = SentinelStore(probe_images=[(CANARY, CANARY)])
    for scope in SCOPES:
        sentinels.describe(scope, "0.5.23", facts())
        if calibrated:
            sentinels.on_observed(scope, CANARY, CANARY, made_of(CANARY))
    return sentinels


@pytest.mark.parametrize("calibrated", [True, False], ids=["calibrated", "calibrated meanwhile"])
async def test_image_is_hashed_once_and_a_large_one_in_a_thread(threads, calibrated):
    small = picture("a", 112, 112)
    large = picture("b", 112, 112) + bytes(INLINE_BYTES)
    parts = [{"type": "image_url", "image_url": {"url": data_uri(data)}} for data in (small, large)]
    async with preparing(settings(engine="sglang"), sentinels=known(calibrated=calibrated)) as preparer:
        threads.clear()
        for _ in range(2):
            prepared = await preparer.prepare(chat(*parts), None)
            for scope in SCOPES:
                preparer.sentinels.on_observed(scope, CANARY, CANARY, made_of(CANARY))
                assert prepared.filled(scope).unknown is None
                assert len(prepared.keys(BLOCK, scope)) > 0
                for span, data in zip(prepared.spans, (small, large), strict=True):
                    assert tuple(prepared.filled(scope).ids[span.offset : span.offset + 4]) == made_of(data)
    assert [len(threads[data]) for data in (small, large)] == [1, 1]
    assert threads[large][0] is not threading.current_thread()


async def test_images_are_not_hashed_without_predictions(threads):
    sentinels = known(calibrated=False)
    for scope in SCOPES:
        sentinels.on_observed(scope, CANARY, CANARY, UNEXPLAINED)
    threads.clear()
    async with preparing(settings(engine="sglang"), sentinels=sentinels) as preparer:
        prepared = await preparer.prepare(chat(text("look"), image("c", 56)), None)
    assert [prepared.filled(scope).unknown for scope in SCOPES] == [0, 0]
    sentinels.on_observed(SCOPES[0], b"seen", b"seen", UNEXPLAINED)
    assert threads == {}
