"""Images that the engine scales down together where they may not fit the context."""

import base64
import io
import json
import shutil
import wave

import pytest
from PIL import Image
from unit.router.preparing import MODEL, chat, image, preparing, settings, text

from mmrouter_cli.sample_images import data_uri
from mmrouter_lib.families.nemotron_omni import ARCHITECTURES

NAMES = ["<image>", "<img>", "</img>", "<so_embedding>", "<so_start>", "<so_end>"]
SOUND = {"sampling_rate": 16_000, "subsampling_factor": 8, "subsampling_conv_kernel_size": 3}
LEAST = 1024  # patches: a picture of 112 pixels has fewer, so it becomes 256 tokens and the two around them
CONTEXT = 3332  # of which four tokens are reserved: the largest image fits


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tiny model with images as Nemotron Omni's."""
    made = shutil.copytree(MODEL, tmp_path_factory.mktemp("nemotron") / "model")
    config, tokenizer = (json.loads((made / name).read_text()) for name in ("config.json", "tokenizer.json"))
    config |= {"architectures": [ARCHITECTURES[0]], "model_type": ARCHITECTURES[0], "patch_size": 16}
    sizes = {"min_num_patches": LEAST, "max_num_patches": 13_312}
    config |= {"downsample_ratio": 0.5, "vision_config": {"args": sizes}}
    config |= {"sound_config": {**SOUND, "subsampling_conv_stride": 2}}
    (made / "config.json").write_text(json.dumps(config))
    last = tokenizer["added_tokens"][-1]
    tokenizer["added_tokens"] += [{**last, "id": last["id"] + at, "content": name} for at, name in enumerate(NAMES, 1)]
    (made / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = (made / "chat_template.jinja").read_text()
    template = template.replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>")
    shown = "{%- elif part.type == 'audio' %}{{- '<so_embedding>' }}{%- elif part.type == 'video' %}"
    template = template.replace("{%- elif part.type == 'video' %}", shown)
    (made / "chat_template.jinja").write_text(template)
    return made


@pytest.mark.parametrize(
    ("context", "images", "exactness"),
    [(CONTEXT, 12, "exact"), (CONTEXT, 13, "affinity"), (CONTEXT - 1, 1, "affinity"), (0, 1, "affinity")],
)
async def test_images_are_predicted_while_the_smallest_context_has_room_for_all(folder, context, images, exactness):
    async with preparing(settings(folder, maxImages=20), context_length=lambda: context) as preparer:
        prepared = await preparer.prepare(chat(text("Look."), *map(image, "abcdefghijklm"[:images])), None)
    assert prepared.exactness == exactness
    assert prepared.reasons == (("image_sizes:messages",) if exactness == "affinity" else ())
    assert [span.length for span in prepared.spans] == [LEAST // 4 + 2] * (images if exactness == "exact" else 0)


@pytest.mark.parametrize(("context", "exactness"), [(CONTEXT + 1, "exact"), (CONTEXT, "affinity")])
async def test_each_recording_takes_a_token_of_the_images_room(folder, context, exactness):
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16_000)
        out.writeframes(bytes(2 * 16_000))
    url = f"data:audio/wav;base64,{base64.b64encode(file.getvalue()).decode()}"
    audio = {"type": "audio_url", "audio_url": {"url": url}}
    async with preparing(settings(folder), context_length=lambda: context) as preparer:
        prepared = await preparer.prepare(chat(image("a"), audio), None)
    assert prepared.exactness == exactness, prepared.reasons


async def test_texts_are_predicted_whatever_the_context(folder):
    async with preparing(settings(folder)) as preparer:
        assert (await preparer.prepare(chat(text("Look.")), None)).exactness == "exact"


async def test_no_image_is_predicted_beside_one_of_unknown_size(folder):
    file = io.BytesIO()
    Image.new("RGB", (64, 48)).save(file, "AVIF")
    unknown = {"type": "image_url", "image_url": {"url": data_uri(file.getvalue()).replace("image/png", "image/avif")}}
    async with preparing(settings(folder), context_length=lambda: 32_768) as preparer:
        prepared = await preparer.prepare(chat(image("a"), unknown), None)
    assert prepared.exactness == "affinity"
    assert [reason.partition(":")[0] for reason in prepared.reasons] == ["image_format", "image_sizes"]
