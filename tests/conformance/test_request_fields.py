"""The tables of request fields against the request models of real engines and of OpenAI's client in their environment.

A field that a new release adds fails here until it is judged, and one that a release dropped until it is removed.
"""

import pytest
from conformance.conftest import Figure
from conformance.engine_schemas import MODELS, MODULES, schemas_of

from mmrouter_lib.engines import ADAPTERS
from mmrouter_lib.engines.base.request_fields import CHAT

READ_BY_VALIDATORS = {("sglang", CHAT): {"reasoning"}}
IGNORED = {("sglang", CHAT): {"documents", "add_generation_prompt", "add_special_tokens"}}
"""Fields of the table that no model has: read before validation, or accepted because vLLM has them."""
LATER = {
    "openai": {"moderation", "prompt_cache_options", "context_management"},
    "vllm": {"return_weight_versions"},  # 0.33
}
"""Fields of later releases of OpenAI's client and of an engine, which others ignore."""


@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=pytest.mark.adopts(engine=name, check="request fields")) for name in MODULES]
)
def test_every_field_of_the_engine_and_of_openai_is_judged(
    engine: str, request: pytest.FixtureRequest, figure: Figure
) -> None:
    schemas = schemas_of(engine, request.getfixturevalue(f"{engine}_env"))
    for endpoint, (_, _, client) in MODELS.items():
        if not client:
            continue
        theirs, openai = schemas.fields(endpoint), schemas.client_parameters(endpoint)
        figure(endpoint, sorted(theirs))
        table = ADAPTERS[engine].request_fields[endpoint]
        assert {"model", "temperature", "stream"} <= theirs & openai
        assert [name for name in sorted(theirs | openai) if not table.knows(name)] == []
        forwarded = table.prompt | table.harmless | table.affecting.keys()
        extra = READ_BY_VALIDATORS.get((engine, endpoint), set()) | IGNORED.get((engine, endpoint), set())
        later = LATER["openai"] | LATER.get(engine, set())
        assert sorted(forwarded - theirs - openai - extra - later) == []
