"""Images that SGLang pads to others of their request, and whose rows are runs of their own (Mistral 3)."""

import io
import json
import shutil

import pytest
from PIL import Image
from unit.router.preparing import MODEL, chat, image, preparing, settings, text

from mmrouter_cli.sample_images import data_uri
from mmrouter_lib.block_keys import Span
from mmrouter_router.intake import Limits, parse_chat
from mmrouter_router.sentinels.table import SENTINEL_BASE, fill_sentinels
from mmrouter_router.verify.probe_requests import ProbeImage, ProbeRequests

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


async def test_an_image_has_a_name_for_each_size_that_it_is_padded_to(folder):
    (alone,) = names_of(await prepared(folder, image("b", 56)))
    _, alike = names_of(await prepared(folder, image("a", 50), image("b", 56)))
    assert alike == alone  # as many rows and columns
    names = set()
    for others in ([image("a", 112)], [picture(112, 20), picture(20, 112)], [image("c", 112), picture(30, 30)]):
        made = await prepared(folder, *others, image("b", 56))
        assert (made.exactness, made.reasons, made.images[-1].padding) == ("exact", (), (112, 112))
        names.add(names_of(made)[-1])
    assert len(names) == 1
    names |= {alone, names_of(await prepared(folder, image("a", 140), image("b", 56)))[-1]}
    assert len(names) == 3
    on_vllm = await prepared(folder, image("a", 112), image("b", 56), engine="vllm")
    assert on_vllm.images[1].padding is None


async def test_a_larger_image_leaves_the_fingerprint_of_a_conversation_as_it_is(folder):
    first = {"role": "user", "content": [image("b", 56), text("What is it?")]}
    later = [{"role": "assistant", "content": "A lamp."}, {"role": "user", "content": [image("a", 112)]}]
    one, two = [await of_messages(folder, *messages) for messages in ([first], [first, *later])]
    assert names_of(one)[0] != names_of(two)[0]
    assert [each.images[0].identity for each in (one, two)] == [one.images[0].identity] * 2
    longer = await of_messages(folder, first, later[0], {"role": "user", "content": "Why?"})
    assert two.fingerprint == longer.fingerprint


async def test_a_padding_is_never_larger_than_what_is_not_scaled_down(folder):
    made = await prepared(folder, picture(2000, 30), picture(30, 2000))
    assert [each.padding for each in made.images] == [(1540, 1540)] * 2


async def test_a_probe_of_a_padded_image_shows_another_of_that_size_behind_it(folder):
    async with preparing(settings(folder, engine="sglang")) as preparer:
        made = await preparer.prepare(chat(image("a", 112), image("b", 56), engine="sglang"), None)
        probes = ProbeRequests(settings(folder, engine="sglang"), preparer, None, None)
        shown = made.images[1]
        asked = ProbeImage(shown.name, shown.media.data, shown.media.mime, shown.tokens, (56, 56), shown.padding)
        request = await probes.build("nonce", asked, 16)
        again = await preparer.prepare(parsed(request.body), None)
    assert (again.images[0].name, again.images[0].padding) == (shown.name, (112, 112))
    assert again.images[1].padding is None
    assert request.span == again.spans[0]
    assert request.ids == again.ids


async def test_beside_an_image_of_unknown_size_none_is_predicted(folder):
    made = await prepared(folder, image("a", 56), picture(56, 56, "AVIF"))
    assert made.exactness == "partial"
    assert [reason.partition(":")[0] for reason in made.reasons] == ["padding", "image_format"]


async def test_a_video_beside_images_is_no_image_that_pads_them(folder):
    """SGLang's videos of this family are not modelled, so they have no size."""
    video = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    made = await prepared(folder, image("a", 112), video, image("b", 56))
    assert made.exactness == "affinity"
    assert [reason.partition(":")[0] for reason in made.reasons] == ["media"]
    assert [each.padding for each in made.images if each.modality == "image"] == [None, (112, 112)]


async def of_messages(folder, *messages):
    body = json.dumps({"model": "t", "messages": messages}).encode()
    async with preparing(settings(folder, engine="sglang")) as preparer:
        return await preparer.prepare(parsed(body), None)


def names_of(made):
    return [each.name for each in made.images]


def parsed(body):
    return parse_chat(body, Limits(), "t", "sglang")


def picture(width, height, form="PNG"):
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, form)
    return {"type": "image_url", "image_url": {"url": data_uri(file.getvalue())}}
