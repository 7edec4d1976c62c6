"""Audio of a chat: predicted by a WAV file's header, else a place that no key goes through; named for the engine."""

import base64
import io
import json
import shutil
import wave
from array import array

import pytest
from unit.router.preparing import MODEL, SIZE, chat, image, preparing, settings, text
from unit.router.rig import refused
from video_files import mp4

from mmrouter_lib.engines.vllm.adapter import VLLM
from mmrouter_lib.media_identity import media_identity, to_wire
from mmrouter_router.intake import Limits, parse_chat
from mmrouter_router.request.prepare import MAX_REASONS

SOUND = b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(28)
BEFORE = text("The lamps along the quay are lit. " * 8)
START, END, PAD = 1031, 1032, 1033  # of the folder's own tokens
URL = "messages[0].content[{}].{}"
HELD = URL.format(1, "input_audio.data")


def inline(data=SOUND, **fields):
    audio = {"data": base64.b64encode(data).decode(), "format": "wav"}
    return {"type": "input_audio", "input_audio": audio, **fields}


def by_url(data=SOUND, **fields):
    url = f"data:audio/wav;base64,{base64.b64encode(data).decode()}"
    return {"type": "audio_url", "audio_url": {"url": url}, **fields}


@pytest.fixture(scope="module")
def omni(tmp_path_factory):
    """The tiny model as Qwen3-Omni's thinker, with three tokens more."""
    folder = shutil.copytree(MODEL, tmp_path_factory.mktemp("omni") / "model")
    config, tokenizer = (json.loads((folder / name).read_text()) for name in ("config.json", "tokenizer.json"))
    thinker = {**config, "audio_token_id": PAD}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_omni_moe", "thinker_config": thinker}))
    names = ("<|audio_start|>", "<|audio_end|>", "<|audio_pad|>")
    for number, name in enumerate(names, START):
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][-1], "id": number, "content": name})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = (folder / "chat_template.jinja").read_text()
    shown = "{%- elif part.type == 'audio' %}{{- '<|audio_start|><|audio_pad|><|audio_end|>' }}{%- else %}"
    (folder / "chat_template.jinja").write_text(
        template.replace("{%- else %}\n                {{- part.text", f"{shown}{{{{- part.text")
    )
    return folder


@pytest.fixture
async def prepare(omni):
    async with preparing(settings(omni)) as preparer:

        async def prepare(*parts, salt=None, **fields):
            return await preparer.prepare(chat(*parts, **fields), salt)

        yield prepare


@pytest.mark.parametrize("sound", [inline, by_url])
async def test_text_and_images_before_audio_are_predicted_and_no_key_goes_through_it(prepare, sound):
    before = (BEFORE, image("a"), BEFORE)
    plain = await prepare(*before)
    one, again, other = [await prepare(*before, sound(data), BEFORE) for data in (SOUND, SOUND, SOUND + b"x")]
    assert one.exactness == "partial"
    assert [reason.partition(":")[0] for reason in one.reasons] == ["audio"]
    picture, audio = one.spans
    assert one.ids[: audio.offset - 1] == plain.ids[: audio.offset - 1]
    assert one.ids[audio.offset - 1 : audio.end + 1].tolist() == [START, PAD, END]
    whole = (audio.offset - 1) // SIZE
    assert whole * SIZE > picture.end
    keys = [prepared.keys(SIZE) for prepared in (one, again, other)]
    assert keys[0][:whole] == keys[1][:whole] == keys[2][:whole] == plain.keys(SIZE)[:whole]
    assert not set(keys[0][whole:]) & {*keys[1][whole:], *keys[2][whole:]}
    assert len(keys[0]) > whole


async def test_an_image_behind_audio_keeps_its_identity_and_shares_no_block(prepare):
    one, two = [await prepare(inline(), image("a"), BEFORE) for _ in range(2)]
    assert [shown.modality for shown in one.images] == ["image", "audio"]
    assert one.spans[0].identity == two.spans[0].identity == one.images[0].identity
    assert one.spans[1].end <= one.spans[0].offset
    assert not set(one.keys(SIZE)[one.spans[1].offset // SIZE :]) & set(two.keys(SIZE))


async def test_the_first_of_several_recordings_ends_the_prediction_and_each_is_a_reason(prepare):
    prepared = await prepare(BEFORE, inline(), inline(b"other"), by_url())
    places = ("input_audio.data", "input_audio.data", "audio_url.url")
    assert prepared.reasons == tuple(f"audio:{URL.format(number, name)}" for number, name in enumerate(places, 1))
    first, second, third = prepared.spans
    assert first.end <= second.offset < third.offset
    assert len({span.identity for span in prepared.spans}) == 3
    assert prepared.images[0].identity == prepared.images[2].identity, "equal bytes have one name"


@pytest.mark.parametrize("folder", ["omni", "other"])
async def test_reasons_are_of_bounded_number(omni, folder):
    body = {"model": "t", "messages": [{"role": "user", "content": [inline(bytes([n])) for n in range(40)]}]}
    async with preparing(settings(omni if folder == "omni" else MODEL)) as preparer:
        request = parse_chat(json.dumps(body).encode(), Limits(max_images=40), "t")
        assert len((await preparer.prepare(request, None)).reasons) == MAX_REASONS


def wav(samples=16_000, rate=16_000, channels=1, tail=b""):
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(bytes(2 * channels * samples))
    return file.getvalue() + tail


@pytest.mark.parametrize(
    ("samples", "tokens"), [(1, 1), (160, 1), (1281, 2), (15_840, 13), (16_000, 13), (16_001, 14), (480_000, 390)]
)
async def test_a_wav_file_is_predicted_by_its_samples(prepare, samples, tokens):
    one = await prepare(BEFORE, inline(wav(samples)), BEFORE)
    assert (one.exactness, one.reasons, one.spans[0].length) == ("exact", (), tokens)
    assert set(one.ids[one.spans[0].offset : one.spans[0].end]) == {PAD}


async def test_another_recording_changes_keys_from_its_block_on(prepare):
    data = wav(), wav(), wav()[:-1] + b"\1"
    one, same, other = [await prepare(BEFORE, inline(each), BEFORE) for each in data]
    first = one.spans[0].offset // SIZE
    assert one.keys(SIZE) == same.keys(SIZE)
    assert one.keys(SIZE)[:first] == other.keys(SIZE)[:first]
    assert not set(one.keys(SIZE)[first:]) & set(other.keys(SIZE)[first:])


@pytest.mark.parametrize(
    ("data", "fields", "reason"),
    [
        (wav(rate=48_000), {}, f"audio:{HELD}"),
        (wav(channels=2), {}, f"audio:{HELD}"),
        (wav(tail=b"\0\0"), {}, f"audio:{HELD}"),
        (wav()[:-2], {}, f"audio:{HELD}"),
        (wav(samples=0), {}, f"audio:{HELD}"),
        (wav(), {"mm_processor_kwargs": {"truncation": True}}, "processor_options:mm_processor_kwargs"),
        (wav(), {"media_io_kwargs": {"audio": {"audio_backend": "pyav"}}}, "processor_options:media_io_kwargs"),
    ],
)
async def test_a_wav_file_that_does_not_tell_its_tokens_is_not_predicted(prepare, data, fields, reason):
    one, two = [await prepare(BEFORE, inline(data), **fields) for _ in range(2)]
    assert (one.exactness, one.reasons) == ("partial", (reason,))
    assert one.spans[0].identity != two.spans[0].identity


async def test_a_placeholder_that_a_user_typed_takes_the_audio_as_in_the_engine(prepare):
    prepared = await prepare(text("Typed: <|audio_pad|>"), BEFORE, inline())
    assert prepared.spans[0].offset == prepared.ids.index(PAD)


@pytest.mark.parametrize("size", [len(SOUND), 20_000], ids=["parsed", "extracted before parsing"])
@pytest.mark.parametrize("sound", [inline, by_url])
async def test_the_engine_gets_the_bytes_unchanged_and_the_routers_name(prepare, sound, size):
    data = SOUND.ljust(size, b"\1")
    prepared = await prepare(sound(data, uuid="theirs"), text("What?"), salt="s")
    rewritten = VLLM.rewrite_chat(prepared.request.body, prepared.timed_rewrites(), model="m", cache_salt="s")
    name = to_wire(prepared.images[0].identity)
    assert rewritten.body["messages"][0]["content"][0] == by_url(data, uuid=name)
    assert rewritten.removed == ("uuid",)


async def test_the_name_covers_bytes_and_tenant_and_is_not_that_of_a_video(prepare):
    sounds = [inline(), inline(SOUND + b"x")]
    names = [(await prepare(sound, salt=salt)).images[0].identity for sound in sounds for salt in ("a", "b")]
    assert len(set(names)) == 4
    kinds = [media_identity(SOUND, {}, key=bytes(32), modality=kind) for kind in ("image", "video", "audio")]
    assert len(set(kinds)) == 3


async def test_a_video_of_a_family_with_audio_alone_is_placed_by_affinity(prepare):
    url = f"data:video/mp4;base64,{base64.b64encode(mp4()).decode()}"
    prepared = await prepare(inline(), {"type": "video_url", "video_url": {"url": url}})
    reasons = (f"media:{URL.format(1, 'video_url.url')}", f"audio:{URL.format(0, 'input_audio.data')}")
    assert (prepared.exactness, prepared.reasons) == ("affinity", reasons)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_where_audio_is_not_modelled_the_request_is_placed_by_affinity(engine):
    async with preparing(settings(engine=engine)) as preparer:
        request = chat(text("x"), inline(), engine=engine)
        prepared = await preparer.prepare(request, None)
    assert (prepared.exactness, prepared.reasons, prepared.ids) == ("affinity", (f"media:{HELD}",), array("I"))
    assert prepared.timed_rewrites() == []
    assert request.body["messages"][0]["content"][1] == by_url()


@pytest.mark.parametrize(
    ("sound", "media", "code", "field"),
    [
        (inline(bytes(2000)), {"maxBytes": "1Ki"}, "media_too_large", "input_audio.data"),
        (by_url(bytes(2000)), {"maxBytes": "1Ki"}, "media_too_large", "audio_url.url"),
        (by_url() | {"audio_url": {"url": "https://host.example/a.wav"}}, {}, "media_fetch_disabled", "audio_url.url"),
    ],
)
async def test_audio_that_cannot_be_used_is_refused_with_its_field(omni, sound, media, code, field):
    async with preparing(settings(omni, **media)) as preparer:
        error = await refused(preparer.prepare(chat(sound), None))
    assert (error.status, error.code, error.param) == (400, code, URL.format(0, field))
