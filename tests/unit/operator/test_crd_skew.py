"""Resources of a newer definition: what it has put there by itself is no fault of the user's."""

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mmrouter_lib.api.crd import definition
from mmrouter_operator.model.crd_skew import schema_in, without_defaults

RESOURCE: dict[str, Any] = {
    "metadata": {"name": "vl"},
    "spec": {
        "model": {"id": "m"},
        "engine": {"type": "vllm"},
        "routing": {"policy": "kv", "media": {"maxImages": 4}},
        "pools": [{"name": "a", "role": "worker", "podTemplate": {"spec": {"free": 1}}}, {"name": "b"}],
    },
}


def served(**fields: Any) -> dict[str, Any]:
    """Return the published schema of a definition with more fields: `routing__novelty=3` has that default."""
    schema: dict[str, Any] = copy.deepcopy(definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    for place, default in fields.items():
        *way, last = place.split("__")
        node = schema["properties"]["spec"]
        for part in way:
            node = node["items"] if part == "each" else node["properties"][part]
        node["properties"][last] = {"type": "object"} if default is None else {"default": default}
    return schema


def test_what_the_definition_filled_in_is_taken_out_wherever_it_stands() -> None:
    resource = copy.deepcopy(RESOURCE)
    resource["spec"]["section"] = {"one": 1, "two": []}
    resource["spec"]["routing"]["media"]["novelty"] = "x"
    resource["spec"]["pools"][1]["novelty"] = 7
    schema = served(section={"one": 1, "two": []}, routing__media__novelty="x", pools__each__novelty=7)
    known, dropped, told = without_defaults(resource, schema)
    assert (known, told) == (RESOURCE, True)
    assert set(dropped) == {"spec.section", "spec.routing.media.novelty", "spec.pools[1].novelty"}


def test_a_set_field_stays_and_the_parser_refuses_it() -> None:
    resource = copy.deepcopy(RESOURCE)
    resource["spec"]["pools"][0]["novelty"] = 8
    resource["spec"]["section"] = {}
    assert without_defaults(resource, served(pools__each__novelty=7, section=None)) == (resource, (), True)


def test_a_field_that_the_published_schema_lacks_is_reported_as_incomplete() -> None:
    resource = copy.deepcopy(RESOURCE)
    resource["spec"]["routing"]["novelty"] = 7
    assert without_defaults(resource, served()) == (resource, (), False)
    assert without_defaults(resource, {}) == (resource, (), True), "nothing is published at all: nothing to wait for"


def test_a_document_without_our_kind_has_no_schema() -> None:
    assert schema_in({}) == {}
    assert schema_in({"components": {"schemas": {"Other": {"type": "object"}}}}) == {}


JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


SERVED = served()


@settings(max_examples=30)
@given(JSON)
def test_whatever_a_spec_is_nothing_that_we_know_is_touched(spec: Any) -> None:
    assert without_defaults({"spec": spec}, {})[0] == {"spec": spec}
    mixed = {**RESOURCE["spec"], "pools": spec}
    assert without_defaults({"spec": mixed}, SERVED)[0] == {"spec": mixed}
