"""Anthropic's message requests: their chat, their answers and errors, and their way to an engine."""

import base64
import io
import json
from contextlib import asynccontextmanager

import httpx
import pytest
from PIL import Image
from unit.router.rig import LoopbackEngine, LoopbackServer, http_answer, value
from unit.router.router_rig import client_of, join, member, router
from unit.router.test_intake import MISSING, PART_TYPE, TOO_MANY, TYPE, UNKNOWN, VALUE, fault, read

from mmrouter_router.core.errors import RequestError
from mmrouter_router.intake import TemplateTraits, parse_messages
from mmrouter_router.streams.messages import MessageStream, message_of

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n rest").decode()
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
BY_URL = {"type": "image", "source": {"type": "url", "url": "https://a.example/x.png"}}
MESSAGES = "/v1/messages"


def parse(raw, *more, traits=TemplateTraits(system_first=False), **options):  # noqa: B008 - immutable
    return parse_messages(raw, *more, traits=traits, **options)


def request(*content, role="user", **fields):
    messages = [{"role": role, "content": list(content) if not isinstance(content[0], str) else content[0]}]
    return {"model": "demo", "max_tokens": 8, "messages": messages, **fields}


def chat_of(body, **options):
    return read(body, parse=lambda raw, *more: parse(raw, *more, **options)).body


def test_blocks_become_the_parts_of_a_chat_in_order():
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {"q": "x"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "seen"}, IMAGE]}
    body = {
        "model": "demo",
        "max_tokens": 8,
        "system": [{"type": "text", "text": "be"}, {"type": "text", "text": " brief"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "look"}, BY_URL]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, call]},
            {"role": "user", "content": [{"type": "text", "text": "well?"}, result]},
        ],
    }
    made = read(body, parse=parse)
    system, first, assistant, tool, pictures, last = made.messages
    assert system == {"role": "system", "content": "be brief"}
    assert [part["type"] for part in first["content"]] == ["text", "image_url"]
    function = {"name": "look", "arguments": '{"q": "x"}'}
    assert assistant["tool_calls"] == [{"id": "t1", "type": "function", "function": function}]
    assert (assistant["reasoning"], "content" in assistant) == ("hm", False)
    assert tool == {"role": "tool", "tool_call_id": "t1", "content": "seen"}
    assert [part["type"] for part in pictures["content"]] == ["image_url"]
    assert last["content"] == "well?"
    assert [image.param for image in made.images] == [
        "messages[0].content[1].source.url",
        "messages[2].content[1].content[1].source.data",
    ]
    assert [image.inline is None for image in made.images] == [True, False]
    assert made.images[1].inline.data == base64.b64decode(PNG)
    assert (made.endpoint, made.inexact, made.max_tokens) == ("/v1/chat/completions", (), 8)


def test_images_keep_their_bytes_and_fields_where_results_of_tools_move_to_the_front():
    other = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG[:-4]}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [other]}
    made = read(request(IMAGE, BY_URL, result), parse=parse)
    assert [(image.message, image.part, image.param) for image in made.images] == [
        (1, 0, "messages[0].content[2].content[0].source.data"),
        (2, 0, "messages[0].content[0].source.data"),
        (2, 1, "messages[0].content[1].source.url"),
    ]
    assert [image.inline and image.inline.data for image in made.images] == [
        base64.b64decode(PNG[:-4]),
        base64.b64decode(PNG),
        None,
    ]
    assert made.images[2].url == BY_URL["source"]["url"]


@pytest.mark.parametrize("url", [f"data:image/png;base64,{PNG * 40}", f"https://a.example/{'x' * 1000}"])
def test_the_size_of_a_text_does_not_shrink_by_the_urls_of_images(url):
    text = "x" * 1000
    made = read(
        request({"type": "text", "text": text}, {"type": "image", "source": {"type": "url", "url": url}}), parse=parse
    )
    assert len(text) < made.text_size <= len(made.source)


def test_fields_of_the_answer_are_those_of_a_chat():
    tool = {"name": "look", "input_schema": {"properties": {}}}
    body = request("x", tools=[tool], tool_choice={"type": "tool", "name": "look"}, stop_sequences=["."], top_k=3)
    body |= {"stream": True, "thinking": {"type": "enabled", "budget_tokens": 4}, "output_config": {"effort": "low"}}
    body |= {"metadata": {"user_id": "u"}, "cache_salt": "of another tenant"}
    made = read(body, parse=parse)
    chat = made.body
    assert chat["tools"][0]["function"]["parameters"] == {"properties": {}, "type": "object"}
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    expected = {"stop": ["."], "top_k": 3, "max_tokens": 8, "thinking_token_budget": 4, "reasoning_effort": "low"}
    assert {name: chat[name] for name in expected} == expected
    assert (made.stream, chat["stream_options"], made.removed) == (True, {"include_usage": True}, ("cache_salt",))
    assert not {"metadata", "cache_salt"} & chat.keys()


def test_system_messages_are_merged_for_a_template_that_takes_one():
    body = request("x", system="first")
    body["messages"] += [{"role": "system", "content": "second"}]
    assert [m["content"] for m in chat_of(body)["messages"]] == ["first", "x", "second"]
    merged = chat_of(body, traits=TemplateTraits(system_first=True))["messages"]
    assert [m["content"] for m in merged] == ["firstsecond", "x"]


def test_disabled_thinking_is_the_effort_that_the_template_understands():
    body = request("x", thinking={"type": "disabled"})
    for effort in ("none", "low"):
        traits = TemplateTraits(system_first=False, no_thinking=lambda effort=effort: effort)
        assert chat_of(body, traits=traits)["reasoning_effort"] == effort


FIRST = "messages[0].content[0]"
UNREADABLE = {"type": "image", "source": {"type": "base64", "data": "?"}}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"model": "demo", "max_tokens": 1}, (400, "messages", MISSING)),
        ({**request("x"), "max_tokens": None}, (400, "max_tokens", MISSING)),
        ({**request("x"), "model": "other"}, (404, "model", "model_not_found")),
        (request("x", mcp_servers=[{}]), (400, "mcp_servers", "unsupported_parameter")),
        (request("x", new=1), (400, "new", UNKNOWN)),
        (request("x", role="tool"), (400, "messages[0].role", VALUE)),
        (request({"type": "document", "source": {}}), (400, f"{FIRST}.type", PART_TYPE)),
        (request({"type": "text", "text": "x", "image_url": "y"}), (400, f"{FIRST}.image_url", UNKNOWN)),
        (request({"type": "text", "text": 7}), (400, f"{FIRST}.text", TYPE)),
        (request({"type": "image", "source": {"type": "file", "file_id": "f"}}), (400, f"{FIRST}.source.type", VALUE)),
        (request(UNREADABLE), (400, f"{FIRST}.source.data", "media_data_uri")),
        (request(*[IMAGE] * 4), (400, "messages[0].content[3].source.data", TOO_MANY)),
        (request({"type": "tool_result", "tool_use_id": "t"}, role="assistant"), (400, FIRST, PART_TYPE)),
        (request("x", tools=[{"type": "bash_20250124", "name": "bash"}]), (400, "tools[0].type", PART_TYPE)),
        (request("x", tool_choice={"type": "any"}), (400, "tools", MISSING)),
        (request("x", tool_choice={"type": []}), (400, "tool_choice.type", VALUE)),
        (request("x", tool_choice={"type": {}}), (400, "tool_choice.type", VALUE)),
        (request("x", thinking={"type": "enabled", "budget_tokens": 8}), (400, "thinking.budget_tokens", VALUE)),
        (request("x", output_config={"effort": "most"}), (400, "output_config.effort", VALUE)),
    ],
)  # fmt: skip
def test_invalid_message_request_is_refused_with_status_field_and_code(body, expected):
    assert fault(body, parse=parse) == expected


# -- answers


ANSWER = {
    "id": "chatcmpl-r-1",
    "model": "demo",
    "choices": [{"message": {"content": "Hi", "reasoning": "hm"}, "finish_reason": "stop", "stop_reason": "."}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}},
}


def test_a_whole_answer_becomes_a_message():
    message = message_of(ANSWER)
    assert (message["id"], message["type"], message["role"]) == ("msg_r-1", "message", "assistant")
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", ".")
    assert message["usage"] == {"input_tokens": 5, "output_tokens": 2, "cache_read_input_tokens": 4}


@pytest.mark.parametrize(
    ("arguments", "given"), [('{"q": 1}', {"q": 1}), ("", {}), ('{"q": ', {"arguments": '{"q": '})]
)
def test_a_tool_call_becomes_a_block_whose_text_is_not_lost(arguments, given):
    call = {"id": "c", "function": {"name": "look", "arguments": arguments}}
    choice = {"message": {"content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}
    message = message_of({**ANSWER, "choices": [choice]})
    assert message["content"] == [{"type": "tool_use", "id": "c", "name": "look", "input": given}]
    assert message["stop_reason"] == "tool_use"


def chunk(delta=None, finish=None, **fields):
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return (
        b"data: " + json.dumps({"id": "chatcmpl-r", "model": "demo", "choices": choices, **fields}).encode() + b"\n\n"
    )


def call(index, name=None, arguments=None):
    function = {key: text for key, text in (("name", name), ("arguments", arguments)) if text is not None}
    return {"tool_calls": [{"index": index, "id": f"c{index}" if name else None, "function": function}]}


STREAM = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"reasoning": "hm"}),
    chunk({"content": "a"}),
    chunk({"content": "b"}),
    chunk(call(0, "look", "")),
    chunk(call(0, arguments='{"q":')),
    chunk({"content": "late"}),
    chunk(call(0, arguments="1}")),
    chunk(call(1, "wait", "{}")),
    chunk({}, "tool_calls"),
    chunk(usage={"prompt_tokens": 7, "completion_tokens": 5}),
    b"data: [DONE]\n\n",
]


def events(raw):
    """Return (name, data) of each event, and check that both agree."""
    found = []
    for event in raw.split(b"\n\n")[:-1]:
        name, data = event.split(b"\n")
        decoded = json.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + decoded["type"].encode()
        found.append(decoded)
    return found


def told(found):
    """Return the blocks of a stream as the client puts them together, and the last delta."""
    blocks = {}
    for event in found:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = [event["content_block"]["type"], ""]
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            blocks[event["index"]][1] += delta.get("text", delta.get("thinking", delta.get("partial_json", "")))
    (last,) = [event for event in found if event["type"] == "message_delta"]
    return [tuple(blocks[index]) for index in sorted(blocks)], last


@pytest.mark.parametrize("together", [1, 3, len(STREAM)])
def test_a_stream_becomes_blocks_however_its_events_arrive(together):
    stream = MessageStream(prompt_tokens=7)
    pieces = [b"".join(STREAM[at : at + together]) for at in range(0, len(STREAM), together)]
    found = events(b"".join(map(stream.feed, pieces)))
    blocks, last = told(found)
    assert blocks == [("thinking", "hm"), ("text", "ab"), ("tool_use", '{"q":1}'), ("text", "late"), ("tool_use", "{}")]
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert last["usage"] == {"input_tokens": 7, "output_tokens": 5}
    assert found[0]["message"]["usage"]["input_tokens"] == 7
    kinds = [event["type"] for event in found]
    assert (kinds[0], kinds[-1], kinds.count("message_start")) == ("message_start", "message_stop", 1)
    starts, stops = kinds.count("content_block_start"), kinds.count("content_block_stop")
    assert starts == stops == len(blocks)


def test_an_error_event_ends_the_stream_of_a_message():
    stream = MessageStream()
    broken = RequestError(500, "It broke.", type="server_error", code="stream_limit").to_body()
    found = events(stream.feed(STREAM[0] + b"data: " + broken + b"\n\ndata: [DONE]\n\n"))
    assert [event["type"] for event in found] == ["message_start", "error"]
    assert found[-1]["error"] == {"type": "api_error", "message": "It broke."}
    assert stream.feed(STREAM[1]) == b""


# -- through the router


class Chats(LoopbackEngine):
    """An engine that answers chats, whole or as a stream."""

    async def respond(self, reader, writer, headers):
        body = self.requests[-1][2]
        if body.get("stream"):
            raw = b"".join(STREAM)
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(raw)
            writer.write(head + raw)
        else:
            writer.write(http_answer(200, json.dumps(ANSWER).encode()))
        return True


@asynccontextmanager
async def serving(r, engine):
    await engine.serve()
    join(r, member("w", engine.ip))
    try:
        yield
    finally:
        engine.close()


@pytest.mark.parametrize("key", ["", "key"])
async def test_engines_get_a_chat_with_identities_and_the_tenants_salt(tmp_path, key):
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": tiny_png()}}
    body = {**request({"type": "text", "text": "what?"}, picture), "model": "t"}
    async with router(tmp_path, key=key) as r, serving(r, engine := Chats()), client_of(r) as client:
        answer = await client.post(MESSAGES, json=body, headers={"x-api-key": key} if key else {})
    assert (answer.status_code, answer.json()["type"]) == (200, "message")
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    ((path, _, chat),) = engine.requests
    part = chat["messages"][0]["content"][1]
    assert (path, part["uuid"][:3]) == ("/v1/chat/completions", "m1-")
    assert part["image_url"]["url"] == f"data:image/png;base64,{tiny_png()}"
    assert ("cache_salt" in chat) == bool(key)
    assert value(r.metrics.requests.labels(MESSAGES, "200")) == 1


@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}?beta=true"])
async def test_a_streamed_message_reaches_the_client_as_events(path):
    body = {**request("x"), "model": "t", "stream": True}
    async with (
        router() as r,
        serving(r, Chats()),
        LoopbackServer(r.client_app()) as server,
        httpx.AsyncClient() as client,
    ):
        answer = await client.post(f"http://{server.ip}:8000{path}", json=body)
    assert answer.headers["content-type"] == "text/event-stream"
    assert told(events(answer.content))[0][1] == ("text", "ab")


async def test_errors_have_anthropics_shape_and_name_the_field():
    async with router() as r, client_of(r) as client:
        answer = await client.post(MESSAGES, json={**request({"type": "text"}), "model": "t"})
        error = answer.json()
        assert (answer.status_code, error["type"]) == (400, "error")
        assert error["error"]["type"] == "invalid_request_error"
        assert f"{FIRST}.text" in error["error"]["message"]
        assert error["request_id"] == answer.headers["request-id"]
        refused = await client.post(MESSAGES, json={**request("x"), "model": "t"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "overloaded_error")
        wrong = await client.get(MESSAGES)
        assert (wrong.status_code, wrong.json()["type"]) == (405, "error")


class BreaksOff(LoopbackEngine):
    """An engine that closes its connection within an answer of this status."""

    def __init__(self, status):
        super().__init__()
        self.status = status

    async def respond(self, reader, writer, headers):
        head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n" % self.status
        writer.write(head + b'5\r\n{"id"\r\n')
        await writer.drain()
        writer.close()
        return False


@pytest.mark.parametrize("status", [200, 400])
async def test_a_message_whose_engine_breaks_off_before_anything_was_sent_is_an_error(status):
    body = {**request("x"), "model": "t"}
    async with router() as r, serving(r, BreaksOff(status)), client_of(r) as client:
        answer = await client.post(MESSAGES, json=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (502, "api_error")
        assert value(r.metrics.requests.labels(MESSAGES, "502")) == 1


async def test_tokens_of_a_message_are_counted_without_an_engine():
    async with router() as r, client_of(r) as client:
        raw = json.dumps({**request("how many?"), "model": "t"}).encode()
        body = {name: item for name, item in json.loads(raw).items() if name != "max_tokens"}
        counted = await client.post(f"{MESSAGES}/count_tokens", json=body)
        prepared = await r.chat.prepare(MESSAGES, raw, r.chat.tenants.authenticate([]))
        assert (counted.status_code, counted.json()) == (200, {"input_tokens": len(prepared.ids)})
        assert prepared.exactness == "exact"


def tiny_png():
    file = io.BytesIO()
    Image.new("RGB", (56, 56), "red").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
