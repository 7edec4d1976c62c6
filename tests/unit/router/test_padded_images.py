"""Images that SGLang pads to others of their request, and whose rows are runs of their own (Mistral 3)."""

import io
import json
import shutil

import pytest
from PIL import Image
from unit.router.preparing import MODEL, chat, image, preparing, settings, text

from mmrouter_cli.sample_images import data_uri
from mmrouter_lib.block_keys import Span
from mmrouter_router.sentinels.table import SENTINEL_BASE, fill_sentinels

NAMES = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
UNIT = 28
VALUES = tuple(SENTINEL_BASE + number for number in range(4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tiny model with images as Mistral 3's."""
    made = shutil.copytree(MODEL, tmp_path_factory.mktemp("mistral3") / "model")
    config, tokenizer = (json.loads((made / name).read_text()) for name in ("config.json", "tokenizer.json"))
    last = tokenizer["added_tokens"][-1]
    first = max(each["id"] for each in tokenizer["added_tokens"]) + 1
    tokenizer["added_tokens"] += [{**last, "id": first + at, "content": name} for at, name in enumerate(NAMES)]
    vision = {"model_type": "pixtral", "patch_size": 14, "image_size": 1540}
    config |= {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    config |= {"image_token_id": first, "spatial_merge_size": 2, "vision_config": vision}
    template = (made / "chat_template.jinja").read_text()
    files = {
        "config.json": config,
        "tokenizer.json": tokenizer,
        "preprocessor_config.json": {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 1540}},
        "processor_config.json": {"patch_size": 14, "spatial_merge_size": 2},
    }
    for name, content in files.items():
        (made / name).write_text(json.dumps(content))
    shown = template.replace("<|vision_start|><|image_pad|><|vision_end|>", "[IMG]")
    (made / "chat_template.jinja").write_text(shown)
    return made


async def prepared(folder, *parts, engine="sglang"):
    async with preparing(settings(folder, engine=engine)) as preparer:
        return await preparer.prepare(chat(*parts, engine=engine), None)


async def test_the_rows_of_an_image_are_runs_with_a_token_between_them(folder):
    made = await prepared(folder, text("Look."), image("a", 3 * UNIT))
    (span,) = made.spans
    assert (span.row, span.length, len(span.starts)) == (3, 11, 3)
    filled = fill_sentinels(made.ids, made.spans, lambda _: VALUES).ids
    for start in span.starts:
        assert tuple(filled[start : start + 3]) == VALUES[:3]
        assert filled[start + 3] == made.ids[start + 3] < SENTINEL_BASE
    on_vllm = await prepared(folder, text("Look."), image("a", 3 * UNIT), engine="vllm")
    assert on_vllm.spans == (Span(span.offset, 12, on_vllm.spans[0].identity),)
    assert on_vllm.ids == made.ids


async def test_an_image_that_is_smaller_than_another_is_not_predicted(folder):
    where = "messages[0].content[{}].image_url.url".format
    alike = await prepared(folder, image("a", 56), image("b", 50))
    assert (alike.exactness, alike.reasons) == ("exact", ())
    small = await prepared(folder, image("a", 112), image("b", 56), image("c", 112))
    assert (small.exactness, small.reasons) == ("partial", (f"padding:{where(1)}",))
    crossed = await prepared(folder, picture(112, 56), picture(56, 112))
    assert crossed.reasons == tuple(f"padding:{where(number)}" for number in (0, 1))
    on_vllm = await prepared(folder, image("a", 112), image("b", 56), engine="vllm")
    assert on_vllm.exactness == "exact"


async def test_beside_an_image_of_unknown_size_none_is_predicted(folder):
    made = await prepared(folder, image("a", 56), picture(56, 56, "AVIF"))
    assert made.exactness == "partial"
    assert [reason.partition(":")[0] for reason in made.reasons] == ["padding", "image_format"]


async def test_a_video_beside_images_is_no_image_that_pads_them(folder):
    """SGLang's videos of this family are not modelled, so they have no size."""
    video = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    made = await prepared(folder, image("a", 112), video, image("b", 56))
    assert made.exactness == "affinity"
    assert [reason.partition(":")[0] for reason in made.reasons] == ["media", "padding"]


def picture(width, height, form="PNG"):
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, form)
    return {"type": "image_url", "image_url": {"url": data_uri(file.getvalue())}}
