"""Requests for gpt-oss."""

import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest
import pytest_asyncio
from unit.prompt.o200k import write
from unit.router.preparing import SIZE, chat, image, preparing, settings, text

from mmrouter_lib.engines.vllm.harmony_responses import chat_of
from mmrouter_lib.prompt.harmony_turns import turns_of
from mmrouter_router.core.errors import RequestError
from mmrouter_router.core.settings import Settings
from mmrouter_router.intake import Limits, parse_responses
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


def response(preparer, given, **fields):
    raw = json.dumps({"model": "demo", "input": given, **fields}).encode()
    return parse_responses(raw, Limits(), "demo", chat_of=preparer.response_chat, modelled=preparer.models_responses)


async def test_a_response_is_forwarded_with_the_prompt_of_a_chat(preparer):
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": WORDS}
    thoughts = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Look"}]}
    items = [{"role": "user", "content": WORDS * 10}, thoughts, call, output]
    tool = {"type": "function", "name": "look", "description": "d", "parameters": None}
    made = response(preparer, items, instructions="Be brief.", tools=[tool], reasoning={"effort": "low"})
    prepared = await preparer.prepare(made, None)
    assert (prepared.exactness, prepared.reasons) == ("exact", ())
    assert made.body["input"] == items
    asked = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": WORDS * 10},
        {"role": "assistant", "reasoning": "Look", "tool_calls": [{"id": "c", "type": "function"}]},
        {"role": "tool", "tool_call_id": "c", "content": WORDS},
    ]
    asked[2]["tool_calls"][0]["function"] = {"name": "look", "arguments": "{}"}
    function = {name: tool[name] for name in ("name", "description", "parameters")}
    fields = {"tools": [{"type": "function", "function": function}], "reasoning_effort": "low"}
    assert preparer.prompter.prompt({"messages": asked, **fields}, ()).ids == prepared.ids


@pytest.mark.parametrize(
    ("given", "fields", "reason"),
    [
        ("x", {"truncation": "auto"}, "truncation:truncation"),
        ("x", {"truncation": None}, "truncation:truncation"),
        ("x", {"previous_response_id": "r"}, "stored_messages:previous_response_id"),
        ("x", {"tools": [{"type": "code_interpreter"}]}, "not_modelled:tools[0].type"),
        ([{"role": "user", "content": []}], {}, "not_modelled:input[0].content"),
        (
            [{"role": "user", "content": [{"type": "refusal", "refusal": "No"}]}],
            {},
            "not_modelled:input[0].content[0].type",
        ),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}], {}, "not_modelled:input[1].content"),
        ([{"type": "reasoning", "summary": []}, {"role": "system", "content": "x"}], {}, "not_modelled:input[1].role"),
        ([{"type": "function_call_output", "call_id": "c", "output": "x"}], {}, "not_modelled:input[0].call_id"),
        ([{"type": "reasoning", "content": [{"text": ""}]}], {}, "not_modelled:input[0].content"),
        ([{"type": "item_reference", "id": "x"}], {}, "not_modelled:input[0].type"),
    ],
)
def test_what_is_not_modelled_of_a_response_has_a_reason(preparer, given, fields, reason):
    (found,) = response(preparer, given, **fields).inexact
    assert found.label == reason


def test_the_output_of_a_call_is_that_of_the_last_call_before_it():
    call = {"type": "function_call", "call_id": "c", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "x"}
    items = [{**call, "name": "a"}, output, {**call, "name": "b"}, output]
    first, _, second, _ = turns_of(chat_of({"input": items}).body["messages"])
    authors = [turn.author for turn in turns_of(chat_of({"input": items}).body["messages"])]
    assert (first.calls, second.calls) == ("a", "b")
    assert authors == ["assistant", "functions.a", "assistant", "functions.b"]


async def test_a_canary_is_repeated_after_midnight(preparer):
    def now() -> datetime:
        return datetime(2026, 1, 1, 23, 59, 30, tzinfo=UTC)

    own = ProbeRequests(settings(), preparer, None, None)
    assert (await own.build(new_nonce(), None, 16)).ids
    preparer.prompter = replace(preparer.prompter, day=None, now=now)
    with pytest.raises(ProbeRequestError, match="day"):
        await own.build(new_nonce(), None, 16)
