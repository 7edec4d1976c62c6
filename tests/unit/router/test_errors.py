import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrouter_router.core.errors import RequestError, field_path

MADE = {
    "invalid_json": (RequestError.invalid_json("x"), 400, None, "invalid_json"),
    "missing": (RequestError.missing("a.b"), 400, "a.b", "missing_required_parameter"),
    "wrong_type": (RequestError.wrong_type("a", "a string", [1]), 400, "a", "invalid_type"),
    "unknown_value": (RequestError.unknown_value("a", "x", ["y", "z"]), 400, "a", "invalid_value"),
    "unknown_part": (RequestError.unknown_part("a.type", "x", ["y"]), 400, "a.type", "unsupported_content_part"),
    "unknown_model": (RequestError.unknown_model("m"), 404, "model", "model_not_found"),
    "too_large": (RequestError.too_large(5), 413, None, "request_too_large"),
    "unauthorized": (RequestError.unauthorized(), 401, None, "invalid_api_key"),
    "not_found": (RequestError.not_found("GET", "/x"), 404, None, "unknown_url"),
    "method_not_allowed": (RequestError.method_not_allowed("GET", "/x"), 405, None, "method_not_allowed"),
    "no_worker": (RequestError.no_worker("none is ready"), 503, None, "no_worker"),
    "busy": (RequestError.busy("later", param="p", code="media_busy"), 429, "p", "media_busy"),
    "quarantined": (RequestError.quarantined(), 400, None, "request_quarantined"),
}


@pytest.mark.parametrize("case", MADE)
def test_every_error_has_openais_shape(case):
    error, status, param, code = MADE[case]
    body = json.loads(error.to_body())
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (error.status, body["error"]["param"], body["error"]["code"]) == (status, param, code)
    assert body["error"]["message"].endswith(".") or case in ("busy", "invalid_json")
    assert (body["error"]["type"] == "invalid_request_error") == (status < 500 and status != 429)


def test_retry_and_authentication_headers_are_set():
    assert MADE["no_worker"][0].headers == {"Retry-After": "1"}
    assert MADE["busy"][0].headers == {"Retry-After": "1"}
    assert MADE["unauthorized"][0].headers == {"WWW-Authenticate": "Bearer"}
    assert MADE["method_not_allowed"][0].headers == {"Allow": "POST"}


ENGINE = {
    "vLLM": (
        b'{"error":{"message":"too long","type":"BadRequestError","param":"input_tokens","code":400}}',
        ("too long", "input_tokens"),
    ),
    "null param": (
        b'{"error":{"message":"bad image","type":"BadRequestError","param":null,"code":400}}',
        ("bad image", None),
    ),
    "flat": (b'{"object":"error","message":"old","param":"x"}', ("old", "x")),
    "text error": (b'{"error":"Unauthorized"}', ("Unauthorized", None)),
    "detail": (b'{"detail":"Not Found"}', ("Not Found", None)),
    "validation": (
        b'{"detail":[{"loc":["body","messages",0,"role"],"msg":"Field required"}]}',
        ("Field required", "messages[0].role"),
    ),
    "plain": (b"Internal Server Error\n", ("Internal Server Error", None)),
    "JSON text": (b'"boom"', ("boom", None)),
}


@pytest.mark.parametrize("case", ENGINE)
@pytest.mark.parametrize(
    ("status", "kind"), [(400, "invalid_request_error"), (429, "rate_limit_error"), (500, "server_error")]
)
def test_engine_error_keeps_message_and_status(case, status, kind):
    body, words = ENGINE[case]
    error = RequestError.from_engine(status, body)
    assert (error.message, error.param) == words
    assert (error.status, error.type, error.code) == (status, kind, "engine_error")


@pytest.mark.parametrize(
    "body", [b"", b"  ", b"[]", b"7", b"{}", b'{"error":[]}', b'{"error":{"message":""}}', b"\xff\xfe"]
)
def test_engine_error_without_message_gets_a_default(body):
    assert RequestError.from_engine(502, body).message


def test_adapters_field_takes_precedence():
    body = ENGINE["null param"][0]
    seen = []

    def field_of(status, answer):
        seen.append((status, answer["error"]["message"]))
        return "messages"

    assert RequestError.from_engine(400, body, field_of).param == "messages"
    assert seen == [(400, "bad image")]
    assert RequestError.from_engine(400, ENGINE["vLLM"][0], lambda *_: None).param == "input_tokens"


@pytest.mark.parametrize("status", [401, 403])
def test_engines_401_becomes_a_502(status):
    error = RequestError.from_engine(status, b'{"error":"Unauthorized"}')
    assert (error.status, error.type) == (502, "server_error")


def test_status_below_400_is_a_value_error():
    with pytest.raises(ValueError, match="200"):
        RequestError.from_engine(200, b"{}")


JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["error", "message", "param", "detail", "loc", "msg"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(st.integers(400, 599), st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_engine_answer_becomes_a_valid_error(status, body):
    assert json.loads(RequestError.from_engine(status, body).to_body())["error"]["message"]


@settings(max_examples=50, deadline=None)
@given(st.text(), st.text())
def test_any_text_is_serialisable(message, param):
    json.loads(RequestError.invalid(message + "\udc80", param=param + "\ud800").to_body())


def test_field_paths_are_written_in_client_notation():
    assert (
        field_path(["body", "messages", 2, "content", 0, "image_url", "url"]) == "messages[2].content[0].image_url.url"
    )
    assert field_path(["body"]) is None
