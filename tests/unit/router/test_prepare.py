"""Requests -> token ids and spans, with the repository's own tiny model: exact, partial up to an image, or affinity."""

import json
from array import array
from pathlib import Path

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from mmrouter.api import parse_deployment
from mmrouter_cli.pictures import data_uri, picture
from mmrouter_router.errors import RequestError
from mmrouter_router.intake import Limits, parse_chat
from mmrouter_router.media import MediaResolver
from mmrouter_router.prepare import Preparer
from mmrouter_router.settings import CurveKeys, Settings

MODEL = Path(__file__).resolve().parents[3] / "examples" / "models" / "tiny-qwen2-vl"
SIZE = 16


def settings(model_dir: Path = MODEL, **media) -> Settings:
    spec = {
        "model": {"id": "m"},
        "engine": {"type": "vllm", "blockSize": SIZE},
        "routing": {"media": media},
        "pools": [{"name": "worker", "role": "worker", "replicas": 1, "accelerator": {"kind": "cpu"}}],
    }
    resource = {"apiVersion": "mmrouter.io/v1alpha1", "kind": "MMRouterDeployment", "metadata": {"name": "t"}}
    deployment = parse_deployment({**resource, "spec": spec})
    keys = CurveKeys(b"", b"", b"")
    return Settings(deployment, "r", "127.0.0.1", Path(), model_dir, bytes(32), "k", "t", keys)


@pytest_asyncio.fixture
async def prepare():
    """Call with messages and further fields; returns what the router would place."""
    own = settings()
    media = MediaResolver(own.deployment.spec.routing.media, registry=CollectorRegistry())
    preparer = Preparer(own, media)

    async def call(*parts, salt=None, **fields):
        body = {"model": "t", "messages": [{"role": "user", "content": list(parts)}], **fields}
        return await preparer.prepare(parse_chat(json.dumps(body).encode(), Limits(), "t"), salt)

    yield call
    await media.close()


def text(words):
    return {"type": "text", "text": words}


def image(seed, side=112):
    return {"type": "image_url", "image_url": {"url": data_uri(picture(seed, side, side))}}


LONG = "The lamps along the quay are lit one after the other while the evening ferry is made fast. " * 4


async def test_an_ordinary_request_is_exact_and_repeats_itself(prepare):
    one, two = [await prepare(text(LONG), image("a"), text("what?")) for _ in range(2)]
    assert (one.exactness, one.reasons) == ("exact", ())
    assert one.keys(SIZE) == two.keys(SIZE)
    assert len(one.spans) == 1
    assert one.spans[0].length == one.images[0].tokens == 16


async def test_another_image_changes_every_key_from_its_block_on_and_none_before(prepare):
    one, other = await prepare(text(LONG), image("a")), await prepare(text(LONG), image("b"))
    first = one.spans[0].offset // SIZE
    assert first > 2
    assert one.keys(SIZE)[:first] == other.keys(SIZE)[:first]
    assert not set(one.keys(SIZE)[first:]) & set(other.keys(SIZE)[first:])


async def test_tenants_share_no_key(prepare):
    one, other = await prepare(text(LONG), salt="t1-a"), await prepare(text(LONG), salt="t1-b")
    assert one.ids == other.ids
    assert not set(one.keys(SIZE)) & set(other.keys(SIZE))


async def test_options_that_change_pixels_leave_the_text_before_the_image_exact_and_poison_the_rest(prepare):
    exact = await prepare(text(LONG), image("a"), text(LONG))
    options = {"mm_processor_kwargs": {"max_pixels": 5000}}
    one, two = [await prepare(text(LONG), image("a"), text(LONG), **options) for _ in range(2)]
    assert (one.exactness, one.reasons) == ("partial", ("processor_options:mm_processor_kwargs",))
    first = exact.spans[0].offset // SIZE
    assert one.keys(SIZE)[:first] == two.keys(SIZE)[:first] == exact.keys(SIZE)[:first]
    after = [set(prepared.keys(SIZE)[first:]) for prepared in (one, two, exact)]
    assert not after[0] & after[1]
    assert not after[0] & after[2]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"a_new_field": 1}, "unknown_field:a_new_field"),
        ({"truncate_prompt_tokens": 5}, "truncation:truncate_prompt_tokens"),
        ({"chat_template": "{{ messages }}"}, "request_template:chat_template"),
        ({"mm_processor_kwargs": {"max_pixels": 1}}, "processor_options:mm_processor_kwargs"),
    ],
)
async def test_what_is_not_modelled_is_affinity_with_its_reason_and_has_no_keys(prepare, fields, reason):
    prepared = await prepare(text(LONG), **fields)
    assert (prepared.exactness, prepared.reasons, prepared.ids) == ("affinity", (reason,), array("I"))


async def test_the_turns_of_a_conversation_share_a_fingerprint_and_other_beginnings_do_not(prepare):
    one, again = await prepare(text(LONG), image("a")), await prepare(text(LONG), image("a"), max_tokens=5)
    other = await prepare(text(LONG), image("b"))
    assert one.fingerprint == again.fingerprint != other.fingerprint


@pytest.mark.parametrize(("url", "says"), [("data:image/png;base64,AAAA", "image"), ("data:,", "empty")])
async def test_a_picture_that_is_none_names_its_field(prepare, url, says):
    with pytest.raises(RequestError) as caught:
        await prepare(text("x"), {"type": "image_url", "image_url": {"url": url}})
    assert (caught.value.status, caught.value.param) == (400, "messages[0].content[1].image_url.url")
    assert says in str(caught.value)


async def test_an_aspect_that_the_processor_refuses_is_a_400(prepare):
    with pytest.raises(RequestError) as caught:
        await prepare({"type": "image_url", "image_url": {"url": data_uri(picture("x", 4020, 20))}})
    assert caught.value.status == 400


async def test_a_family_that_is_not_modelled_is_served_by_affinity(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "brand_new_vl"}')
    own = settings(tmp_path)
    media = MediaResolver(own.deployment.spec.routing.media, registry=CollectorRegistry())
    body = {"model": "t", "messages": [{"role": "user", "content": [text("x"), image("a")]}]}
    prepared = await Preparer(own, media).prepare(parse_chat(json.dumps(body).encode(), Limits(), "t"), None)
    assert (prepared.exactness, prepared.reasons) == ("affinity", ("family:brand_new_vl",))
    assert len(prepared.images) == 1
    await media.close()
