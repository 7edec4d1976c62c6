"""The fields that routers forward on passed routes, against the routes of real engines in their environment.

A field that a new release adds fails here until it is forwarded or judged.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from conformance.conftest import Figure
from conformance.engine_schemas import MODULES, schemas_of

from mmrouter_lib.engines.base.passed_routes import PASSED_ROUTES, TRANSCRIBE
from mmrouter_lib.engines.base.request_fields import words

NOT_FORWARDED = {
    "names a request, a tenant's cache or an adapter, which the router does": words(
        "cache_salt request_id rid extra_key conversation_id session_id session_params lora_path lora_id routing_key"
    ),
    "embeddings, which are large and come from the engine's own encoder": words(
        "embed_overrides embed_override_token_id item_embed_overrides query_embed_overrides positional_embed_overrides",
        "input_embeds mm_hashes mm_content_hashes",
    ),
    "code or an address": words(
        "vllm_xargs custom_logit_processor encoder_urls bootstrap_host bootstrap_port bootstrap_room",
        "bootstrap_pair_key http_worker_ipc external_trace_header",
    ),
    "names files of the engine": words("data"),
    "of the engine's own processes": words(
        "background custom_labels data_parallel_rank routed_dp_rank disagg_prefill_dp_rank decode_tp_size kv_hints",
        "log_metrics no_logs received_time need_wait_for_mm_inputs num_items_assigned routed_experts_start_len",
        "is_cross_encoder_request multi_item_delimiter_indices token_indices_to_pool decision_layout",
    ),
    "a result that clients of other engines do not have": words(
        "return_routed_experts return_indexer_topk return_sampling_mask sampling_logprobs_mode watermark",
        "return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs return_flat_raw_top_logprobs_b64",
        "max_thinking_tokens require_reasoning image_max_dynamic_patch video_max_dynamic_patch",
    ),
    "of `/classify` on SGLang, which takes what its `/generate` does; its `/v1/classify` is like vLLM's": words(
        "text input_ids image_data video_data audio_data modalities sampling_params dimensions",
        "return_pooled_hidden_states return_prompt_token_ids",
    ),
}
READ_ELSEWHERE = {"/tokenize": words("reasoning_effort tool_choice"), TRANSCRIBE: words("timestamp_granularities")}
"""Fields that no schema has: extra ones that templates see, and the name of a list without its brackets."""


def fields_of(engine: str, env: Path) -> dict[str, set[str]]:
    """Return path -> the fields of its request in the engine's OpenAPI, with those of SGLang's names below ``/v1``."""
    openapi = schemas_of(engine, env).openapi()

    def names(node: Mapping[str, Any]) -> set[str]:
        if "$ref" in node:
            return names(openapi["components"]["schemas"][node["$ref"].rpartition("/")[2]])
        parts = [part for kind in ("anyOf", "oneOf", "allOf") for part in node.get(kind, ())]
        return set(node.get("properties", ())).union(*map(names, parts))

    found: dict[str, set[str]] = {}
    for path, item in openapi["paths"].items():
        body = item.get("post", {}).get("requestBody", {}).get("content", {})
        found[path] = set().union(*(names(one["schema"]) for one in body.values()))
    return {path: found.get(path) or found.get(f"/v1{path}", set()) for path in PASSED_ROUTES}


@pytest.fixture(scope="module")
def fields(request: pytest.FixtureRequest) -> dict[str, dict[str, set[str]]]:
    return {engine: fields_of(engine, request.getfixturevalue(f"{engine}_env")) for engine in MODULES}


@pytest.mark.parametrize("engine", MODULES)
def test_every_field_of_an_engines_passed_routes_is_forwarded_or_judged(
    engine: str, fields: dict[str, dict[str, set[str]]], figure: Figure
) -> None:
    judged = frozenset().union(*NOT_FORWARDED.values())
    served = {path: theirs for path, theirs in fields[engine].items() if theirs}
    assert len(served) >= 6
    for path, theirs in served.items():
        figure(path, sorted(theirs))
    assert {path: extra for path in served if (extra := sorted(served[path] - PASSED_ROUTES[path] - judged))} == {}


def test_no_field_is_forwarded_that_no_engine_reads(fields: dict[str, dict[str, set[str]]]) -> None:
    def read(path: str) -> Iterable[str]:
        return set().union(*(found[path] for found in fields.values())) | READ_ELSEWHERE.get(path, frozenset())

    kinds = [[path for path in PASSED_ROUTES if PASSED_ROUTES[path] is PASSED_ROUTES[first]] for first in PASSED_ROUTES]
    for alike in kinds:  # routes of one table
        assert sorted(PASSED_ROUTES[alike[0]] - set().union(*map(read, alike))) == [], alike
