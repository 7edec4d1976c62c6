"""Phi-3-vision, whose engine crashes on images out of order: such requests are refused."""

import json
import os
from pathlib import Path

import pytest
import pytest_asyncio
from unit.router.test_prepare import image, settings, text

from mmrouter_router.core.errors import RequestError
from mmrouter_router.intake import Limits, parse_chat, parse_forwarded
from mmrouter_router.media import MediaResolver
from mmrouter_router.request.prepare import Preparer
from mmrouter_router.telemetry.metrics import Metrics

MODELS = Path(os.environ.get("MMROUTER_MODELS", Path(__file__).resolve().parents[4] / "shared" / "models"))
SWAPPED = [text("first <|image_2|> then <|image_1|>"), image("a"), image("b")]
UNPREDICTED = {"use_beam_search": True}


@pytest_asyncio.fixture
async def prepare():
    """Prepare a parsed request for Phi-3-vision."""
    folder = MODELS / "microsoft--Phi-3-vision-128k-instruct"
    if not folder.is_dir():
        pytest.skip(f"not run: no model folder at {folder} (MMROUTER_MODELS)")
    own = settings(folder)
    media = MediaResolver(own.deployment.spec.routing.media, metrics=Metrics())
    preparer = Preparer(own, media)
    yield lambda request: preparer.prepare(request, None)
    await media.close()


def chat(*parts, **fields):
    body = {"model": "t", "messages": [{"role": "user", "content": list(parts)}], **fields}
    return parse_chat(json.dumps(body).encode(), Limits(), "t")


def responses(*parts):
    body = {"model": "t", "input": [{"role": "user", "content": list(parts)}]}
    return parse_forwarded(json.dumps(body).encode(), Limits(), "t")


def input_image(seed):
    return {"type": "input_image", "image_url": image(seed)["image_url"]["url"]}


@pytest.mark.parametrize("fields", [{}, UNPREDICTED])
async def test_images_out_of_order_are_refused_with_and_without_prediction(prepare, fields):
    with pytest.raises(RequestError, match=r"<\|image_2\|> before <\|image_1\|>") as refused:
        await prepare(chat(*SWAPPED, **fields))
    assert (refused.value.status, refused.value.param) == (400, "messages")


async def test_images_in_order_are_accepted(prepare):
    parts = [image("a"), text("first <|image_1|> and <|image_2|>"), image("b")]
    assert (await prepare(chat(*parts))).exactness == "exact"
    assert (await prepare(chat(*parts, **UNPREDICTED))).exactness == "affinity"


async def test_forwarded_path_accepts_one_image_only(prepare):
    assert (await prepare(responses({"type": "input_text", "text": "a"}, input_image("a")))).exactness == "affinity"
    with pytest.raises(RequestError, match="several images") as refused:
        await prepare(responses(input_image("a"), input_image("b")))
    assert (refused.value.status, refused.value.param) == (400, "input[0].content[1].image_url")
