"""The tables of request fields against the request models of real engines and of OpenAI's client in their environment.

A field that a new release adds fails here until it is judged, and one that a release dropped until it is removed.
"""

import json
import subprocess
from pathlib import Path

import pytest
from conformance.conftest import Figure

from mmrouter_lib.engines import ADAPTERS
from mmrouter_lib.engines.base.request_fields import CHAT, Endpoint

MODULES = {"vllm": "vllm.entrypoints.openai.{}.protocol", "sglang": "sglang.srt.entrypoints.openai.protocol"}
MODELS: dict[Endpoint, tuple[str, str, str]] = {
    CHAT: ("ChatCompletionRequest", "chat_completion", "chat.completion_create_params.CompletionCreateParamsBase"),
    "/v1/completions": ("CompletionRequest", "completion", "completion_create_params.CompletionCreateParamsBase"),
    "/v1/responses": ("ResponsesRequest", "responses", "responses.response_create_params.ResponseCreateParamsBase"),
}
"""Endpoint -> the engine's model, vLLM's folder of it, and the parameters of OpenAI's client."""

READ_BY_VALIDATORS = {("sglang", CHAT): {"reasoning"}}
IGNORED = {("sglang", CHAT): {"documents", "add_generation_prompt", "add_special_tokens"}}
"""Fields of the table that no model has: read before validation, or accepted because vLLM has them."""
LATER = {
    "openai": {"moderation", "prompt_cache_options", "context_management"},
    "vllm": {"return_weight_versions"},  # 0.33
}
"""Fields of later releases of OpenAI's client and of an engine, which others ignore."""

PROGRAM = """
import importlib, json, sys
fields = {}
for endpoint, module, name, openai in json.loads(sys.argv[1]):
    model = getattr(importlib.import_module(module), name)
    place, params = openai.rsplit(".", 1)
    own = getattr(importlib.import_module("openai.types." + place), params)
    aliases = [alias for field in model.model_fields.values() if (alias := field.alias)]
    fields[endpoint] = [[*model.model_fields, *aliases], [*own.__annotations__, "stream"]]
print("FIELDS" + json.dumps(fields))
"""


def fields_of(engine: str, python: Path) -> dict[Endpoint, tuple[set[str], set[str]]]:
    """Return endpoint -> (the engine's fields, those of OpenAI's API)."""
    asked = [(e, MODULES[engine].format(folder), model, own) for e, (model, folder, own) in MODELS.items()]
    done = subprocess.run([python, "-c", PROGRAM, json.dumps(asked)], capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("FIELDS")), None)
    assert line is not None, done.stderr[-2000:]
    return {e: (set(theirs), set(own)) for e, (theirs, own) in json.loads(line.removeprefix("FIELDS")).items()}


@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=pytest.mark.adopts(engine=name, check="request fields")) for name in MODULES]
)
def test_every_field_of_the_engine_and_of_openai_is_judged(
    engine: str, request: pytest.FixtureRequest, figure: Figure
) -> None:
    python = request.getfixturevalue(f"{engine}_env") / "bin" / "python"
    found = fields_of(engine, python)
    for endpoint, (theirs, _) in found.items():
        figure(endpoint, sorted(theirs))
    for endpoint, (theirs, openai) in found.items():
        table = ADAPTERS[engine].request_fields[endpoint]
        assert {"model", "temperature", "stream"} <= theirs & openai
        assert [name for name in sorted(theirs | openai) if not table.knows(name)] == []
        forwarded = table.prompt | table.harmless | table.affecting.keys()
        extra = READ_BY_VALIDATORS.get((engine, endpoint), set()) | IGNORED.get((engine, endpoint), set())
        later = LATER["openai"] | LATER.get(engine, set())
        assert sorted(forwarded - theirs - openai - extra - later) == []
