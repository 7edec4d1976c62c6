"""Which deployment of the gateway serves a model: names, aliases, weighted splits, and conversations that stay."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrouter_lib.engines.base.passed_routes import TRANSCRIBE
from mmrouter_lib.engines.base.request_fields import CHAT
from mmrouter_router.core.errors import RequestError
from mmrouter_router.gateway.config import Target
from mmrouter_router.gateway.model_routes import Choice, Deployment, Routes, of_conversation
from mmrouter_router.gateway.requested_model import conversation, routed
from mmrouter_router.intake.form_body import Field, read_form, write_form

LIMIT = 1 << 20


def deployment(name: str, model: str = "", created: int = 0, **fields) -> Deployment:
    return Deployment(name, model or name, f"{name}.team.svc", 80, created=created, **fields)


def targets(**weights: int) -> list[Target]:
    return [Target(deployment=name, weight=weight) for name, weight in weights.items()]


ROUTES = Routes([deployment("a"), deployment("b")], {"alias": targets(a=95, b=5)})


def chat(*messages: tuple[str, object], model: str = "alias", **fields) -> dict:
    return {"messages": [{"role": role, "content": text} for role, text in messages], "model": model, **fields}


def route(body: dict, routes: Routes = ROUTES):
    return routed(CHAT, json.dumps(body).encode(), routes, LIMIT)


def test_a_served_name_leads_to_its_deployment_and_the_body_stays_as_it_came() -> None:
    raw = b'{"messages": [],  "model":"b", "temperature": 1.0}'
    made = routed(CHAT, raw, ROUTES, LIMIT)
    assert (made.choice.deployment.name, made.body, made.content_type) == ("b", raw, None)


def test_an_alias_becomes_the_name_that_its_deployment_serves_and_nothing_else_changes() -> None:
    routes = Routes([deployment("a", "org/model")], {"alias": targets(a=1)})
    body = chat(("user", "Hé"), seed=7, tools=[{"type": "function"}])
    made = route(body, routes)
    assert json.loads(made.body) == {**body, "model": "org/model"}


def test_an_alias_can_name_an_adapter_of_its_deployment() -> None:
    routes = Routes([deployment("a")], {"tuned": [Target(deployment="a", model="my-lora")]})
    assert json.loads(route(chat(("user", "x"), model="tuned"), routes).body)["model"] == "my-lora"


def test_an_alias_of_a_served_name_replaces_it() -> None:
    routes = Routes([deployment("a"), deployment("b")], {"a": targets(b=1)})
    assert route(chat(("user", "x"), model="a"), routes).choice.deployment.name == "b"
    assert routes.names == ["a", "b"]


@pytest.mark.parametrize(
    ("raw", "status", "code", "param"),
    [
        (b"{", 400, "invalid_json", None),
        (b"[]", 400, "invalid_type", None),
        (b'{"messages": []}', 400, "missing_required_parameter", "model"),
        (b'{"model": 7}', 400, "invalid_type", "model"),
        (b'{"model": "c"}', 404, "model_not_found", "model"),
        (b'{"model": "gone"}', 503, "no_deployment", "model"),
        (b" " * (LIMIT + 1), 413, "request_too_large", None),
    ],
)
def test_a_request_without_a_served_model_is_refused_with_its_field(raw, status, code, param) -> None:
    routes = Routes([deployment("a")], {"gone": targets(b=1)})
    with pytest.raises(RequestError) as refused:
        routed(CHAT, raw, routes, LIMIT)
    assert (refused.value.status, refused.value.code, refused.value.param) == (status, code, param)


def test_an_unknown_model_is_answered_with_the_names_that_are_served() -> None:
    with pytest.raises(RequestError, match=r"'c' does not exist or is not served here\. Served: a, alias, b\."):
        route(chat(model="c"))
    many = Routes([deployment(f"d{number:03}") for number in range(100)], {})
    with pytest.raises(RequestError, match="d063 and 36 more"):
        route(chat(model="c"), many)


def test_the_older_of_two_deployments_keeps_a_name_and_the_other_is_reported() -> None:
    routes = Routes([deployment("new", "m", created=2), deployment("old", "m", created=1)], {})
    assert [choice.deployment.name for choice in routes.choices("m")] == ["old"]
    assert routes.problems == [
        "new serves the model 'm' as old does, which gets its requests; an alias of that name can split them"
    ]
    split = Routes(routes.deployments, {"m": targets(old=1, new=1)})
    assert (len(split.choices("m")), split.problems) == (2, [])


def test_a_split_without_one_of_its_deployments_goes_to_the_others_and_is_reported() -> None:
    routes = Routes([deployment("a")], {"m": targets(a=1, b=99), "off": targets(a=1, c=0)})
    assert {route(chat(("user", f"{n}"), model="m"), routes).choice.deployment.name for n in range(50)} == {"a"}
    assert routes.problems == ["alias 'm': there is no deployment b", "alias 'off': there is no deployment c"]


# -- splits


def shares(weights: dict[str, int], count: int = 4000) -> list[str]:
    choices = [Choice(deployment(name), name, weight) for name, weight in weights.items()]
    return [of_conversation("m", choices, b"%d" % number).deployment.name for number in range(count)]


@pytest.mark.parametrize("weights", [{"a": 95, "b": 5}, {"a": 1, "b": 1}, {"a": 5, "b": 3, "c": 2}])
def test_each_target_gets_the_share_of_its_weight(weights) -> None:
    found = shares(weights)
    for name, weight in weights.items():
        share = weight / sum(weights.values())
        # The draw is fixed; 4 standard deviations would hold for nearly every other one too.
        assert abs(found.count(name) / len(found) - share) < 4 * (share * (1 - share) / len(found)) ** 0.5


def test_a_change_of_weights_moves_only_conversations_to_the_target_that_gains() -> None:
    before, after = shares({"a": 95, "b": 5, "c": 100}), shares({"a": 95, "b": 25, "c": 100})
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert {new for _, new in moved} == {"b"}
    assert abs(len(moved) / len(before) - (25 / 220 - 5 / 200)) < 0.03


def test_a_target_that_leaves_moves_only_its_own_conversations() -> None:
    before, after = shares({"a": 5, "b": 3, "c": 2}), shares({"a": 5, "b": 3})
    assert all(old in (new, "c") for old, new in zip(before, after, strict=True))


TEXT = st.text(max_size=20)
TURNS = st.lists(st.tuples(st.sampled_from(["assistant", "user", "tool"]), TEXT), max_size=6)


@given(TEXT, TEXT, TURNS, st.integers(0, 10))
def test_a_conversation_keeps_its_deployment_as_it_grows_and_options_change(system, first, turns, tokens) -> None:
    opening = chat(("system", system), ("user", first))
    grown = chat(("system", system), ("user", first), *turns, max_tokens=tokens, stream=True)
    assert conversation(opening) == conversation(grown)


@given(st.lists(TEXT, min_size=2, max_size=2, unique=True))
def test_conversations_with_other_first_messages_are_others(texts) -> None:
    assert conversation(chat(("user", texts[0]))) != conversation(chat(("user", texts[1])))
    assert conversation(chat(("system", texts[0]), ("user", "x"))) != conversation(
        chat(("system", texts[1]), ("user", "x"))
    )


def test_images_of_the_first_message_are_part_of_a_conversation() -> None:
    def asked(image: str) -> bytes:
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
        return conversation(chat(("user", [{"type": "text", "text": "What is this?"}, part])))

    assert asked("AAAA") != asked("BBBB")


def test_marks_of_what_to_cache_do_not_change_a_conversation() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    text = {"type": "text", "text": "hi"}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    for plain, marked in (("hi", [text | mark]), ([text, image], [text, image | mark]), ([text], [text | mark])):
        assert conversation(chat(("user", plain))) == conversation(chat(("user", marked)))
    system = {"messages": [{"role": "user", "content": "x"}]}
    assert conversation(system | {"system": "Be brief."}) == conversation(system | {"system": [text_part("Be brief.")]})
    assert conversation(chat(("user", [text, image]))) != conversation(chat(("user", [text])))


def text_part(text: str) -> dict[str, object]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}


def test_requests_without_messages_or_prompt_are_shared_by_their_content() -> None:
    def reranked(query: str, **more: object) -> bytes:
        return conversation({"model": "m", "query": query, "documents": ["a", "b"], **more})

    assert reranked("x") != reranked("y")
    assert reranked("x") == reranked("x", model="other")
    assert conversation({"text_1": "a", "text_2": "b"}) != conversation({"text_1": "a", "text_2": "c"})


def test_the_clients_own_cache_key_names_the_conversation() -> None:
    assert conversation(chat(("user", "a"), prompt_cache_key="k")) == conversation(
        chat(("user", "b"), prompt_cache_key="k")
    )


def test_a_response_of_text_and_those_that_continue_it_are_one_conversation() -> None:
    first = {"input": "Tell of the sea.", "instructions": "Be brief."}
    turn = [{"type": "message", "role": "user", "content": "Tell of the sea."}, {"role": "assistant", "content": "It."}]
    assert conversation(first) == conversation({"input": turn, "instructions": "Be brief."})
    assert conversation(first) != conversation({**first, "instructions": "Be long."})


def test_a_completion_that_grows_is_one_conversation() -> None:
    begin = "x" * 2048
    assert conversation({"prompt": begin}) == conversation({"prompt": begin + "more"})
    assert conversation({"prompt": [1, 2]}) != conversation({"prompt": [1, 3]})


INTEGERS = st.integers(-(2**63), 2**64 - 1)
"""Those that the reader of JSON returns as integers; it returns others as floats."""


@given(st.dictionaries(st.sampled_from(["messages", "input", "prompt", "system"]), st.none() | INTEGERS | TEXT))
def test_bodies_that_no_frontend_accepts_are_passed_on_to_be_refused_there(body) -> None:
    assert len(conversation(body)) == 32
    assert len(conversation({"messages": [body, 7, "x"]})) == 32


def test_a_forms_model_is_read_and_replaced() -> None:
    form = [Field("model", b"alias"), Field("file", b"RIFF\r\n--x", b"a.wav", b"audio/wav")]
    made = routed(TRANSCRIBE, b"".join(write_form(form)[1]), ROUTES, LIMIT)
    assert made.choice.deployment.name in ("a", "b")
    body = b"".join(made.body)
    assert read_form(body) == [form[0]._replace(value=made.choice.model.encode()), form[1]]
    assert made.content_type.encode().endswith(body[2:34])
    with pytest.raises(RequestError) as refused:
        routed(TRANSCRIBE, b"".join(write_form(form[1:])[1]), ROUTES, LIMIT)
    assert (refused.value.status, refused.value.param) == (400, "model")


# -- /v1/models


def test_every_name_is_listed_with_the_exactness_of_its_deployments() -> None:
    proved = deployment("a", exact="True", exact_ratio=0.98, root="org/a", created=5)
    routes = Routes([proved, deployment("b", created=9)], {"alias": targets(a=95, b=5)})
    listed = {model["id"]: model for model in routes.models()}
    assert list(listed) == ["a", "alias", "b"]
    assert (listed["a"]["exact"], listed["a"]["root"], listed["a"]["created"]) == ("True", "org/a", 5)
    assert listed["a"]["deployments"] == [
        {"name": "a", "model": "a", "weight": 1, "exact": "True", "exact_ratio": 0.98}
    ]
    assert (listed["alias"]["exact"], [one["weight"] for one in listed["alias"]["deployments"]]) == ("Unknown", [95, 5])


@pytest.mark.parametrize(
    ("parts", "whole"), [(("True", "True"), "True"), (("True", "False"), "False"), (("True", "Unknown"), "Unknown")]
)
def test_a_split_is_exact_only_where_all_its_deployments_are(parts, whole) -> None:
    routes = Routes(
        [deployment(name, exact=exact) for name, exact in zip("ab", parts, strict=True)], {"m": targets(a=1, b=1)}
    )
    assert next(model["exact"] for model in routes.models() if model["id"] == "m") == whole
