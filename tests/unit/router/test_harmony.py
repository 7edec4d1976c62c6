"""Requests for gpt-oss."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
import pytest_asyncio
from unit.prompt.o200k import write
from unit.router.preparing import SIZE, chat, image, preparing, settings, text

from mmrouter_router.core.errors import RequestError
from mmrouter_router.core.settings import Settings
from mmrouter_router.intake.messages import TemplateTraits
from mmrouter_router.request.prepare import PromptModel
from mmrouter_router.request.renderer_client import new_nonce
from mmrouter_router.verify.probe_requests import ProbeRequestError, ProbeRequests

DAY = "VLLM_SYSTEM_START_DATE"
WORDS = "The harbour lies still. "


@pytest_asyncio.fixture
async def preparer(tmp_path, monkeypatch):
    monkeypatch.setenv(DAY, "2026-01-02")
    async with preparing(settings(write(tmp_path))) as made:
        yield made


async def test_a_chat_is_exact_and_the_next_turn_has_its_blocks(preparer):
    first = await preparer.prepare(chat(text(WORDS * 10)), None)
    assert (first.exactness, first.reasons) == ("exact", ())
    shown = preparer.prompter.decode(first.ids)
    assert "Current date: 2026-01-02\n" in shown
    assert shown.endswith(f"<|start|>user<|message|>{WORDS * 10}<|end|><|start|>assistant")
    keys = list(first.keys(SIZE))
    longer = chat(text(WORDS * 10))
    longer.body["messages"] += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}]
    assert list((await preparer.prepare(longer, None)).keys(SIZE))[: len(keys)] == keys
    assert len(keys) > 2


def with_variable(given: Settings, variable: dict) -> Settings:
    template = {"spec": {"containers": [{"name": "engine", "env": [variable]}]}}
    deployment = given.deployment
    pools = [pool.model_copy(update={"pod_template": template}) for pool in deployment.spec.pools]
    spec = deployment.spec.model_copy(update={"pools": pools})
    return replace(given, deployment=deployment.model_copy(update={"spec": spec}))


def test_the_day_of_a_pod_template_comes_before_the_routers_own(tmp_path, monkeypatch):
    monkeypatch.setenv(DAY, "2026-01-02")
    given = settings(write(tmp_path))
    assert PromptModel.load(with_variable(given, {"name": DAY, "value": "2026-01-03"})).prompter.day == "2026-01-03"
    unknown = PromptModel.load(with_variable(given, {"name": DAY, "valueFrom": {"configMapKeyRef": {}}}))
    assert (unknown.prompter, unknown.unpredicted) == (None, f"engine_prompts:{DAY}")


async def test_what_the_engine_refuses_is_an_error_of_the_request(preparer):
    with pytest.raises(RequestError) as caught:
        await preparer.prepare(chat(text("Hi"), reasoning_effort="none"), None)
    assert (caught.value.status, caught.value.param) == (400, "messages")


async def test_an_image_and_an_endless_word_are_served_without_a_prediction(preparer):
    prepared = await preparer.prepare(chat(text("Look"), image("a")), None)
    assert (prepared.exactness, prepared.reasons) == ("affinity", ("family:gpt_oss",))
    prepared = await preparer.prepare(chat(text("a" * 40_000)), None)
    assert (prepared.exactness, prepared.reasons) == ("affinity", ("prompt_size:messages",))


def test_disabled_thinking_is_the_lowest_effort(preparer):
    assert TemplateTraits.of(preparer.prompter).no_thinking() == "low"


def test_responses_are_not_modelled(preparer):
    assert not preparer.models_responses


async def test_a_canary_is_repeated_after_midnight(preparer):
    def now() -> datetime:
        return datetime(2026, 1, 1, 23, 59, 30, tzinfo=UTC)

    own = ProbeRequests(settings(), preparer, None, None)
    assert (await own.build(new_nonce(), None, 16)).ids
    preparer.prompter = replace(preparer.prompter, day=None, now=now)
    with pytest.raises(ProbeRequestError, match="day"):
        await own.build(new_nonce(), None, 16)
