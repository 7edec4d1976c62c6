"""Every field that could change a prompt, through the router's own stages and to a real vLLM.

A field is exact, and then the engine's ids, places and identities are the predicted ones; or the decision carries a
reason that names the field; or the request is a 400 that names it. That every field has a judgement is tested by
``test_request_fields``. Nothing here is a copy of the router: requests are
parsed, prepared and rewritten by it.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import answer_forms as forms
import pytest
from conformance.conftest import Shrunk
from conformance.engine_process import BLOCK_SIZE, RENDERS, SPAWNED, Engine, engine, parsed
from conformance.rendering import Renderer, renderer
from conformance.workload import STORY, WEATHER, image_part, picture, text_part

from mmrouter_lib.engines.base.adapter import ImageRewrite
from mmrouter_lib.engines.vllm.adapter import VLLM, prompt_error_field
from mmrouter_lib.media_identity import to_wire
from mmrouter_router.core.errors import RequestError
from mmrouter_router.core.settings import CurveKeys, Settings
from mmrouter_router.intake import Limits, parse_chat
from mmrouter_router.media.resolve import MediaResolver
from mmrouter_router.request.prepare import Preparer, PromptModel
from mmrouter_router.request.prepared import Prepared
from mmrouter_router.telemetry.metrics import Metrics

MODEL = "Qwen/Qwen2-VL-2B-Instruct"
SALT = "t1-salt-of-the-tenant"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}|{{ mood | default('calm') }}\n"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROCESSOR = {"minPixels": 12_544, "maxPixels": 50_176}

PHOTO = image_part(picture(336, 224))
OTHER = image_part(picture(200, 300, seed=2))
AVIF = image_part(picture(224, 336, seed=3, form="AVIF"))
TEXTS = [{"role": "system", "content": STORY}, {"role": "user", "content": "What did the baker count?"}]
LOOK = [{"role": "system", "content": STORY}, {"role": "user", "content": [text_part("Look:"), PHOTO, text_part("?")]}]
TWO = [{"role": "user", "content": [text_part(STORY), PHOTO, text_part("or"), AVIF, text_part("?"), OTHER]}]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Ulm"}'}}
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "developer", "content": [text_part("Be kind."), text_part("Be right.")]},
    {"role": "user", "content": [PHOTO, text_part("Warm?")], "name": "Ann"},
    {"role": "assistant", "content": None, "reasoning_content": "Look it up.", "tool_calls": [CALL]},
    {"role": "tool", "content": "21 degrees", "tool_call_id": "c1"},
    {"role": "system", "content": "Be polite."},
    {"role": "user", "content": "And tomorrow?"},
]
OPEN = [*TEXTS, {"role": "assistant", "content": "The baker counted "}]
TOOLS = {"tools": [WEATHER, {"type": "function", "function": {"name": "time", "strict": True}}]}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}

EXACT: dict[str, dict[str, Any]] = {
    "nothing": {},
    "tools": TOOLS,
    "tool_choice none": {**TOOLS, "tool_choice": "none"},
    "tool_choice auto": {**TOOLS, "tool_choice": "auto", "parallel_tool_calls": False},
    "tool_choice required": {**TOOLS, "tool_choice": "required"},
    "tool_choice named": {**TOOLS, "tool_choice": {"type": "function", "function": {"name": "time"}}},
    "documents": {"documents": [{"title": "Log", "text": "Seven lamps."}]},
    "add_generation_prompt": {"add_generation_prompt": False},
    "continue_final_message": {"messages": OPEN, "add_generation_prompt": False, "continue_final_message": True},
    "add_special_tokens": {"add_special_tokens": True},
    "several system messages, developer, name, tool calls, reasoning": {"messages": TURNS},
    "chat_template_kwargs": {"chat_template_kwargs": {"add_vision_id": True, "unheard_of": 1}},
    "chat_template_kwargs.tools": {"chat_template_kwargs": {"tools": [WEATHER]}},
    "chat_template_kwargs.documents": {"chat_template_kwargs": {"documents": [{"text": "Seven."}]}},
    "chat_template_kwargs.add_generation_prompt": {"chat_template_kwargs": {"add_generation_prompt": False}},
    "chat_template_kwargs.tokenize": {"messages": TEXTS, "chat_template_kwargs": {"tokenize": True}},
    "chat_template_kwargs of Jinja": {"chat_template_kwargs": {"namespace": 1, "range": 2, "dict": None}},
    "reasoning_effort": {"reasoning_effort": "low"},
    "reasoning_effort none": {"reasoning_effort": "none", "include_reasoning": False},
    "response_format": {"response_format": SCHEMA},
    "structured_outputs": {"structured_outputs": {"choice": ["yes", "no"]}},
    "sampling": {
        "n": 2,
        "temperature": 1,
        "stop": ["x"],
        "logit_bias": {"5": 1},
        "logprobs": True,
        "top_logprobs": 1,
        "seed": 3,
    },
    "truncation_side": {"truncation_side": "left"},
    "bookkeeping": {
        "user": "u",
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "store": False,
        "priority": 0,
        "session_id": "s",
    },
    "reporting": {"return_token_ids": True, "return_prompt_text": True, "include_stop_str_in_output": True},
    "cache_salt": {"cache_salt": "another tenant's"},
    "kv_transfer_params": {"messages": TEXTS, "kv_transfer_params": {"prompt_token_ids": [1, 2, 3]}},
    "uuid": {"messages": [{"role": "user", "content": [{**PHOTO, "uuid": "mine"}]}]},
    "detail": {"messages": [{"role": "user", "content": [image_part(picture(64, 64), detail="low"), OTHER]}]},
    "mm_processor_kwargs, empty": {"mm_processor_kwargs": {}},
}

TRUSTED_EXACT: dict[str, dict[str, Any]] = {
    "custom template": {},
    "custom template, its variable": {"chat_template_kwargs": {"mood": "stormy"}},
    "mm_processor_kwargs of a text": {"messages": TEXTS, "mm_processor_kwargs": {"max_pixels": 28 * 28}},
    "media_io_kwargs of a text": {"messages": TEXTS, "media_io_kwargs": {"image": {"image_mode": None}}},
    "media_io_kwargs of another modality": {"media_io_kwargs": {"video": {"num_frames": 2}, "image": {}}},
}
"""The same with the resource's template and processor options, in an engine that trusts its clients' options."""

PARTIAL: dict[str, tuple[dict[str, Any], str]] = {
    "mm_processor_kwargs": ({"mm_processor_kwargs": {"max_pixels": 28 * 28 * 16}}, "processor_options"),
    "media_io_kwargs": ({"media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 0]}}}, "processor_options"),
    "messages[0].content[3].image_url.url": ({"messages": TWO}, "image_format"),
}
"""Field -> a request in which it makes images unpredictable, and the cause."""

AFFINITY: dict[str, tuple[dict[str, Any], str, bool]] = {
    "truncate_prompt_tokens": ({"messages": TEXTS, "truncate_prompt_tokens": 20}, "truncation", True),
    "chat_template": ({"chat_template": TEMPLATE.replace("calm", "wild")}, "request_template", True),
    "chat_template_kwargs.truncation": (
        {"messages": TEXTS, "chat_template_kwargs": {"truncation": True, "max_length": 9, "tokenize": True}},
        "template_argument",
        False,
    ),
    "vllm_xargs": ({"vllm_xargs": {"anything": 1}}, "engine_arguments", False),
    "use_beam_search": ({"use_beam_search": True}, "beam_search", False),
    "prompt_logprobs": ({"prompt_logprobs": 1}, "cache_not_read", False),
    "echo": ({"echo": True}, "cache_not_read", False),
}
"""Field -> a request with it, the cause, and whether the engine's prompt differs from one without the field."""

REFUSED: dict[str, dict[str, Any]] = {
    "tools": {"tools": []},
    "continue_final_message": {"messages": OPEN, "continue_final_message": True},
    "add_generation_prompt": {"add_generation_prompt": "perhaps"},
    "chat_template_kwargs": {"chat_template_kwargs": [1]},
    "chat_template_kwargs.messages": {"chat_template_kwargs": {"messages": []}},
    "chat_template_kwargs.conversation": {"chat_template_kwargs": {"conversation": []}},
    "chat_template_kwargs.chat_template": {"chat_template_kwargs": {"chat_template": "x"}},
    "documents[0]": {"documents": ["x"]},
}
"""Field -> what we answer with a 400 that names it, and the engine with an error as well."""

REFUSED_THERE: dict[str, dict[str, Any]] = {
    "mm_processor_kwargs": {"mm_processor_kwargs": {"max_pixels": 784}},
    "media_io_kwargs": {"media_io_kwargs": {"image": {"image_mode": None}}},
    "tool_choice": {"tool_choice": "auto"},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 100_000},
}
"""Field -> what the engine answers with a 400, in words in which we find the field."""


@dataclass
class Router:
    """The router's stages from intake to the rewritten body, for one model folder and resource."""

    folder: Path
    processor: dict[str, int] = field(default_factory=dict)
    template: str = ""
    args: tuple[str, ...] = ()  # of the engines, which have the folder from a volume then
    context: int = 0  # of the engines, in tokens; 0: unknown

    def prepare(self, fields: dict[str, Any], salt: str | None = None) -> Prepared:
        return asyncio.run(self._prepare(fields, salt))

    def body(self, prepared: Prepared) -> dict[str, Any]:
        images = [ImageRewrite(i.message, i.part, i.media.data_uri(), to_wire(i.identity)) for i in prepared.images]
        sent = VLLM.rewrite_chat(prepared.request.body, images, model=self.folder.name, cache_salt=prepared.salt)
        return sent.body

    def client_body(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.folder.name, "messages": LOOK, **fields}

    @cached_property
    def _model(self) -> PromptModel:
        return PromptModel.load(self._settings())

    async def _prepare(self, fields: dict[str, Any], salt: str | None) -> Prepared:
        own = self._settings()
        media = MediaResolver(own.deployment.spec.routing.media, metrics=Metrics())
        try:
            raw = json.dumps(self.client_body(fields)).encode()
            preparer = Preparer(own, media, self._model, context_length=lambda: self.context)
            return await preparer.prepare(parse_chat(raw, Limits(), self.folder.name), salt)
        finally:
            await media.close()

    def _settings(self) -> Settings:
        config = self.folder.parent / "config"
        made: dict[str, Any] = {"type": "vllm", "blockSize": BLOCK_SIZE, "processor": self.processor}
        if self.template:
            (config / "chat-template").mkdir(parents=True, exist_ok=True)
            (config / "chat-template" / "template.jinja").write_text(self.template)
            made["chatTemplate"] = {"configMap": {"name": "t", "key": "template"}}
        pool = {"name": "worker", "role": "worker", "replicas": 1, "accelerator": {"kind": "cpu"}}
        model: dict[str, Any] = {"id": MODEL}
        if self.args:
            made["args"], model["volume"] = list(self.args), {"persistentVolumeClaim": {"claimName": "weights"}}
        deployment = parsed({"model": model, "engine": made, "pools": [pool]})
        return Settings(
            deployment, "r", "127.0.0.1", config, self.folder, bytes(32), "k", "t", (CurveKeys(b"", b"", b""),)
        )


@pytest.fixture(scope="module")
def router(shrunk: Shrunk) -> Router:
    return Router(shrunk(MODEL))


@pytest.fixture(scope="module")
def alone(vllm_env: Path, router: Router, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine as the product starts it, with the parser for tool choices; only this file fills its cache."""
    log = tmp_path_factory.mktemp("fields") / "engine.log"
    parser = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with engine(vllm_env, router.folder, log, RENDERS, *parser, variables=SPAWNED) as running:
        yield running


@pytest.fixture(scope="module")
def server(alone: Engine) -> Renderer:
    """The same engine, for rendered prompts only, which do not use its caches."""
    return Renderer(alone.client)


@pytest.fixture(scope="module")
def bare(vllm_env: Path, router: Router, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Router, Renderer]]:
    """An engine with the resource's template and processor options, which trusts clients' options."""
    folder = tmp_path_factory.mktemp("bare")
    own = Router(router.folder, PROCESSOR, TEMPLATE)
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    options = json.dumps({"min_pixels": PROCESSOR["minPixels"], "max_pixels": PROCESSOR["maxPixels"]})
    flags = ("--chat-template", str(template), "--mm-processor-kwargs", options)
    trust = ("--trust-request-mm-kwargs", "--trust-request-chat-template")
    with renderer(vllm_env, router.folder, folder / "renderer.log", *flags, *trust) as running:
        yield own, running


def assert_exact(own: Router, running: Renderer, fields: dict[str, Any]) -> None:
    prepared = own.prepare(fields, SALT)
    assert (prepared.exactness, prepared.reasons) == ("exact", ())
    answer = running.render(own.body(prepared))
    assert answer.ids == prepared.ids.tolist()
    assert answer.images == [(to_wire(span.identity), span.offset, span.length) for span in prepared.spans]
    assert answer.body["cache_salt"] == SALT


@pytest.mark.parametrize("name", EXACT)
def test_a_field_that_is_modelled_gives_the_prompt_of_the_engine(name: str, router: Router, server: Renderer) -> None:
    assert_exact(router, server, EXACT[name])


def test_case_37_an_image_goes_to_the_placeholder_that_a_user_typed_as_in_the_engine(
    router: Router, server: Renderer
) -> None:
    parts = [text_part("<|image_pad|> is typed, the other is not:"), PHOTO, text_part("<|image_pad|>")]
    assert_exact(router, server, {"messages": [{"role": "user", "content": parts}]})


@pytest.mark.parametrize("name", TRUSTED_EXACT)
def test_template_and_processor_options_of_the_resource_give_the_prompt_of_the_engine(
    name: str, bare: tuple[Router, Renderer]
) -> None:
    assert_exact(*bare, TRUSTED_EXACT[name])


@pytest.mark.parametrize("name", PARTIAL)
def test_case_39_an_image_that_is_not_predicted_leaves_the_prompt_before_it_exact(
    name: str, bare: tuple[Router, Renderer]
) -> None:
    own, running = bare
    fields, cause = PARTIAL[name]
    prepared = own.prepare(fields, SALT)
    assert (prepared.exactness, prepared.reasons) == ("partial", (f"{cause}:{name}",))
    answer = running.render(own.body(prepared))
    first = next(number for number, image in enumerate(prepared.images) if not image.resolved)
    at = prepared.spans[first].offset
    assert at >= BLOCK_SIZE
    assert answer.ids[:at] == prepared.ids[:at].tolist()
    found = answer.images
    assert found[:first] == [(to_wire(s.identity), s.offset, s.length) for s in prepared.spans[:first]]
    assert found[first][1] == at
    assert to_wire(prepared.spans[first].identity) not in {name for name, _, _ in found}
    if cause == "processor_options":
        # The engine's hash covers the options, so its cache never mixes this with the plain image.
        assert to_wire(prepared.images[first].identity) not in {name for name, _, _ in found}


def test_case_12_the_same_image_under_other_processor_options_is_another_to_the_engine_and_to_us(
    bare: tuple[Router, Renderer], router: Router
) -> None:
    own, running = bare
    ours = [one.prepare({}).spans[0].identity for one in (own, router)]
    assert ours[0] != ours[1]
    bodies = [own.body(own.prepare({"mm_processor_kwargs": options})) for options in ({}, {"max_pixels": 12_544})]
    theirs = [running.render(body).images[0][0] for body in bodies]
    assert theirs[0] == to_wire(ours[0]) != theirs[1]


@pytest.mark.parametrize("name", AFFINITY)
def test_a_field_that_is_not_modelled_is_named_and_never_exact(name: str, bare: tuple[Router, Renderer]) -> None:
    own, running = bare
    fields, cause, differs = AFFINITY[name]
    prepared = own.prepare(fields)
    assert prepared.exactness == "affinity"
    assert f"{cause}:{name}" in prepared.reasons
    assert not prepared.ids
    if differs:
        plain = own.prepare({key: value for key, value in fields.items() if key != name})
        assert running.render(own.body(prepared)).ids != plain.ids.tolist()


@pytest.mark.parametrize("name", REFUSED)
def test_what_we_refuse_names_its_field_and_the_engine_refuses_it_too(
    name: str, router: Router, server: Renderer
) -> None:
    with pytest.raises(RequestError) as caught:
        router.prepare(REFUSED[name])
    assert (caught.value.status, caught.value.param) == (400, name)
    assert server.render(router.client_body(REFUSED[name])).status >= 400


@pytest.mark.parametrize("name", REFUSED_THERE)
def test_what_the_engine_refuses_names_its_field(name: str, router: Router, server: Renderer) -> None:
    answer = server.render(router.body(router.prepare(REFUSED_THERE[name])))
    assert answer.status == 400
    assert prompt_error_field(answer.status, answer.body) == name


def cached(running: Engine, body: dict[str, Any]) -> int:
    details = running.chat(body)["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def test_what_is_labelled_cache_not_read_is_not_read(router: Router, alone: Engine) -> None:
    plain = router.body(router.prepare({}))
    cached(alone, plain)
    assert cached(alone, plain) >= BLOCK_SIZE
    for name in ("echo", "prompt_logprobs"):
        asked = router.body(router.prepare(AFFINITY[name][0]))
        assert cached(alone, asked) == 0, name


@pytest.mark.parametrize("name", ["response_format", "structured_outputs", "sampling", "bookkeeping", "reporting"])
def test_what_only_shapes_the_answer_reads_the_blocks_of_the_plain_request(
    name: str, router: Router, alone: Engine
) -> None:
    plain = router.prepare({})
    cached(alone, router.body(plain))
    whole = (len(plain.ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert cached(alone, router.body(router.prepare(EXACT[name]))) == whole


@pytest.mark.parametrize("name", forms.ASKED)
def test_several_answers_probabilities_and_echoes_have_the_form_that_the_simulated_engine_gives(
    name: str, alone: Engine
) -> None:
    path, body = forms.ASKED[name]
    answer = alone.client.post(path, json={"model": alone.model, "ignore_eos": True, **body})
    assert answer.status_code == 200, answer.text
    assert forms.told(answer.json()) == forms.EXPECTED[name]


@pytest.mark.parametrize("name", forms.FORMS)
def test_a_form_that_the_simulated_engine_answers_is_answered(name: str, alone: Engine) -> None:
    fields, matching = forms.FORMS[name]
    body = {"model": alone.model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 100, **fields}
    answer = alone.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    if choice["finish_reason"] == "stop":
        assert re.fullmatch(matching, choice["message"]["content"], re.DOTALL)


@pytest.mark.parametrize("name", forms.REFUSED_FORMS)
def test_a_form_that_the_simulated_engine_refuses_is_refused(name: str, alone: Engine) -> None:
    body = {"model": alone.model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
    answer = alone.client.post("/v1/chat/completions", json=body | forms.REFUSED_FORMS[name])
    assert answer.status_code == 400, answer.text


def test_messages_have_the_form_that_the_simulated_engine_gives(alone: Engine) -> None:
    asked = {"model": alone.model, "ignore_eos": True, **forms.MESSAGE}
    answer = alone.client.post("/v1/messages", json=asked)
    assert answer.status_code == 200, answer.text
    assert forms.message_told(answer.json()) == forms.MESSAGE_FORM
    assert forms.events_told(alone.client.post("/v1/messages", json={**asked, "stream": True}).text) == forms.EVENTS


def test_a_tenants_salt_replaces_the_clients_and_parts_tenants(router: Router, alone: Engine) -> None:
    salted = [router.body(router.prepare({"cache_salt": "one for all"}, salt)) for salt in ("t1-a", "t1-b")]
    assert [cached(alone, body) for body in salted] == [0, 0]
    assert cached(alone, salted[0]) >= BLOCK_SIZE
