"""Requests for a model with Mistral's own tokenizer."""

import pytest
import pytest_asyncio
from unit.prompt.tekken import write
from unit.router.preparing import SIZE, chat, image, preparing, settings, text

from mmrouter_router.core.errors import RequestError
from mmrouter_router.core.worker_threads import WorkerThreads
from mmrouter_router.request.prepare import INLINE_TEXT

WORDS = "The harbour lies still. "


class CountedThreads(WorkerThreads):
    """Counts the prompts that are made in a thread."""

    prompts = 0

    async def run_in_thread(self, tenant, size, work, *arguments):
        self.prompts += 1
        return await super().run_in_thread(tenant, size, work, *arguments)


@pytest.fixture
def threads():
    made = CountedThreads()
    yield made
    made.close()


@pytest_asyncio.fixture
async def preparer(tmp_path, threads):
    async with preparing(settings(write(tmp_path)), threads=threads) as made:
        yield made


async def test_a_chat_is_exact_and_the_next_turn_has_its_blocks(preparer):
    first = await preparer.prepare(chat(text(WORDS * 10)), None)
    assert (first.exactness, first.reasons) == ("exact", ())
    assert preparer.prompter.decode(first.ids) == f"<s>[INST]{WORDS * 10}[/INST]"
    keys = list(first.keys(SIZE))
    longer = chat(text(WORDS * 10))
    longer.body["messages"] += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}]
    assert list((await preparer.prepare(longer, None)).keys(SIZE))[: len(keys)] == keys
    assert len(keys) > 2


async def test_only_long_texts_are_tokenized_outside_of_the_event_loop(preparer, threads):
    await preparer.prepare(chat(text("Hi")), None)
    assert threads.prompts == 0
    await preparer.prepare(chat(text(WORDS * (INLINE_TEXT // len(WORDS) + 1))), None)
    assert threads.prompts == 1


async def test_many_tokens_of_images_are_made_outside_of_the_event_loop(tmp_path, threads):
    folder = write(tmp_path, {"image_patch_size": 2, "max_image_size": 112})
    async with preparing(settings(folder), threads=threads) as preparer:
        await preparer.prepare(chat(image("a", 20)), None)
        assert threads.prompts == 0
        await preparer.prepare(chat(image("a")), None)
        assert threads.prompts == 1


async def test_what_the_library_refuses_is_an_error_of_the_request(preparer):
    with pytest.raises(RequestError) as caught:
        await preparer.prepare(chat(text("Hi"), chat_template_kwargs={"a": 1}), None)
    assert (caught.value.status, caught.value.param) == (400, "messages")


async def test_an_image_of_a_model_that_takes_them_is_exact(tmp_path):
    sizes = {"image_patch_size": 16, "max_image_size": 1024}
    async with preparing(settings(write(tmp_path, sizes))) as preparer:
        prepared = await preparer.prepare(chat(text("Look"), image("a"), text("and"), image("b", 64)), None)
        assert (prepared.exactness, prepared.reasons) == ("exact", ())
        assert [span.length for span in prepared.spans] == [7 * 8, 4 * 5]
        swapped = await preparer.prepare(chat(text("Look"), image("c"), text("and"), image("b", 64)), None)
        keys = zip(prepared.keys(SIZE), swapped.keys(SIZE), strict=True)
        assert [mine == other for mine, other in keys].count(True) == prepared.spans[0].offset // SIZE


async def test_an_image_and_an_endless_word_are_served_without_a_prediction(preparer):
    prepared = await preparer.prepare(chat(text("Look"), image("a")), None)
    assert (prepared.exactness, prepared.reasons) == ("affinity", ("family:mistral",))
    prepared = await preparer.prepare(chat(text("a" * 40_000)), None)
    assert (prepared.exactness, prepared.reasons) == ("affinity", ("prompt_size:messages",))


def test_responses_are_not_modelled(preparer):
    assert not preparer.models_responses
