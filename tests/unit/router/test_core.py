"""Linear cost models of encoders, request ids, and errors in OpenAI's shape."""

import json
import logging
import random
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ulid import ULID
from unit.conftest import examples

from mmrouter_lib.engines.base.launch import DEVICES
from mmrouter_router.core.errors import RequestError, field_path
from mmrouter_router.core.linear_cost import WINDOW, Line, Rate, guess
from mmrouter_router.core.log_limit import LogLimit
from mmrouter_router.core.request_ids import RequestIds
from mmrouter_router.dispatch.engine_client import ERROR_LIMIT

WRONG = Line(0.005, 0.001)


def noisy(rnd, line, tokens, wild=0.0):
    return line.seconds(tokens) * rnd.uniform(0.9, 1.1) * (rnd.uniform(3, 50) if rnd.random() < wild else 1)


@settings(max_examples=examples(60))
@given(st.integers(0, 10**6), st.floats(300, 50_000), st.floats(0, 0.03))
def test_fit_tolerates_outliers(seed, speed, overhead):
    rnd, line = random.Random(seed), Line(overhead, 1 / speed)
    rate = Rate(WRONG)
    sizes = [rnd.choice((4, 64, 256, 576, 800, 1196, 1280)) for _ in range(WINDOW)]
    wild = set(rnd.sample(range(WINDOW), WINDOW // 8))
    for number, tokens in enumerate(sizes):
        rate.observe(tokens, noisy(rnd, line, tokens, wild=number in wild))
    for tokens in (576, 1280):
        assert rate.line.seconds(tokens) == pytest.approx(line.seconds(tokens), rel=0.25)


def test_first_image_replaces_the_guess():
    rate = Rate(WRONG)
    rate.observe(1000, 0.1005)
    assert rate.line.seconds(1000) == pytest.approx(0.1005)


def test_images_of_one_size_scale_the_line():
    rate = Rate(Line(0.01, 0.001))
    for _ in range(WINDOW):
        rate.observe(500, 0.051)
    assert rate.line == Line(pytest.approx(0.001), pytest.approx(0.0001))


def test_changed_rate_is_learned_within_a_window():
    rnd, rate = random.Random(1), Rate(WRONG)
    for line in (Line(0.002, 0.0001), Line(0.002, 0.0005)):
        for _ in range(WINDOW):
            tokens = rnd.randint(50, 1200)
            rate.observe(tokens, noisy(rnd, line, tokens))
        assert rate.line.per_token == pytest.approx(line.per_token, rel=0.15)


def test_first_measurement_after_a_reset_counts_alone():
    rate = Rate(WRONG)
    for tokens in range(100, 1000, 20):
        rate.observe(tokens, tokens / 10_000)
    rate.forget()
    rate.observe(1000, 1.0)
    assert rate.line.seconds(1000) == pytest.approx(1.0)


def test_images_of_one_batch_are_one_measurement():
    rate = Rate(Line(0.0, 0.001))
    for _ in range(WINDOW):
        rate.observe(400, 0.2, at_once=2)
        rate.observe(400, 0.0, at_once=2)
    assert rate.line.seconds(800, images=2) == pytest.approx(0.2)


def test_zero_durations_are_ignored_and_negative_ones_refused():
    rate = Rate(WRONG)
    rate.observe(400, 0.0)
    assert rate.line == WRONG
    with pytest.raises(ValueError, match="took -1"):
        rate.observe(400, -1)


def test_every_accelerator_has_an_initial_guess():
    slowest = guess("something new")
    assert all(guess(kind).per_token <= slowest.per_token for kind in DEVICES)
    assert guess("cpu") == slowest
    assert guess("nvidia").per_token == pytest.approx(slowest.per_token / 8)


def test_request_ids_are_unique_prefixed_ulids_of_now():
    ids = RequestIds("r-1-")
    before = time.time_ns() // 1_000_000
    name = ids()
    made = ULID.from_str(name.removeprefix("r-1-"))
    assert name == f"r-1-{made}"
    assert before <= made.milliseconds <= time.time_ns() // 1_000_000
    assert len({ids()[-16:] for _ in range(2000)}) == 2000


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
    "exhausted": (RequestError.exhausted("p"), 503, "p", "router_exhausted"),
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
    headers = {name: made[0].headers for name, made in MADE.items() if made[0].headers}
    retry, authenticate, allow = {"Retry-After": "1"}, {"WWW-Authenticate": "Bearer"}, {"Allow": "POST"}
    again = dict.fromkeys(("no_worker", "busy", "exhausted"), retry)
    assert headers == {**again, "unauthorized": authenticate, "method_not_allowed": allow}


def test_engine_error_keeps_its_code_and_the_figures_of_a_context_length():
    body = b'{"error":{"message":"x","type":"t","param":"messages","code":"content_filter"}}'
    error = RequestError.from_engine(400, body)
    assert (error.param, error.code) == ("messages", "content_filter")
    words = "This model's maximum context length is 2000 tokens. However, you requested 2100 tokens."
    body = json.dumps({"error": {"message": words, "type": "BadRequestError", "param": None, "code": 400}}).encode()
    error = RequestError.from_engine(400, body)
    assert (error.message, error.code) == (words, "context_length_exceeded")


def test_engine_error_names_no_pod_and_no_address():
    words = "demo-worker-1: peer 10.0.3.4:5557 and [fd00::12]:8998 of 10.1.2.3 do not answer, x = [1:2]"
    error = RequestError.from_engine(500, json.dumps({"detail": words}).encode(), hidden=("demo-worker-1", ""))
    assert error.message == "the engine: peer (address) and (address) of (address) do not answer, x = [1:2]"


def test_addresses_are_found_in_a_message_as_long_as_a_client_can_make_an_engine_quote():
    # With work that grows by the square of the length this would take minutes, in the event loop.
    words = "[" * ERROR_LIMIT
    error = RequestError.from_engine(400, json.dumps({"detail": f"{words}fd00::12]:8998"}).encode())
    assert error.message == f"{words[:-1]}(address)"


TOO_LONG = b'{"error":{"message":"too long","type":"BadRequestError","param":"input_tokens","code":400}}'
NO_PARAM = b'{"error":{"message":"bad image","type":"BadRequestError","param":null,"code":400}}'
VALIDATION = b'{"detail":[{"loc":["body","messages",0,"role"],"msg":"Field required"}]}'
ENGINE = {
    TOO_LONG: ("too long", "input_tokens"),
    NO_PARAM: ("bad image", None),
    b'{"object":"error","message":"old","param":"x"}': ("old", "x"),
    b'{"error":"Unauthorized"}': ("Unauthorized", None),
    b'{"detail":"Not Found"}': ("Not Found", None),
    VALIDATION: ("Field required", "messages[0].role"),
    b"Internal Server Error\n": ("Internal Server Error", None),
    b'"boom"': ("boom", None),
}


@pytest.mark.parametrize("body", ENGINE)
@pytest.mark.parametrize(
    ("status", "kind"), [(400, "invalid_request_error"), (429, "rate_limit_error"), (500, "server_error")]
)
def test_engine_error_keeps_message_and_status(body, status, kind):
    error = RequestError.from_engine(status, body)
    assert (error.message, error.param) == ENGINE[body]
    assert (error.status, error.type, error.code) == (status, kind, "engine_error")


@pytest.mark.parametrize(
    "body", [b"", b"  ", b"[]", b"7", b"{}", b'{"error":[]}', b'{"error":{"message":""}}', b"\xff\xfe"]
)
def test_engine_error_without_message_gets_a_default(body):
    assert RequestError.from_engine(502, body).message


def test_adapters_field_takes_precedence():
    seen = []

    def field_of(status, answer):
        seen.append((status, answer["error"]["message"]))
        return "messages"

    assert RequestError.from_engine(400, NO_PARAM, field_of).param == "messages"
    assert seen == [(400, "bad image")]
    assert RequestError.from_engine(400, TOO_LONG, lambda *_: None).param == "input_tokens"


def test_engines_401_becomes_a_502_and_a_200_is_a_value_error():
    for status in (401, 403):
        error = RequestError.from_engine(status, b'{"error":"Unauthorized"}')
        assert (error.status, error.type) == (502, "server_error")
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


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(400, 599), st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_engine_answer_becomes_a_valid_error(status, body):
    assert json.loads(RequestError.from_engine(status, body).to_body())["error"]["message"]


@settings(max_examples=examples(50), deadline=None)
@given(st.text(), st.text())
def test_any_text_is_serialisable(message, param):
    json.loads(RequestError.invalid(message + "\udc80", param=param + "\ud800").to_body())


def test_field_paths_are_written_in_client_notation():
    assert field_path(["body", "messages", 2, "content", 0, "url"]) == "messages[2].content[0].url"
    assert field_path(["body"]) is None


@given(st.lists(st.tuples(st.sampled_from(["flood", "other"]), st.floats(0, 3)), max_size=300))
def test_log_lines_of_each_place_are_bounded_and_counted(lines):
    now, written, seen = 0.0, [], []
    limit = LogLimit(burst=5, per_second=1, clock=lambda: now)
    for place, pause in lines:
        now += pause
        record = logging.LogRecord("n", logging.WARNING, f"{place}.py", 1, "%s", (place,), None)
        seen.append(place)
        if limit.filter(record):
            written.append((now, place, record.getMessage()))
    for place in ("flood", "other"):
        texts = [text for _, name, text in written if name == place]
        assert len(texts) <= 5 + now
        left_out = seen.count(place) - len(texts)
        counted = sum(int(count) for text in texts for count in re.findall(r"(\d+) similar lines", text))
        if seen.count(place) <= 5:
            assert (left_out, counted) == (0, 0)
        record = logging.LogRecord("n", logging.WARNING, f"{place}.py", 1, "%s", (place,), None)
        now += 5
        assert limit.filter(record)
        counted += sum(map(int, re.findall(r"(\d+) similar lines", record.getMessage())))
        assert counted == left_out
