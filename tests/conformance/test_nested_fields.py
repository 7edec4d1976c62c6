"""The names inside fields of requests, at every place of the schemas of real engines in their environment.

A name that a new release adds at any depth fails here until it is forwarded or judged, and so does a new place.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from conformance.conftest import Figure
from conformance.engine_schemas import MODELS, MODULES, schemas_of
from nested_bodies import full_body, objects_in, refusal

from mmrouter_lib.engines import ADAPTERS
from mmrouter_lib.engines.base.nested_field_names import PASSED_NESTED, SCHEMAS
from mmrouter_lib.engines.base.passed_routes import PASSED_ROUTES, TRANSCRIBE
from mmrouter_lib.engines.base.request_fields import RESPONSES, words

NOT_FORWARDED = {
    "of gpt-oss's own message format, which chats do not have": words(
        "messages[].author messages[].channel messages[].content_type messages[].recipient"
    ),
    "a variable of templates that is not modelled": words(
        "messages[].tools messages[].task messages[].phase messages[].prefix"
    ),
    "embeddings, files and references": words(
        "image_embeds video_embeds audio_embeds prompt_embeds content[].data content[].file file_id file_url server_url"
    ),
    "of a part that is a 400": words("content[].name content[].custom tool_calls[].custom"),
    "options of one image or video, which change its tokens": words(
        "modalities max_dynamic_patch min_dynamic_patch max_long_side_pixel fps max_frames",
        "max_tokens_per_frame max_image_tokens preprocess_kwargs",
    ),
    "set by the engine itself": words("function.key_order structured_outputs._backend _backend_was_auto"),
    "of Anthropic's server tools and budgets, which engines do not implement": words(
        "content[].tool content[].tool_name content[].title output_config.task_budget tools[].allowed_domains",
        "tools[].blocked_domains tools[].display_height_px tools[].display_number tools[].display_width_px",
        "tools[].max_uses",
    ),
    "of blocks that a system prompt, or the result of a tool, does not hold": frozenset(
        f"{holder}[].{name}"
        for holder in ("system", "content[].content")
        for name in words("content data id input is_error name signature thinking title tool tool_name tool_use_id")
    )
    | {"system[].source"},
    "a medium, not an object": words("audio.id image_data video_data audio_data"),
}
ANY_NAME = {
    "constrains the answer only": words("response_format.format structured_outputs.json watermark logit_bias"),
    "the client's own names": words("chat_template_kwargs documents metadata content[].input content[].source"),
    "options, with which a request is not exact": words(
        "mm_processor_kwargs media_io_kwargs images_config video_config vllm_xargs"
    ),
    "vLLM 0.33 repeats it in its answer and does nothing else": words("prompt_cache_options"),
    "embeddings for a thought (vLLM 0.33), which are a 400 there": words("messages[].reasoning"),
    "no template reads it": words(
        "content[].prompt_cache_breakpoint messages[].audio messages[].function_call thinking"
    ),
}
"""Places whose names are not judged, and why that is harmless."""

Schema = Mapping[str, Any]
Places = dict[str, set[str]]


def places_in(node: Schema, root: Schema, ended: frozenset[str]) -> Places:
    """Return place -> names of its objects, below the fields of a request and above places that end there."""
    found: Places = {}

    def walk(node: Schema, place: str, inside: tuple[str, ...]) -> None:
        if "$ref" in node:
            ref = str(node["$ref"])
            if ref in inside:
                return
            at: Any = root
            for step in ref.removeprefix("#/").split("/"):
                at = at[step]
            walk(at, place, (*inside, ref))
        for kind in ("anyOf", "oneOf", "allOf", "prefixItems"):
            for part in node.get(kind, ()):
                walk(part, place, inside)
        if isinstance(node.get("items"), dict):
            walk(node["items"], f"{place}[]", inside)
        for name, item in node.get("properties", {}).items():
            if place:
                found.setdefault(place, set()).add(name)
            below = f"{place}.{name}".lstrip(".")
            if name not in SCHEMAS and not ends_in(below, ended):
                walk(item, below, inside)

    walk(node, "", ())
    return found


def ends_in(place: str, endings: frozenset[str]) -> bool:
    return any(place == ending or place.endswith(f".{ending}") for ending in endings)


def bodies_with(body: dict[str, Any], place: str, name: str) -> Iterator[tuple[str, bool]]:
    """Put a name into each object at a place in turn; yield its path, and whether the object has it anyway."""
    for at, path, holder in [*objects_in(body)]:
        if at != place:
            continue
        known = name in holder
        holder.setdefault(name, "x")
        yield f"{path}.{name}", known
        if not known:
            del holder[name]


def made_for(place: str) -> dict[str, Any]:
    """Return fields with one object at a place: ``a[].b`` is ``{"a": [{"b": {}}]}``."""
    made: Any = {}
    for step in reversed(place.split(".")):
        for _ in range(step.count("[]")):
            made = [made]
        made = {step.replace("[]", ""): made}
    result: dict[str, Any] = made
    return result


def unjudged(endpoint: str, engine: Any, places: Places, judged: frozenset[str]) -> Iterator[str]:
    """Yield names that are refused without a judgement, and places that take any name."""
    for place, names in sorted(places.items()):
        in_parts = endpoint in (RESPONSES, *PASSED_ROUTES)  # their names are judged alike whatever the part
        body = {**RESPONSE, **made_for(place)} if endpoint == RESPONSES else made_for(place)
        body = body if in_parts else full_body(endpoint, engine)
        for name in (*sorted(names), "of_tomorrow"):
            verdicts = [
                known or not f"{path}.".startswith(f"{refusal(endpoint, engine, body, modelled=False) or '?'}.")
                for path, known in bodies_with(body, place, name)
            ]
            if not verdicts:
                yield f"{place}: no object there in the bodies of the test"
                break
            if name == "of_tomorrow" and any(verdicts):
                yield f"{place}: takes any name"
            elif name != "of_tomorrow" and not any(verdicts) and not ends_in(f"{place}.{name}", judged):
                yield f"{place}.{name}"


RESPONSE = {"model": "m", "input": "x"}
JUDGED = frozenset().union(*NOT_FORWARDED.values())
ENDED = JUDGED.union(*ANY_NAME.values())


@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=pytest.mark.adopts(engine=name, check="nested fields")) for name in MODULES]
)
def test_every_name_inside_a_field_is_judged(engine: Any, request: pytest.FixtureRequest, figure: Figure) -> None:
    schemas = schemas_of(engine, request.getfixturevalue(f"{engine}_env"))
    for endpoint in MODELS:
        schema = schemas.request(endpoint)
        table = ADAPTERS[engine].request_fields[endpoint]  # type: ignore[index]
        places = places_in(schema, schema, ENDED | table.removed | table.refused.keys())
        figure(endpoint, sorted(f"{place}.{name}" for place, names in places.items() for name in names))
        assert len(places) >= 3
        assert list(unjudged(endpoint, engine, places, JUDGED)) == [], endpoint


@pytest.mark.parametrize("engine", MODULES)
def test_every_name_inside_a_field_of_a_passed_route_is_judged(engine: Any, request: pytest.FixtureRequest) -> None:
    openapi = schemas_of(engine, request.getfixturevalue(f"{engine}_env")).openapi()
    seen = 0
    for path, fields in PASSED_ROUTES.items():
        item = openapi["paths"].get(path) or openapi["paths"].get(f"/v1{path}")
        if path == TRANSCRIBE or item is None:  # a form has no names inside its fields
            continue
        for body in item["post"]["requestBody"]["content"].values():
            places = places_in(body["schema"], openapi, ENDED)
            places = {place: names for place, names in places.items() if place.partition(".")[0].rstrip("[]") in fields}
            assert list(unjudged(path, engine, places, JUDGED)) == [], path
            seen += len(places)
    assert seen >= 3


def test_every_sampling_parameter_of_sglangs_own_route_is_judged(sglang_env: Path) -> None:
    derived = words("stop_strs stop_regex_strs stop_str_max_len stop_regex_max_len is_normalized ebnf_full_assistant")
    assert schemas_of("sglang", sglang_env).sampling_parameters() - derived == PASSED_NESTED["sampling_params"].keys()
