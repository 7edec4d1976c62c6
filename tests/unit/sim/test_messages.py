"""Messages of simulated engines are their chats, in Anthropic's form."""

import base64

from answer_forms import EVENTS, MESSAGE, MESSAGE_FORM, events_told, message_told
from unit.sim.conftest import CHAT, LONG, chat_body, png

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"


def body(*content, **fields):
    return {"model": "tiny", "messages": [{"role": "user", "content": list(content)}], "max_tokens": 4, **fields}


def text(words):
    return {"type": "text", "text": words}


async def test_a_message_has_the_prompt_and_the_answer_of_its_chat(serve):
    client = await serve()
    status, made = await client.post(MESSAGES, body(text(LONG)))
    _, chat = await client.post(CHAT, chat_body(LONG))
    assert (status, made["content"][0]["text"]) == (200, chat["choices"][0]["message"]["content"])
    usage = made["usage"]
    total = (
        usage["input_tokens"] + usage.get("cache_read_input_tokens", 0) + usage.get("cache_creation_input_tokens", 0)
    )
    assert total == chat["usage"]["prompt_tokens"]
    _, counted = await client.post(COUNT, body(text(LONG)))
    assert counted == {"input_tokens": total}


async def test_an_image_is_the_image_of_a_chat_and_its_repeat_is_cached(serve):
    client = await serve("--block-size", "16", "--enable-prompt-tokens-details")
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png()).decode()}
    asked = body({"type": "image", "source": source}, text(LONG))
    _, first = await client.post(MESSAGES, asked)
    _, again = await client.post(MESSAGES, asked)
    assert first["usage"]["cache_read_input_tokens"] == 0 < again["usage"]["cache_read_input_tokens"]


async def test_whole_and_streamed_messages_have_the_form_of_the_real_engines(serve):
    client = await serve()
    asked = {"model": "tiny", "ignore_eos": True, **MESSAGE}
    _, made = await client.post(MESSAGES, asked)
    assert message_told(made) == MESSAGE_FORM
    async with client.session.post(client.url + MESSAGES, json={**asked, "stream": True}) as answer:
        raw = await answer.text()
    assert events_told(raw) == EVENTS
    assert raw.count("event: content_block_delta\n") == 3


async def test_a_stop_sequence_is_named(serve):
    client = await serve()
    _, made = await client.post(MESSAGES, body(text(LONG), max_tokens=8))
    word = made["content"][0]["text"].split()[1]
    _, cut = await client.post(MESSAGES, body(text(LONG), max_tokens=8, stop_sequences=[word]))
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", word)


async def test_errors_have_anthropics_form(serve):
    client = await serve()
    refused = [
        body(text("x"), model="other"),
        body(text("x"), tools=[{"name": "t"}]),
        {"model": "tiny", "messages": []},
    ]
    found = [await client.post(MESSAGES, each) for each in refused]
    assert [status for status, _ in found] == [404, 400, 400]
    assert all(set(answer) == {"type", "error"} and set(answer["error"]) == {"type", "message"} for _, answer in found)
