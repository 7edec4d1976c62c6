"""Preparation of requests with the repository's tiny model: exact, partial up to an image, or affinity."""

import io
import json
import shutil
from array import array

import pytest
from PIL import Image
from unit.conftest import shared_folder
from unit.router.preparing import MODEL, SIZE, chat, image, preparing, settings, text
from unit.router.rig import Rig, refused

from mmrouter_cli.sample_images import data_uri, picture
from mmrouter_lib.block_keys import block_keys
from mmrouter_lib.families.qwen_vl import QwenVL
from mmrouter_router.core.worker_threads import WorkerThreads
from mmrouter_router.intake import Limits, parse_forwarded

LONG = "The lamps along the quay are lit one after the other while the evening ferry is made fast. " * 4


async def test_plain_request_is_exact_and_reproducible(prepare):
    one, two = [await prepare(text(LONG), image("a"), text("what?")) for _ in range(2)]
    assert (one.exactness, one.reasons) == ("exact", ())
    assert one.keys(SIZE) == two.keys(SIZE)
    assert len(one.spans) == 1
    assert one.spans[0].length == one.images[0].tokens == 16


class RecordedThreads(WorkerThreads):
    """``keys_of``: bytes of token ids whose keys were computed here."""

    def __init__(self):
        super().__init__()
        self.keys_of = []
        self.in_thread = []

    async def run(self, tenant, size, work, *arguments):
        if work.__name__ == "all_keys":
            self.keys_of.append(size)
        return await super().run(tenant, size, work, *arguments)

    async def run_in_thread(self, tenant, size, work, *arguments):
        self.in_thread.append(work.__name__)
        return await super().run_in_thread(tenant, size, work, *arguments)


@pytest.mark.parametrize(("repeats", "in_thread"), [(1, 0), (50, 1)])
async def test_long_text_is_tokenized_in_a_thread_until_it_is_cached(repeats, in_thread):
    threads = RecordedThreads()
    async with preparing(settings(), threads=threads) as preparer:
        first, again = [await preparer.prepare(chat(text(LONG * repeats)), None) for _ in range(2)]
        assert len(threads.in_thread) == in_thread, "the second time its segments are cached"
        assert first.ids == again.ids
        alone = await preparer.prepare(chat(text(LONG * repeats)), None, "another tenant")
        assert len(threads.in_thread) == 2 * in_thread, "tenants share no cached text"
        assert alone.ids == first.ids
    threads.close()


@pytest.mark.parametrize(("repeats", "in_thread"), [(1, False), (200, True)])
async def test_keys_of_a_long_prompt_are_computed_in_a_thread(repeats, in_thread):
    threads = RecordedThreads()
    async with preparing(settings(), threads=threads, key_forms=lambda: {(SIZE, None, 0)}) as preparer:
        prepared = await preparer.prepare(chat(text(LONG * repeats)), None)
        assert threads.keys_of == [4 * len(prepared.ids)] * in_thread
        ready = prepared.keys(SIZE)
        assert list(ready) == list(block_keys(prepared.ids, SIZE, (), prepared.seed))
    threads.close()


async def test_another_image_changes_keys_from_its_block_on(prepare):
    one, other = await prepare(text(LONG), image("a")), await prepare(text(LONG), image("b"))
    first = one.spans[0].offset // SIZE
    assert first > 2
    assert one.keys(SIZE)[:first] == other.keys(SIZE)[:first]
    assert not set(one.keys(SIZE)[first:]) & set(other.keys(SIZE)[first:])


async def test_tenants_share_no_key(prepare):
    one, other = await prepare(text(LONG), salt="t1-a"), await prepare(text(LONG), salt="t1-b")
    assert one.ids == other.ids
    assert not set(one.keys(SIZE)) & set(other.keys(SIZE))


async def test_pixel_options_keep_keys_before_the_image_only(prepare):
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
        ({"vllm_xargs": {"a": 1}}, "engine_arguments:vllm_xargs"),
        ({"truncate_prompt_tokens": 5}, "truncation:truncate_prompt_tokens"),
        ({"chat_template": "{{ messages }}"}, "request_template:chat_template"),
        ({"prompt_logprobs": 1}, "cache_not_read:prompt_logprobs"),
    ],
)
async def test_unmodelled_request_is_affinity_without_keys(prepare, fields, reason):
    prepared = await prepare(text(LONG), **fields)
    assert (prepared.exactness, prepared.reasons, prepared.ids) == ("affinity", (reason,), array("I"))


def avif(seed):
    raw = io.BytesIO()
    Image.open(io.BytesIO(picture(seed, 112, 112))).convert("RGB").save(raw, "AVIF")
    return {"type": "image_url", "image_url": {"url": data_uri(raw.getvalue())}}


async def test_case_39_one_unresolved_image_of_three_keeps_only_the_blocks_before_it(prepare):
    whole = await prepare(image("a"), text(LONG), image("b"), text(LONG), image("c"), text(LONG))
    parts = image("a"), text(LONG), avif("b"), text(LONG), image("c"), text(LONG)
    one, two = await prepare(*parts), await prepare(*parts)
    assert (one.exactness, one.reasons) == ("partial", ("image_format:messages[0].content[2].image_url.url",))
    assert [i.resolved for i in one.images] == [True, False, True]
    first = whole.spans[1].offset // SIZE
    assert first > 8
    assert one.keys(SIZE)[:first] == two.keys(SIZE)[:first] == whole.keys(SIZE)[:first]
    after = [set(prepared.keys(SIZE)[first:]) for prepared in (one, two, whole)]
    assert not after[0] & after[1]
    assert not (after[0] | after[1]) & after[2]


async def test_unresolved_images_never_share_a_key(prepare):
    prompts = [await prepare(avif(seed), text(LONG)) for seed in ("a", "a", "b")]
    keys = [key for prompt in prompts for key in prompt.keys(SIZE)]
    assert keys
    # Nothing of Qwen's own first turn fills a block before the image.
    assert len(set(keys)) == len(keys) - 2 * (prompts[0].spans[0].offset // SIZE)
    assert prompts[0].fingerprint == prompts[1].fingerprint != prompts[2].fingerprint


async def test_each_unresolved_image_is_a_reason_and_a_common_cause_is_one(prepare):
    two = await prepare(avif("a"), avif("b"))
    assert two.reasons == tuple(f"image_format:messages[0].content[{n}].image_url.url" for n in (0, 1))
    both = {"mm_processor_kwargs": {"max_pixels": 5000}, "media_io_kwargs": {"image": {"image_mode": None}}}
    spoiled = await prepare(image("a"), image("b"), **both)
    assert spoiled.exactness == "partial"
    assert spoiled.reasons == ("processor_options:mm_processor_kwargs", "processor_options:media_io_kwargs")
    assert not any(i.resolved for i in spoiled.images)
    worse = await prepare(avif("a"), use_beam_search=True)
    assert worse.exactness == "affinity"
    assert set(worse.reasons) == {"beam_search:use_beam_search", "image_format:messages[0].content[0].image_url.url"}


async def test_processor_options_do_not_affect_text(prepare):
    plain = await prepare(text(LONG))
    options = await prepare(text(LONG), mm_processor_kwargs={"max_pixels": 1}, media_io_kwargs={"image": {"x": 1}})
    assert (options.exactness, options.reasons) == ("exact", ())
    assert options.keys(SIZE) == plain.keys(SIZE)


async def test_options_of_any_medium_affect_the_images_of_a_family_with_one_medium(prepare, monkeypatch):
    options = {"media_io_kwargs": {"audio": {}}}
    assert (await prepare(image("a"), **options)).exactness == "exact"
    monkeypatch.setattr(QwenVL, "one_medium", True)
    prepared = await prepare(image("a"), **options)
    assert (prepared.exactness, prepared.reasons) == ("partial", ("processor_options:media_io_kwargs",))
    assert (await prepare(text(LONG), **options)).exactness == "exact"


async def test_case_12_image_with_other_processor_options_is_another_image():
    found = []
    for processor in ({}, {"maxPixels": 12_544}, {"maxPixels": 12_544 * 2}):
        async with preparing(settings(processor=processor)) as preparer:
            found.append(await preparer.prepare(chat(image("a")), None))
    assert len({prepared.ids.tobytes() for prepared in found}) == 1, "the same number of tokens"
    assert len({prepared.images[0].identity for prepared in found}) == 3


async def test_unresolved_image_is_held_to_the_pixel_limit():
    async with preparing(settings(maxPixels=100 * 100)) as preparer:
        assert "112x112" in str(await refused(preparer.prepare(chat(avif("a")), None)))


async def test_turns_of_a_conversation_share_a_fingerprint(prepare):
    one, again = await prepare(text(LONG), image("a")), await prepare(text(LONG), image("a"), max_tokens=5)
    other = await prepare(text(LONG), image("b"))
    assert one.fingerprint == again.fingerprint != other.fingerprint


WIDE = data_uri(picture("x", 4020, 20))  # no engine takes this aspect ratio


@pytest.mark.parametrize(
    ("url", "says"), [("data:image/png;base64,AAAA", "image"), ("data:,", "empty"), (WIDE, "sides differ")]
)
async def test_invalid_image_is_refused_with_its_field(prepare, url, says):
    error = await refused(prepare(text("x"), {"type": "image_url", "image_url": {"url": url}}))
    assert (error.status, error.param) == (400, "messages[0].content[1].image_url.url")
    assert says in str(error)


@pytest.mark.parametrize(
    ("engine", "family", "reason"),
    [
        ("vllm", "brand_new_vl", "tokenizer:missing"),
        ("sglang", "llava", "family:llava"),
        ("sglang", "phi3_v", "family:phi3_v"),
    ],
)
async def test_unmodelled_family_is_served_by_affinity(tmp_path, engine, family, reason):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "vision_config": {}}))
    async with preparing(settings(tmp_path, engine=engine)) as preparer:
        prepared = await preparer.prepare(chat(text("x"), image("a"), avif("b")), None)
    assert prepared.exactness == "affinity"
    assert prepared.reasons == ("image_format:messages[0].content[2].image_url.url", reason)
    assert (len(prepared.images), prepared.ids) == (2, array("I"))

    rigs = [Rig(), Rig()]
    for rig in rigs:
        for name in "abcd":
            rig.worker(name, range(50))
    first, again, elsewhere = (rigs[n].placer.place(prepared) for n in (0, 0, 1))
    assert (first.policy, first.exactness, first.reasons) == ("consistentHash", "affinity", prepared.reasons)
    assert len({decision.target.worker.member.name for decision in (first, again, elsewhere)}) == 1
    assert first.choice.winner.overlap == 0


SWAPPED = [text("first <|image_2|> then <|image_1|>"), image("a"), image("b")]
UNPREDICTED = {"use_beam_search": True}


@pytest.fixture
async def prepare_phi3():
    """Prepare a parsed request for Phi-3-vision, whose engine crashes on images out of order."""
    folder = shared_folder("MMROUTER_MODELS", "models/microsoft--Phi-3-vision-128k-instruct")
    async with preparing(settings(folder)) as preparer:
        yield lambda request: preparer.prepare(request, None)


def responses(*parts):
    body = {"model": "t", "input": [{"role": "user", "content": list(parts)}]}
    return parse_forwarded(json.dumps(body).encode(), Limits(), "t")


def input_image(seed):
    return {"type": "input_image", "image_url": image(seed)["image_url"]["url"]}


@pytest.mark.parametrize("fields", [{}, UNPREDICTED])
async def test_images_out_of_order_are_refused_with_and_without_prediction(prepare_phi3, fields):
    error = await refused(prepare_phi3(chat(*SWAPPED, **fields)))
    assert (error.status, error.param) == (400, "messages")
    assert "<|image_2|> before <|image_1|>" in str(error)


async def test_images_in_order_are_accepted(prepare_phi3):
    parts = [image("a"), text("first <|image_1|> and <|image_2|>"), image("b")]
    assert (await prepare_phi3(chat(*parts))).exactness == "exact"
    assert (await prepare_phi3(chat(*parts, **UNPREDICTED))).exactness == "affinity"


async def test_forwarded_path_accepts_one_image_only(prepare_phi3):
    one = await prepare_phi3(responses({"type": "input_text", "text": "a"}, input_image("a")))
    assert one.exactness == "affinity"
    error = await refused(prepare_phi3(responses(input_image("a"), input_image("b"))))
    assert (error.status, error.param) == (400, "input[0].content[1].image_url")
    assert "several images" in str(error)


@pytest.mark.parametrize(("model_type", "states"), [("qwen2_vl", False), ("qwen3_5", True), ("new", True)])
async def test_models_whose_layers_are_not_known_to_be_attention_may_have_states(tmp_path, model_type, states):
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    async with preparing(settings(folder)) as preparer:
        assert (await preparer.prepare(chat(text("x")), None)).may_have_states is states
