"""Processor options of a request: images by their limits and the engine's name, or a reason against exactness."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.router.preparing import MODEL, SIZE, chat, image, preparing, settings, text
from unit.router.rig import WORKERS
from unit.router.test_audio import BEFORE
from unit.router.test_videos import video

from mmrouter_lib.engines.vllm.adapter import VLLM
from mmrouter_lib.engines.vllm.item_names import TRUST, name_with_options, trusts_options
from mmrouter_lib.families import load_family
from mmrouter_lib.media_identity import foreign_identity, to_wire

VOLUME = {"model": {"id": "tiny/qwen2-vl", "volume": {"persistentVolumeClaim": {"claimName": "weights"}}}}
ENCODER = {**WORKERS, "name": "encoders", "role": "encoder"}
FIELD = "mm_processor_kwargs"
REASON = (f"processor_options:{FIELD}",)


async def prepared(*parts, own=None, **fields):
    async with preparing(own or settings(args=(TRUST,), spec=VOLUME)) as preparer:
        return await preparer.prepare(chat(*parts, **fields), None)


async def test_an_image_has_the_tokens_of_the_limits_and_the_name_that_the_engine_makes():
    options = {"max_pixels": 28 * 28 * 4, "min_pixels": 28 * 28}
    plain = await prepared(image("a"), text("What?"))
    one = await prepared(image("a"), text("What?"), mm_processor_kwargs=options)
    assert (one.exactness, one.reasons) == ("exact", ())
    assert (plain.spans[0].length, one.spans[0].length) == (16, 4)
    (shown,) = one.images
    assert shown.identity != plain.images[0].identity, "the router's name covers the options"
    name = name_with_options(to_wire(shown.identity), options, str(MODEL))
    assert one.spans[0].identity == foreign_identity(name)
    sent = VLLM.rewrite_chat(one.request.body, [], model="m", cache_salt=None).body
    assert sent[FIELD] == options


async def test_each_option_and_their_order_make_another_image_and_equal_options_the_same():
    texts = (BEFORE, image("a"), text("What?"))
    asked = [{}, {"max_pixels": 99_999}, {"min_pixels": 1}, {"min_pixels": 1, "max_pixels": 99_999}]
    asked += [dict(reversed(asked[-1].items())), asked[-1]]
    keys = [(await prepared(*texts, mm_processor_kwargs=options)).keys(SIZE) for options in asked]
    assert keys[3] == keys[5] != keys[4]
    assert len({tuple(each) for each in keys}) == 5
    assert len({tuple(each[:3]) for each in keys}) == 1, "blocks before the image"


@pytest.mark.parametrize(
    "options",
    [
        {"max_pixels": 50_176.0},
        {"max_pixels": True},
        {"max_pixels": 0},
        {"max_pixels": 2**63},
        {"max_pixels": 100, "min_pixels": 101},
        {"max_pixels": 3135},
        {"max_pixels": None},
        {"images_kwargs": {"max_pixels": 50_176}},
        {"num_crops": 4},
        ["max_pixels"],
    ],
)
async def test_options_that_are_not_modelled_keep_the_blocks_before_the_image(options):
    one, two = [await prepared(BEFORE, image("a"), text("What?"), mm_processor_kwargs=options) for _ in range(2)]
    assert (one.exactness, one.reasons) == ("partial", REASON)
    first = one.spans[0].offset // SIZE
    assert one.keys(SIZE)[:first] == two.keys(SIZE)[:first]
    assert not set(one.keys(SIZE)[first:]) & set(two.keys(SIZE)[first:])


@pytest.mark.parametrize(
    "own",
    [
        settings(spec=VOLUME),
        settings(args=(TRUST,)),
        settings(args=(TRUST, "--mm-hasher-algorithm", "sha256"), spec=VOLUME),
        settings(args=(TRUST, "--no-trust-request-mm-kwargs"), spec=VOLUME),
        settings(args=(TRUST,), spec={**VOLUME, "pools": [WORKERS, ENCODER]}),
        settings(args=(TRUST,), engine="sglang", spec=VOLUME),
    ],
    ids=["not taken", "model from the hub", "another hash", "not taken after all", "beside an encoder", "SGLang"],
)
async def test_where_the_engines_name_is_not_known_options_are_a_reason(own):
    async with preparing(own) as preparer:
        request = chat(image("a"), engine=own.deployment.spec.engine.type, mm_processor_kwargs={"max_pixels": 50_176})
        one = await preparer.prepare(request, None)
    assert (one.exactness, one.reasons) == ("partial", REASON)


async def test_a_video_under_options_is_not_predicted_and_its_images_are():
    one = await prepared(image("a"), video(), mm_processor_kwargs={"max_pixels": 28 * 28 * 4})
    assert (one.exactness, one.reasons) == ("partial", REASON)
    assert [shown.resolved for shown in one.images] == [True, False]


async def test_options_beside_another_reason_are_not_modelled():
    fields = {FIELD: {"max_pixels": 50_176}, "media_io_kwargs": {"image": {"image_mode": "L"}}}
    one = await prepared(image("a"), **fields)
    assert (one.exactness, one.reasons) == ("partial", (*REASON, "processor_options:media_io_kwargs"))


@given(st.integers(1, 2000), st.integers(1, 2000), st.integers(1, 10**6), st.integers(0, 10**6))
def test_counts_under_a_requests_limits_are_those_of_the_resources(width, height, least, more):
    asked = {"min_pixels": least, "max_pixels": least + more}
    family = load_family(MODEL, None).with_options(asked)
    assert family.pixel_options == asked
    assert family.video_id is None
    width = min(width, 100 * height)
    height = min(height, 100 * width)
    resource = type("Limits", (), {**asked, "num_crops": None})
    assert family.count(width, height) == load_family(MODEL, resource).count(width, height)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (
            {"max_pixels": 50_176, "min_pixels": 3136},
            "ad3143d2c41d6c30b2a2312e562a77e1e6631b17f603e7a803744786b0781807",
        ),
        ({"num_crops": 4}, "36a4c8bacaa8581af8d06eba2a3374186b63921b6ed5cd760f5b60f4eff8f9f8"),
    ],
)
def test_names_are_those_that_vllm_0_32_printed(options, name):
    assert name_with_options("m1-" + "ab" * 32, options, "/var/lib/mmrouter/model") == name


@pytest.mark.parametrize(
    ("args", "trusted"),
    [
        ([[TRUST]], True),
        ([[TRUST], ["--seed", "1", TRUST]], True),
        ([], False),
        ([[TRUST], []], False),
        ([[TRUST, "--mm_hasher_algorithm=sha512"]], False),
    ],
)
def test_every_engine_has_to_take_options(args, trusted):
    assert trusts_options(args) is trusted
