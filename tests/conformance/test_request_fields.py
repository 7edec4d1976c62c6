"""The tables of request fields against the request models of real engines and of OpenAI's client in their environment.

A field that a new release adds fails here until it is judged, and one that a release dropped until it is removed.
"""

import pytest
from conformance.conftest import Figure
from conformance.engine_process import env_version
from conformance.engine_schemas import MODELS, MODULES, schemas_of
from packaging.version import Version

from mmrouter_lib.engines import ADAPTERS
from mmrouter_lib.engines.base.request_fields import CHAT, COMPLETIONS, RESPONSES, Endpoint, words

READ_BY_VALIDATORS = {("sglang", CHAT): {"reasoning"}}
IGNORED = {("sglang", CHAT): {"documents", "add_generation_prompt", "add_special_tokens"}}
"""Fields of the table that no model has: read before validation, or accepted because vLLM has them."""
LATER = words("moderation prompt_cache_options context_management")
"""Fields of later releases of OpenAI's client, which engines ignore."""
SINCE: dict[str, dict[str, dict[Endpoint, frozenset[str]]]] = {
    "vllm": {
        "0.33.0": {
            CHAT: words("return_weight_versions"),
            COMPLETIONS: words("return_weight_versions"),
            RESPONSES: words("spaces_between_special_tokens"),
        },
        "0.32.0": {
            CHAT: words("mm_payload return_mm_kwargs"),
            COMPLETIONS: words("mm_payload return_mm_kwargs"),
            RESPONSES: words("mm_payload return_mm_kwargs min_p stop_token_ids"),
        },
    },
    "sglang": {
        "0.5.23": {CHAT: words("mm_processor_kwargs thinking"), COMPLETIONS: words("mm_processor_kwargs")},
        "0.5.22": {
            CHAT: words("watermark return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64"),
            COMPLETIONS: words("watermark"),
        },
        "0.5.21": {CHAT: words("sampling_logprobs_mode")},
        "0.5.20": {CHAT: words("return_input_ids_in_sglext return_output_ids_in_sglext")},
    },
}
"""Engine -> release -> fields that it has since then. Earlier releases ignore them."""


@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=pytest.mark.adopts(engine=name, check="request fields")) for name in MODULES]
)
def test_every_field_of_the_engine_and_of_openai_is_judged(
    engine: str, request: pytest.FixtureRequest, figure: Figure
) -> None:
    env = request.getfixturevalue(f"{engine}_env")
    schemas, release = schemas_of(engine, env), Version(env_version(env))
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
        later = LATER.union(
            *(new.get(endpoint, ()) for since, new in SINCE[engine].items() if release < Version(since))
        )
        assert sorted(forwarded - theirs - openai - extra - later) == []
