"""Parsing of requests: status, field and code of each invalid input, and the result of valid ones."""

import json

import pytest

from mmrouter_lib.api import Media as MediaSettings
from mmrouter_router.core.errors import RequestError
from mmrouter_router.intake import ImagePart, Limits, parse_chat
from mmrouter_router.intake.json_body import MAX_VALUES

LIMITS = Limits(max_request_bytes=1 << 20, max_images=3)
TEXT = {"type": "text", "text": "what is this?"}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
VIDEO = {"type": "video_url", "video_url": "data:,x"}


def chat(*content, **fields):
    """Return a chat request of one user message with these parts."""
    return {"model": "demo", "messages": [{"role": "user", "content": list(content) or "hello"}], **fields}


def message(**message):
    return {"model": "demo", "messages": [message]}


def read(body, limits=LIMITS, parse=parse_chat):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse(raw, limits, "demo")


def fault(body, parse=parse_chat, limits=LIMITS):
    with pytest.raises(RequestError) as caught:
        read(body, limits, parse)
    return caught.value.status, caught.value.param, caught.value.code


PART = "messages[0].content[0]"
CALL = "messages[0].tool_calls[0].function"
FUNCTION, ARGUMENTS = "tools[0].function", "chat_template_kwargs"


def audio(**fields):
    return chat({"type": "input_audio", "input_audio": fields})


def calling(function):
    return message(role="assistant", tool_calls=[{"id": "a", "type": "function", "function": function}])


MISSING, TYPE, VALUE, JSON = "missing_required_parameter", "invalid_type", "invalid_value", "invalid_json"
PART_TYPE, AMBIGUOUS, TOO_MANY = "unsupported_content_part", "ambiguous_content_part", "too_many_images"

BAD = {
    # The body.
    "empty body": (b"", None, JSON),
    "half a body": (b'{"model": "demo", ', None, JSON),
    "two values": (b"{} {}", None, JSON),
    "no object": (b"[]", None, TYPE),
    "not a number": (b'{"model": "demo", "seed": NaN}', None, JSON),
    "infinity": (b'{"model": "demo", "seed": 1e999}', None, JSON),
    "half a surrogate pair": (b'{"model": "demo", "x": "\\ud83d"}', None, JSON),
    "invalid UTF-8": (b'{"model": "d\xffmo"}', None, JSON),
    "byte order mark": (b"\xef\xbb\xbf{}", None, JSON),
    "too deep": (chat(x=json.loads("[" * 100 + "]" * 100)), None, JSON),
    "too deep to parse": (b'{"a":' * 5000 + b"1" + b"}" * 5000, None, JSON),
    "too large": (b" " * (1 << 20) + b"{}", None, "request_too_large", 413),
    # The model.
    "no model": ({"messages": [{"role": "user", "content": "x"}]}, "model", MISSING),
    "null model": (chat(model=None), "model", MISSING),
    "model of another type": (chat(model=7), "model", TYPE),
    "unknown model": (chat(model="other"), "model", "model_not_found", 404),
    # Messages.
    "no messages": ({"model": "demo"}, "messages", MISSING),
    "messages of another type": (chat(messages="x"), "messages", TYPE),
    "no message": (chat(messages=[]), "messages", "empty_array"),
    "message of another type": (chat(messages=[{"role": "user", "content": "x"}, "y"]), "messages[1]", TYPE),
    "no role": (message(content="x"), "messages[0].role", MISSING),
    "role of another type": (message(role=[], content="x"), "messages[0].role", TYPE),
    "unknown role": (message(role="function", content="x"), "messages[0].role", VALUE),
    "no content": (message(role="user"), "messages[0].content", MISSING),
    "null content": (message(role="tool", content=None), "messages[0].content", MISSING),
    "content of another type": (message(role="user", content={}), "messages[0].content", TYPE),
    "assistant's content of another type": (message(role="assistant", content=7), "messages[0].content", TYPE),
    "name of another type": (message(role="user", content="x", name=7), "messages[0].name", TYPE),
    "embeddings as a thought": (
        message(role="assistant", reasoning={"type": "prompt_embeds", "data": "AAAA"}),
        "messages[0].reasoning",
        TYPE,
    ),
    "tool calls of another type": (message(role="assistant", tool_calls="x"), "messages[0].tool_calls", TYPE),
    "tool call of another type": (message(role="assistant", tool_calls=[1]), "messages[0].tool_calls[0]", TYPE),
    "tool call without function": (message(role="assistant", tool_calls=[{}]), CALL, MISSING),
    "tool call without name": (calling({"arguments": "{}"}), f"{CALL}.name", MISSING),
    "arguments of another type": (calling({"name": "f", "arguments": []}), f"{CALL}.arguments", TYPE),
    "arguments too deep": (calling({"name": "f", "arguments": "[" * 5000}), f"{CALL}.arguments", VALUE),
    # Content parts.
    "part of another type": (chat("x"), PART, TYPE),
    "part without type": (chat({"text": "x"}), f"{PART}.type", MISSING),
    "image without type": (chat({"image_url": "data:,x"}), f"{PART}.type", MISSING),
    "type of another type": (chat({"type": 7}), f"{PART}.type", TYPE),
    "unknown part": (chat(TEXT, {"type": "smell"}), "messages[0].content[1].type", PART_TYPE),
    "image embeddings": (chat({"type": "image_embeds"}), f"{PART}.type", PART_TYPE),
    "prompt embeddings": (chat({"type": "prompt_embeds"}), f"{PART}.type", PART_TYPE),
    "file": (chat({"type": "file"}), f"{PART}.type", PART_TYPE),
    "text without text": (chat({"type": "text"}), f"{PART}.text", MISSING),
    "text of another type": (chat({"type": "text", "text": 7}), f"{PART}.text", TYPE),
    "image without image": (chat({"type": "image_url"}), f"{PART}.image_url", MISSING),
    "image by name only": (chat({**PICTURE, "image_url": None, "uuid": "known"}), f"{PART}.image_url", MISSING),
    "image without URL": (chat({**PICTURE, "image_url": {}}), f"{PART}.image_url.url", MISSING),
    "URL of another type": (chat({**PICTURE, "image_url": {"url": 7}}), f"{PART}.image_url.url", TYPE),
    "image of another type": (chat({**PICTURE, "image_url": []}), f"{PART}.image_url", TYPE),
    "text and image": (chat({**TEXT, "image_url": "http://a/", "uuid": "u"}), f"{PART}.image_url", AMBIGUOUS),
    "text with a template's word": (chat({**TEXT, "image": "x"}), f"{PART}.image", AMBIGUOUS),
    "image with embeddings": (chat({**PICTURE, "image_embeds": "x"}), f"{PART}.image_embeds", AMBIGUOUS),
    "audio without data": (audio(format="wav"), f"{PART}.input_audio.data", MISSING),
    "audio of an odd format": (audio(data="AAAA", format="wav;base64,AAAA"), f"{PART}.input_audio.format", VALUE),
    "too many images": (chat(TEXT, *[PICTURE] * 4), "messages[0].content[4].image_url.url", TOO_MANY),
    "too many media": (chat(*[PICTURE] * 3, VIDEO), "messages[0].content[3].video_url", TOO_MANY),
    # Fields.
    "stream of another type": (chat(stream="true"), "stream", TYPE),
    "stream as a number": (chat(stream=1), "stream", TYPE),
    "max_tokens of another type": (chat(max_tokens="9"), "max_tokens", TYPE),
    "max_tokens as a boolean": (chat(max_tokens=True), "max_tokens", TYPE),
    "max_completion_tokens as a float": (chat(max_completion_tokens=1.5), "max_completion_tokens", TYPE),
    "flag of another type": (chat(add_generation_prompt=None), "add_generation_prompt", TYPE),
    "continued and begun": (chat(continue_final_message=True), "continue_final_message", VALUE),
    "argument replaces messages": (chat(chat_template_kwargs={"messages": []}), f"{ARGUMENTS}.messages", VALUE),
    "other template": (chat(chat_template_kwargs={"chat_template": "x"}), f"{ARGUMENTS}.chat_template", VALUE),
    "template arguments of another type": (chat(chat_template_kwargs=[]), "chat_template_kwargs", TYPE),
    "engine arguments of another type": (chat(vllm_xargs="x"), "vllm_xargs", TYPE),
    "effort of another type": (chat(reasoning_effort=3), "reasoning_effort", TYPE),
    "documents of another type": (chat(documents=["x"]), "documents[0]", TYPE),
    "no tool": (chat(tools=[]), "tools", "empty_array"),
    "tool of another type": (chat(tools=["x"]), "tools[0]", TYPE),
    "tool of another kind": (chat(tools=[{"type": "web"}]), "tools[0].type", VALUE),
    "tool without function": (chat(tools=[{"type": "function"}]), FUNCTION, MISSING),
    "tool without name": (chat(tools=[{"function": {}}]), f"{FUNCTION}.name", MISSING),
    "odd parameters": (chat(tools=[{"function": {"name": "f", "parameters": 7}}]), f"{FUNCTION}.parameters", TYPE),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_chat_request_is_refused_with_status_field_and_code(case):
    body, param, code, *status = BAD[case]
    assert fault(body) == (*(status or [400]), param, code)


@pytest.mark.parametrize(
    ("values", "status"),
    [
        (b"[]," * 140_000, 400),
        (b'{"a":"b"},' * 50_000, 400),
        (b"1," * 1_100_000, 400),
        (b"151644," * 1_000_000, 200),  # a prompt of a million token ids
        (b'"' + b',[{\\"\\\\' * 300_000 + b'",', 200),  # a text, whatever it holds
    ],
    ids=["arrays", "objects", "numbers", "token ids", "text"],
)
def test_body_with_too_many_values_is_refused_before_parsing(values: bytes, status: int) -> None:
    body = b'{"model":"demo","messages":[{"role":"user","content":"hi"}],"bad_words":[' + values + b"1]}"
    if status == 200:
        assert read(body, Limits()).body["bad_words"][-1] == 1
    else:
        assert fault(body, limits=Limits())[::2] == (400, "request_too_large")


@pytest.mark.parametrize("shift", range(8))
def test_values_are_counted_exactly_wherever_their_escapes_lie(shift: int) -> None:
    """Escaped quotes look like too many strings, so every one is read; pieces of the scan end within escapes."""
    escaped = r"\\\"[{," * 30_000
    start = (
        b'{"model":"demo","messages":[{"role":"user","content":"'
        + b"x" * shift
        + escaped.encode()
        + b'"}],"bad_words":['
    )
    strings = MAX_VALUES - 12  # beside: 2 objects, 2 arrays, 5 keys, 3 strings
    assert len(read(start + b",".join([b'"s"'] * strings) + b"]}", Limits()).body["bad_words"]) == strings
    assert fault(start + b",".join([b'"s"'] * (strings + 1)) + b"]}", limits=Limits())[2] == "request_too_large"


def test_unusual_valid_json_is_accepted():
    request = read(
        b'{"model":"x","seed":99999999999999999999,"model":"demo","messages":[{"role":"user","content":"\\u0000"}]}'
    )
    assert (request.model, request.inexact) == ("demo", ())
    assert read(chat(metadata=json.loads("[" * 99 + "]" * 99))).body["metadata"]


def test_limits_are_those_of_the_resource():
    assert Limits.of(MediaSettings(max_request_bytes="1Mi", max_images=7)) == Limits(1 << 20, 7)
    assert fault(chat(PICTURE), limits=Limits(max_images=0))[2] == TOO_MANY


def test_plain_request_is_exact_and_unchanged():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    called = {"name": "f", "arguments": "{}"}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "developer", "content": [TEXT]},
        {"role": "user", "content": [TEXT], "name": "Ann"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [{"function": called}]},
        {"role": "tool", "content": "42", "tool_call_id": "a"},
        {"role": "assistant", "content": "x", "reasoning_content": "y", "tool_calls": []},
    ]
    body = {
        **chat(messages=messages, tools=tools, documents=[{"title": "t", "text": "x"}]),
        "stream": True,
        "max_tokens": 9,
        "max_completion_tokens": 7,
        "add_generation_prompt": False,
        "continue_final_message": True,
        "add_special_tokens": True,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    request = read(body)
    assert (request.body, request.messages, request.stream, request.max_tokens) == (body, messages, True, 7)
    assert (request.images, request.media, request.inexact) == ((), (), ())


def test_images_are_collected_in_prompt_order_in_any_spelling():
    last = [
        {"type": "input_image", "image_url": "data:,b", "detail": "auto"},
        {"type": "image_url", "image_url": {"url": "data:,c", "detail": "low"}, "uuid": "mine"},
    ]
    messages = [
        {"role": "user", "content": [TEXT, {"type": "image_url", "image_url": "http://a.example/"}]},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": last},
    ]
    request = read(chat(messages=messages))
    assert request.images == (
        ImagePart(0, 1, "http://a.example/", "messages[0].content[1].image_url"),
        ImagePart(2, 0, "data:,b", "messages[2].content[0].image_url"),
        ImagePart(2, 1, "data:,c", "messages[2].content[1].image_url.url"),
    )
    assert request.inexact == ()
    assert request.messages[2]["content"] == [
        {"type": "image_url", "image_url": {"url": "data:,b"}, "detail": "auto"},
        {"type": "image_url", "image_url": {"url": "data:,c"}, "uuid": "mine"},
    ]


def test_text_like_parts_become_text():
    kinds = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
    request = read(message(role="assistant", content=[{"type": kind, key: kind} for kind, key in kinds.items()]))
    assert [(part["type"], part["text"]) for part in request.messages[0]["content"]] == [("text", k) for k in kinds]
    assert request.inexact == ()


def test_video_and_audio_are_collected_and_their_urls_removed_from_the_body():
    parts = [
        {"type": "video_url", "video_url": {"url": "http://secret.example/v"}},
        {"type": "audio_url", "audio_url": "http://secret.example/a"},
        {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}},
    ]
    request = read(chat(TEXT, *parts))
    assert [(part.kind, part.url, part.param) for part in request.media] == [
        ("video", "http://secret.example/v", "messages[0].content[1].video_url.url"),
        ("audio", "http://secret.example/a", "messages[0].content[2].audio_url"),
        ("audio", "data:audio/wav;base64,QUJD", "messages[0].content[3].input_audio.data"),
    ]
    assert request.inexact == (), "whether they are modelled is up to the family"
    assert "secret" not in json.dumps(request.body)
    for number, part in enumerate(request.media):
        part.embed(f"data:,{number}")
    assert request.body["messages"][0]["content"][1:] == [
        {"type": "video_url", "video_url": {"url": "data:,0"}},
        {"type": "audio_url", "audio_url": {"url": "data:,1"}},
        {"type": "audio_url", "audio_url": {"url": "data:,2"}},
    ]


@pytest.mark.parametrize(
    ("fields", "reasons"),
    [
        ({"temperature": 0, "top_p": 1, "top_k": 5, "n": 2, "stop": ["x"], "seed": 1, "logit_bias": {"1": 2}}, []),
        ({"response_format": {"type": "json_object"}, "tool_choice": "auto", "user": "u", "metadata": {}}, []),
        ({"logprobs": True, "top_logprobs": 2, "return_token_ids": True, "stream_options": {}, "priority": 1}, []),
        ({"cache_salt": "s", "kv_transfer_params": {}, "mm_hashes": [], "request_id": "r"}, []),
        ({"truncate_prompt_tokens": None, "mm_processor_kwargs": None, "prompt_logprobs": None, "echo": False}, []),
        ({"vllm_xargs": None}, []),
        ({"vllm_xargs": {"kv_cache_report_mode": "full"}}, []),
        ({"vllm_xargs": {"kv_cache_report_mode": "full", "other": 1}}, [("vllm_xargs", "engine_arguments")]),
        ({"mm_processor_kwargs": {}, "media_io_kwargs": {"image": {}, "video": {"num_frames": 4}}}, []),
        ({"mm_processor_kwargs": {"max_pixels": 4096}}, [("mm_processor_kwargs", "processor_options")]),
        ({"media_io_kwargs": {"image": {"image_mode": None}}}, [("media_io_kwargs", "processor_options")]),
        ({"media_io_kwargs": ["image"]}, [("media_io_kwargs", "processor_options")]),
        ({"chat_template": "{{ x }}"}, [("chat_template", "request_template")]),
        ({"truncate_prompt_tokens": 0}, [("truncate_prompt_tokens", "truncation")]),
        ({"prompt_logprobs": 0}, [("prompt_logprobs", "cache_not_read")]),
        ({"echo": True}, [("echo", "cache_not_read")]),
        ({"use_beam_search": True}, [("use_beam_search", "beam_search")]),
        ({"chat_template_kwargs": {"truncation": True}}, [("chat_template_kwargs.truncation", "template_argument")]),
    ],
)
def test_every_field_is_harmless_modelled_removed_or_a_reason(fields, reasons):
    assert [(reason.field, reason.reason) for reason in read(chat(**fields)).inexact] == reasons


def test_a_message_is_continued_after_a_generation_prompt_or_instead_of_it():
    continued = chat(messages=[{"role": "assistant", "content": "So"}], continue_final_message=True)
    body = json.dumps(continued).encode()
    assert parse_chat(body, LIMITS, "demo", "sglang").inexact == ()
    with pytest.raises(RequestError) as refused:
        parse_chat(body, LIMITS, "demo", "vllm")
    assert refused.value.param == "continue_final_message"


UNKNOWN = "unknown_parameter"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (chat(brand_new=None), "brand_new"),
        (message(role="user", content="x", task="y"), "messages[0].task"),
        (chat({**TEXT, "bold": True}), "messages[0].content[0].bold"),
        (
            chat({"type": "image_url", "image_url": {"url": "data:,x", "max_dynamic_patch": 1}}),
            "messages[0].content[0].image_url.max_dynamic_patch",
        ),
        (calling({"name": "f", "image_url": ""}), f"{CALL}.image_url"),
        (chat(**{"x" * 1000: 1}), "x" * 80 + "..."),
    ],
)
def test_an_unknown_field_at_any_place_is_refused_by_its_name(body, expected):
    assert fault(body) == (400, expected, UNKNOWN)


def test_known_fields_of_parts_are_no_reason():
    assert read(chat({**TEXT, "cache_control": {"type": "ephemeral"}, "uuid": "u"})).inexact == ()


def test_a_field_is_judged_by_its_name_as_parsed():
    raw = b'{"model":"demo","messages":[{"role":"user","content":"x"}],%b}'
    for fields in (rb'"\u0072id": "x"', b'"user": "a", "rid": "x", "user": "b"'):
        assert fault(raw % fields) == (400, "rid", UNKNOWN)
    last = read(raw % b'"n": 1, "n": 2')
    assert last.body["n"] == 2  # the engine gets the body as parsed, so it reads the same value
