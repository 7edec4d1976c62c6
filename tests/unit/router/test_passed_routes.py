"""Routes that are passed on to an engine that serves them: their choice by routes and load, their bodies, tenants."""

import base64
import json
import re
import tracemalloc
from contextlib import asynccontextmanager
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.conftest import examples
from unit.router.rig import BLOCK, KEYS, Engine, LoopbackEngine, counts, heartbeat, http_answer, resource
from unit.router.router_rig import client_of, heard, join, member, router
from unit.router.test_intake import MISSING, PART_TYPE, TYPE, UNKNOWN, fault, read

from mmrouter_lib.engines import ADAPTERS
from mmrouter_lib.engines.base.passed_routes import PASSED_ROUTES, TRANSCRIBE, UNCACHED, served_routes
from mmrouter_router.core.errors import RequestError
from mmrouter_router.fleet.membership import Membership
from mmrouter_router.intake import parse_forwarded, parse_passed
from mmrouter_router.intake.form_body import Field, read_form, write_form

EVERY = tuple(PASSED_ROUTES)
EMBED = "/v1/embeddings"
EMBEDDED = (400, "messages[0].content[0].type", PART_TYPE)
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n rest").decode()


@asynccontextmanager
async def serving(router, *routes):
    """Add an engine per item of ``routes``, which serves these passed routes."""
    engines = [await Engine().__aenter__() for _ in routes]
    members = [member(f"w{number}", engine.ip) for number, engine in enumerate(engines)]
    router.apply_membership(Membership(tuple(members)))
    for one, paths in zip(members, routes, strict=True):
        heard(router, one.uid, routes=paths, context_length=4096)
    try:
        yield engines
    finally:
        for engine in engines:
            engine.close()


@pytest.mark.parametrize("path", [path for path in EVERY if path != TRANSCRIBE])
async def test_an_engine_that_serves_the_route_gets_the_body(r, path):
    body = {"text": "x"} if path == "/generate" else {"model": "t"}
    async with serving(r, (), (path,), ()) as engines, client_of(r) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 200
    assert [[(where, given) for where, given, _ in engine.seen] for engine in engines] == [[], [(path, body)], []]
    assert counts(r.metrics.requests, "path", "code") == {(path, "200"): 1}


async def test_a_route_that_no_engine_serves_is_a_404_that_says_so(r):
    async with serving(r, ("/tokenize",), ()) as engines, client_of(r) as client:
        answer = await client.post(EMBED, json={"model": "t", "input": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "route_not_served")
        assert answer.json()["error"]["message"] == f"The engines of this deployment do not serve {EMBED}."
        assert not any(engine.seen for engine in engines)
        r.apply_membership(Membership(()))
        assert (await client.post(EMBED, json={"model": "t", "input": "x"})).status_code == 503, "no engine is known"


async def test_passed_routes_go_to_the_least_loaded_engine(r):
    async with serving(r, EVERY, EVERY) as engines, client_of(r) as client:
        busy = r.fleet.workers["uid-w0"]
        r.fleet.usage(busy, 0).begin(KEYS, 0.0, 100.0)
        for number in range(4):
            assert (await client.post("/tokenize", json={"prompt": f"other {number}"})).status_code == 200
        assert [len(engine.seen) for engine in engines] == [0, 4]


@pytest.mark.parametrize("ranks", [1, 2])
async def test_generate_names_the_rank_that_its_load_is_counted_at(r, ranks):
    async with serving(r, ("/generate",)) as (engine,), client_of(r) as client:
        worker = r.fleet.workers["uid-w0"]
        heartbeat(r.fleet, worker, routes=("/generate",), context_length=4096, ranks=ranks)
        r.fleet.usage(worker, 0).begin(KEYS, 0.0, 100.0)
        assert (await client.post("/generate", json={"text": "x"})).status_code == 200
    ((_, body, _),) = engine.seen
    assert body == {"text": "x"} | ({"routed_dp_rank": 1} if ranks == 2 else {})


async def test_media_are_resolved_and_identities_removed():
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}, "uuid": "of another tenant"}
    bodies = {
        "/tokenize": {"messages": [{"role": "user", "content": [part]}]},
        "/generate": {"text": "x", "image_data": [PNG, [f"data:,{'x' * 9}"]], "rid": "of another tenant"},
        EMBED: {"model": "t", "input": [{"text": "x", "image": PNG}], "cache_salt": "of another tenant"},
    }
    own = resource(engine={"type": "sglang", "image": "i", "blockSize": BLOCK})
    async with router(own=own) as r, serving(r, EVERY) as (engine,), client_of(r) as client:
        for path, body in bodies.items():
            assert (await client.post(path, json=body)).status_code == 200, path
        seen = {path: body for path, body, _ in engine.seen}
    assert "tenant" not in json.dumps(seen)
    uri = f"data:image/png;base64,{PNG}"
    assert seen["/tokenize"]["messages"][0]["content"][0]["image_url"]["url"] == uri
    assert seen["/generate"]["image_data"] == [uri, ["data:application/octet-stream;base64,eHh4eHh4eHh4"]]
    assert seen[EMBED]["input"] == [{"text": "x", "image": uri}]
    assert counts(r.metrics.stripped, "field") == {"uuid": 1, "rid": 1, "cache_salt": 1}


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/tokenize", {"model": "other", "prompt": "x"}, (404, "model", "model_not_found")),
        ("/tokenize", {"prompt": "x", "new": 1}, (400, "new", UNKNOWN)),
        ("/pooling", {"data": {"url": "file:///etc/passwd"}}, (400, "data", UNKNOWN)),
        ("/generate", {"text": "x", "custom_logit_processor": "code"}, (400, "custom_logit_processor", UNKNOWN)),
        ("/generate", {"input_embeds": [[0.1]]}, (400, "input_embeds", UNKNOWN)),
        ("/generate", {"sampling_params": {"custom_params": {}}}, (400, "sampling_params.custom_params", PART_TYPE)),
        ("/generate", {"image_data": {"format": "processor_output"}}, (400, "image_data", PART_TYPE)),
        ("/generate", {"image_data": [1]}, (400, "image_data[0]", PART_TYPE)),
        (
            EMBED,
            {"messages": [{"content": [{"image_url": {}}]}]},
            (400, "messages[0].content[0].image_url.url", MISSING),
        ),
        (EMBED, {"messages": [{"content": [{"type": "prompt_embeds", "data": "AAAA"}]}]}, EMBEDDED),
        ("/v1/score", {"data_1": {"content": [{"file_url": "x"}]}}, (400, "data_1.content[0].file_url", PART_TYPE)),
    ],
)
def test_invalid_passed_request_is_refused_with_status_field_and_code(path, body, expected):
    assert fault(body, parse=lambda raw, *more: parse_passed(path, raw, *more)) == expected


def test_a_tool_may_have_a_parameter_that_is_named_like_a_medium():
    properties = {name: {"type": "string"} for name in ("image", "image_url", "file_id", "audio_data", "uuid")}
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"properties": properties}}}]
    request = read({"prompt": "x", "tools": tools}, parse=partial(parse_passed, "/tokenize"))
    assert (request.body["tools"], request.media) == (tools, ())


AUDIO_PART = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}


@pytest.mark.parametrize(
    "part", [AUDIO_PART, {"type": "image_url"}, {"image": PNG}, {"type": "image_url", "image_url": None}]
)
@pytest.mark.parametrize("parse", [partial(parse_passed, EMBED), parse_forwarded])
def test_no_part_brings_an_identity_of_the_clients(part, parse):
    for name in ("uuid", "content_hash"):
        request = read(
            {"model": "demo", "input": [{"role": "user", "content": [{**part, name: "chosen"}]}]}, parse=parse
        )
        assert "chosen" not in json.dumps(request.body)
        assert request.removed == (name,)


async def test_a_path_of_the_engines_files_is_no_image(r):
    async with serving(r, EVERY) as (engine,), client_of(r) as client:
        for url in ("/etc/passwd", "file:///etc/passwd", "http://127.0.0.1/x.png"):
            answer = await client.post("/generate", json={"text": "x", "image_data": url})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "image_data")
        assert engine.seen == []


@pytest.mark.parametrize("engine", ADAPTERS)
def test_a_tenants_salt_reaches_every_engine_that_computes_a_prompt(engine):
    salted = ADAPTERS[engine].salted_routes
    assert salted <= PASSED_ROUTES.keys() - UNCACHED
    assert not any("cache_salt" in fields or "lora_path" in fields for fields in PASSED_ROUTES.values())


@pytest.mark.parametrize("key", ["", "key"])
async def test_a_route_without_a_place_for_the_salt_is_not_served_to_tenants(tmp_path, key):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with router(tmp_path, key=key) as r, serving(r, EVERY) as (engine,), client_of(r, headers=headers) as client:
        for path in ("/generate", "/tokenize", EMBED):
            answer = await client.post(path, json={"text": "x"} if path == "/generate" else {"model": "t"})
            assert answer.status_code == (404 if key and path == "/generate" else 200), path
        salts = {path: "cache_salt" in body for path, body, _ in engine.seen}
    assert salts == (
        {"/tokenize": False, EMBED: True} if key else {"/generate": False, "/tokenize": False, EMBED: False}
    )


def test_only_routes_of_the_table_are_passed():
    openapi = {"paths": {"/v1/embeddings": {}, "/v1/load_lora_adapter": {}, "/generate": {}}}
    assert served_routes(openapi) == ("/v1/embeddings", "/generate")
    assert served_routes({}) == served_routes({"paths": None}) == ()


def test_a_passed_request_is_never_exact():
    request = read({"prompt": "x"}, parse=lambda raw, *more: parse_passed("/tokenize", raw, *more))
    assert ([reason.label for reason in request.inexact], request.endpoint) == (["not_modelled:body"], "/tokenize")


async def test_the_model_list_has_the_engines_context_and_a_time(r):
    async with client_of(r) as client:
        assert (await client.get("/v1/models")).json()["data"][0]["max_model_len"] is None
        async with serving(r, ()):
            (model,) = (await client.get("/v1/models")).json()["data"]
            assert (await client.get("/v1/models/t")).json() == model
            assert (model["id"], model["max_model_len"]) == ("t", 4096)
            assert model["created"] > 1_700_000_000
            missing = await client.get("/v1/models/of/another")
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
            version = (await client.get("/version")).json()
            assert (version["version"], version["engine"]) == ("0.32.0", "vllm")
            for method in ("GET", "POST"):
                assert (await client.request(method, "/ping")).status_code == 200


class Listens(LoopbackEngine):
    """An engine that keeps the forms it gets."""

    def __init__(self):
        super().__init__()
        self.forms = []

    async def _connection(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(re.search(r"content-length: (\d+)", head)[1])
        self.forms.append((re.search(r"content-type: (\S+)", head)[1], await reader.readexactly(length)))
        writer.write(http_answer(200, b'{"text": "hello"}'))


AUDIO = b"RIFF\r\n--not-the-boundary\r\n\x00\xff"


async def test_a_transcription_reaches_an_engine_as_a_form_of_the_routers_own(r):
    engine = Listens()
    await engine.serve()
    one = member("w", engine.ip)
    join(r, one, routes=(TRANSCRIBE,))
    async with client_of(r) as client:
        files = {"file": ("a.wav", AUDIO, "audio/wav")}
        answer = await client.post(TRANSCRIBE, files=files, data={"model": "t", "language": "en"})
        refused = await client.post(TRANSCRIBE, files=files, data={"vllm_xargs": "{}"})
    engine.close()
    assert (answer.status_code, answer.json()) == (200, {"text": "hello"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "vllm_xargs")
    ((kind, body),) = engine.forms
    assert kind.startswith("multipart/form-data;")
    fields = {field.name: (field.value, field.filename, field.type) for field in read_form(body)}
    assert fields == {
        "file": (AUDIO, b"a.wav", b"audio/wav"),
        "model": (b"t", None, b""),
        "language": (b"en", None, b""),
    }


def form(*fields, end=b"--b--\r\n"):
    return b"".join(b"--b\r\n%b\r\n\r\n%b\r\n" % field for field in fields) + end


NAMED, FILE = b'Content-Disposition: form-data; name="%b"', b'content-disposition: form-data; name="file"; filename="f"'


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"{}", (400, None, "invalid_form")),
        (form((FILE, b"x"), end=b""), (400, None, "invalid_form")),
        (form((b'content-disposition: form-data; name="a\\"b"', b"x")), (400, None, "invalid_form")),
        (form((b"content-type: text/plain", b"x")), (400, None, "invalid_form")),
        (form(*[(NAMED % b"language", b"x")] * 70), (400, None, "invalid_form")),
        (form((NAMED % b"model", b"other"), (FILE, b"x")), (404, "model", "model_not_found")),
        (form((NAMED % b"url", b"file:///etc/passwd"), (FILE, b"x")), (400, "url", UNKNOWN)),
        (form((NAMED % b"language", b"en")), (400, "file", MISSING)),
        (form((NAMED % b"file", b"x")), (400, "file", TYPE)),
    ],
)
def test_invalid_form_is_refused_with_status_field_and_code(raw, expected):
    assert fault(raw, parse=lambda raw, *more: parse_passed(TRANSCRIBE, raw, *more)) == expected


@pytest.mark.parametrize("end", [b"\r\n\r\nx", b""])
def test_the_headers_of_a_field_are_bounded_before_they_become_objects(end):
    lines = b"\r\n".join(b"%06d:" % number for number in range(200_000))
    raw = b"--b\r\n" + NAMED % b"language" + b"\r\n" + lines + end + b"\r\n--b--\r\n"
    tracemalloc.start()
    try:
        with pytest.raises(RequestError) as refused:
            read_form(raw)
        assert refused.value.code == "invalid_form"
        assert tracemalloc.get_traced_memory()[1] < 8 * len(raw)
    finally:
        tracemalloc.stop()


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["file", "model", "x[]"]), st.binary(max_size=40)), max_size=5))
def test_a_form_that_is_written_is_read_as_it_was(fields):
    given_fields = [Field(name, value, b"f" if name == "file" else None) for name, value in fields]
    if given_fields:
        assert read_form(b"".join(write_form(given_fields)[1])) == given_fields
