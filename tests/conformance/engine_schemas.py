"""Read an engine's own request models, its server's OpenAPI and its sampling parameters, from its environment.

One process reads all of it, because importing an engine takes most of the time.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from conformance.own_code import EngineError, answer_of

from mmrouter_lib.engines.base.request_fields import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Endpoint

MODULES = {"vllm": "vllm.entrypoints.{}.protocol", "sglang": "sglang.srt.entrypoints.{}.protocol"}
MODELS: dict[Endpoint, tuple[str, str, str]] = {
    CHAT: ("ChatCompletionRequest", "chat_completion", "chat.completion_create_params.CompletionCreateParamsBase"),
    COMPLETIONS: ("CompletionRequest", "completion", "completion_create_params.CompletionCreateParamsBase"),
    RESPONSES: ("ResponsesRequest", "responses", "responses.response_create_params.ResponseCreateParamsBase"),
    MESSAGES: ("AnthropicMessagesRequest", "", ""),
}
"""Endpoint -> the engine's model, vLLM's folder of it, and the parameters of OpenAI's client."""

PROGRAM = """
import importlib, json, sys, traceback

def schema(module, name):
    return getattr(importlib.import_module(module), name).model_json_schema()

def fields(module, name):
    fields = getattr(importlib.import_module(module), name).model_fields
    return [*fields, *(alias for field in fields.values() if (alias := field.alias))]

def parameters(path):
    place, name = path.rsplit(".", 1)
    return [*getattr(importlib.import_module("openai.types." + place), name).__annotations__, "stream"]

def openapi():
    return app().openapi()

def read(function, *arguments):
    try:
        return {"read": function(*arguments)}
    except Exception as error:  # of one part, by the engine's own code; the others are read
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
"""
PARTS = """
found = {"sampling": read(sampling), "openapi": read(openapi)}
for endpoint, module, name, client in json.load(sys.stdin):
    found["schema " + endpoint], found["fields " + endpoint] = read(schema, module, name), read(fields, module, name)
    if client:
        found["client " + endpoint] = read(parameters, client)
print("\\n" + json.dumps(found))
"""
SERVERS = {
    "vllm": """
def app():
    from typing import get_args
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.pooling.classify.api_router import router as classify
    from vllm.entrypoints.pooling.embed.api_router import router as embed
    from vllm.entrypoints.pooling.pooling.api_router import router as pooling
    from vllm.entrypoints.pooling.scoring.api_router import router as scoring
    from vllm.tasks import SupportedTask
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    tasks = [task for part in get_args(SupportedTask) for task in get_args(part) or (part,)]
    made = build_app(make_arg_parser(FlexibleArgumentParser()).parse_args([]), tuple(tasks))
    for router in (classify, embed, pooling, scoring):  # of models that pool, which no model is given here for
        made.include_router(router)
    return made

def sampling():
    from vllm import SamplingParams
    return [*SamplingParams.__struct_fields__]
""",
    "sglang": """
import os
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

def app():
    from sglang.srt.entrypoints.http_server import app
    return app

def sampling():
    from sglang.srt.sampling.sampling_params import SamplingParams
    return [*SamplingParams.__struct_fields__]
""",
}


@dataclass(frozen=True)
class Schemas:
    """What an engine's code says of its requests. Each method raises :class:`EngineError` where its code fails."""

    parts: dict[str, dict[str, Any]]

    def openapi(self) -> dict[str, Any]:
        return self._part("openapi")

    def request(self, endpoint: Endpoint) -> dict[str, Any]:
        """Return the JSON schema of an endpoint's request."""
        return self._part(f"schema {endpoint}")

    def fields(self, endpoint: Endpoint) -> set[str]:
        """Return the names and aliases of an endpoint's fields."""
        return set(self._part(f"fields {endpoint}"))

    def client_parameters(self, endpoint: Endpoint) -> set[str]:
        """Return what OpenAI's client sends to an endpoint."""
        return set(self._part(f"client {endpoint}"))

    def sampling_parameters(self) -> set[str]:
        return set(self._part("sampling"))

    def _part(self, name: str) -> Any:
        part = self.parts[name]
        if "error" in part:
            raise EngineError(part["error"])
        return part["read"]


@cache
def schemas_of(engine: str, env: Path) -> Schemas:
    asked = [
        (endpoint, module_of(engine, endpoint, folder), model, client)
        for endpoint, (model, folder, client) in MODELS.items()
    ]
    return Schemas(answer_of(env, ["-c", PROGRAM + SERVERS[engine] + PARTS], asked))


def module_of(engine: str, endpoint: Endpoint, folder: str) -> str:
    if endpoint == MESSAGES:
        return MODULES[engine].format("anthropic")
    return MODULES[engine].format(f"openai.{folder}" if engine == "vllm" else "openai")
