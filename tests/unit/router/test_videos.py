"""Videos of a chat: predicted from their headers, named for the engine, or a reason against exactness."""

import base64
from array import array

import pytest
from unit.router.preparing import SIZE, chat, image, preparing, settings, text
from unit.router.rig import refused
from video_files import mp4, webm

from mmrouter_lib.engines.sglang.adapter import SGLANG
from mmrouter_lib.engines.vllm.adapter import VLLM
from mmrouter_lib.media_identity import to_wire

URL = "messages[0].content[{}].video_url.url"
SCOPE = "0.5.23", "pool"
PAD, IMAGE_PAD, START, END = 1030, 1029, 1027, 1028  # of the tiny model


def video(data=None, **fields):
    url = f"data:video/mp4;base64,{base64.b64encode(mp4() if data is None else data).decode()}"
    return {"type": "video_url", "video_url": {"url": url}, **fields}


async def test_a_video_is_predicted_whole(prepare):
    prepared = await prepare(text("Look: "), video(), text("What happens?"))
    assert (prepared.exactness, prepared.reasons) == ("exact", ())
    (span,), (shown,) = prepared.spans, prepared.images
    # 60 frames of 30 a second: 4 are taken, two of which make a slice of 56x56 pixels, 2x2 tokens.
    assert (shown.width, shown.height, shown.tokens, span.length) == (64, 48, 8, 8)
    assert (span.identity, shown.modality) == (shown.identity, "video")
    assert prepared.ids[span.offset - 1 : span.end + 1].tolist() == [START, *[PAD] * 8, END]


async def test_webm_has_the_tokens_of_the_same_frames_in_mp4(prepare):
    one, two = [await prepare(video(data), text("What?")) for data in (mp4(), webm())]
    assert (one.exactness, two.exactness) == ("exact", "exact")
    assert one.ids == two.ids


@pytest.mark.parametrize("padding", [0, 20_000], ids=["parsed", "extracted before parsing"])
async def test_the_engine_gets_the_bytes_and_the_identity(prepare, padding):
    data = mp4(extra=bytes(4) + b"\0\0") if not padding else mp4(frames=padding)
    prepared = await prepare(video(data, uuid="theirs"), text("What?"))
    assert prepared.exactness == "exact"
    rewritten = VLLM.rewrite_chat(prepared.request.body, prepared.timed_rewrites(), model="m", cache_salt=None)
    part = rewritten.body["messages"][0]["content"][0]
    assert part == {
        "type": "video_url",
        "video_url": video(data)["video_url"],
        "uuid": to_wire(prepared.images[0].identity),
    }
    assert rewritten.removed == ("uuid",)


async def test_case_38_images_and_videos_each_take_their_own_placeholders(prepare):
    prepared = await prepare(video(), image("a"), video(mp4(frames=120)), text("What?"))
    assert [shown.modality for shown in prepared.images] == ["image", "video", "video"]
    picture, first, second = prepared.spans
    assert first.end < picture.offset < picture.end < second.offset
    assert [span.identity for span in prepared.spans] == [shown.identity for shown in prepared.images]
    assert {prepared.ids[at] for at in range(picture.offset, picture.end)} == {IMAGE_PAD}
    assert {prepared.ids[at] for at in range(second.offset, second.end)} == {PAD}
    assert (first.length, second.length) == (8, 16)


async def test_another_video_changes_keys_from_its_block_on(prepare):
    before = text("The lamps along the quay are lit. " * 8)
    one, same, other = [
        await prepare(before, video(data), text("What?")) for data in (mp4(), mp4(), mp4(extra=bytes(4)))
    ]
    first = one.spans[0].offset // SIZE
    assert first > 3
    assert one.keys(SIZE) == same.keys(SIZE)
    assert one.keys(SIZE)[:first] == other.keys(SIZE)[:first]
    assert not set(one.keys(SIZE)[first:]) & set(other.keys(SIZE)[first:])
    assert one.ids == other.ids


async def test_tenants_name_a_video_differently(prepare):
    one, two = [await prepare(video(), text("What?"), salt=salt) for salt in ("a", "b")]
    assert one.images[0].identity != two.images[0].identity


@pytest.mark.parametrize(
    ("data", "fields", "reason"),
    [
        (b"RIFF" + bytes(50), {}, f"video_format:{URL.format(1)}"),
        (mp4(times=[(30, 1), (30, 2)]), {}, f"video_timing:{URL.format(1)}"),
        (webm(step=0), {}, f"video_timing:{URL.format(1)}"),
        (mp4(), {"media_io_kwargs": {"video": {"fps": 1}}}, "processor_options:media_io_kwargs"),
        (mp4(), {"mm_processor_kwargs": {"fps": 1}}, "processor_options:mm_processor_kwargs"),
        (mp4(4000, 4000, 10_000, scale=2), {}, f"prompt_size:{URL.format(1)}"),
    ],
)
async def test_a_video_that_is_not_predicted_keeps_the_blocks_before_it(prepare, data, fields, reason):
    before = text("The lamps along the quay are lit. " * 8)
    whole = await prepare(before, video(), text("What? " * 9))
    one, two = [await prepare(before, video(data), text("What? " * 9), **fields) for _ in range(2)]
    assert (one.exactness, one.reasons) == ("partial", (reason,))
    first = whole.spans[0].offset // SIZE
    assert one.keys(SIZE)[:first] == two.keys(SIZE)[:first] == whole.keys(SIZE)[:first]
    assert len(one.keys(SIZE)) > first > 3
    assert not set(one.keys(SIZE)[first:]) & set(two.keys(SIZE)[first:])


async def test_options_of_a_video_do_not_affect_images(prepare):
    prepared = await prepare(image("a"), text("What?"), media_io_kwargs={"video": {"fps": 1}})
    assert prepared.exactness == "exact"


async def test_on_sglang_blocks_before_a_video_count_and_images_beside_it_are_unresolved():
    before, after = text("The lamps along the quay are lit. " * 8), text("What? " * 9)
    async with preparing(settings(engine="sglang")) as preparer:
        one, two, alone, pictured = [
            await preparer.prepare(chat(*parts, engine="sglang"), None)
            for parts in ((before, video(), after),) * 2 + ((before,), (before, image("a"), video(), after))
        ]
    where = one.ids.tolist().index(PAD)
    assert (one.exactness, one.reasons) == ("partial", (f"video:{URL.format(1)}",))
    assert one.ids[where - 1 : where + 2].tolist() == [START, PAD, END]
    assert one.ids[: where - 1] == alone.ids[: where - 1]  # which ends behind the text
    first = where // SIZE
    assert one.keys(SIZE, SCOPE)[:first] == two.keys(SIZE, SCOPE)[:first]
    assert not set(one.keys(SIZE, SCOPE)[first:]) & set(two.keys(SIZE, SCOPE)[first:])
    assert [reason.partition(":")[0] for reason in pictured.reasons] == ["video", "video"]
    rewritten = SGLANG.rewrite_chat(one.request.body, one.timed_rewrites(), model="m", cache_salt=None)
    assert rewritten.body["messages"][0]["content"][1] == video()


async def test_where_videos_are_not_modelled_the_request_is_placed_by_affinity():
    async with preparing(settings(processor={"maxPixels": 100_000})) as preparer:
        request = chat(text("x"), video())
        prepared = await preparer.prepare(request, None)
    assert (prepared.exactness, prepared.reasons, prepared.ids) == ("affinity", (f"media:{URL.format(1)}",), array("I"))
    assert prepared.timed_rewrites() == []
    assert request.body["messages"][0]["content"][1]["video_url"]["url"].startswith("data:video/mp4;base64,")


@pytest.mark.parametrize(
    ("data", "media", "code", "says"),
    [
        (mp4(frames=1), {}, "invalid_video", "at least 2 are needed"),
        (mp4(width=60_000, height=20), {}, "invalid_video", "differ by more than 200 times"),
        (mp4(), {"maxPixels": 3000}, "invalid_video", "64x48 pixels are more than the 3000 allowed"),
        (mp4(frames=1000), {"maxBytes": "1Ki"}, "media_too_large", "larger than the limit of 1024 bytes"),
    ],
)
async def test_a_video_that_cannot_be_used_is_refused_with_its_field(data, media, code, says):
    async with preparing(settings(**media)) as preparer:
        error = await refused(preparer.prepare(chat(video(data)), None))
    assert (error.status, error.code, error.param) == (400, code, URL.format(0))
    assert says in error.message
