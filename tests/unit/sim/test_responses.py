"""Responses of simulated engines; vLLM's are stored, continued, retrieved and cancelled if it was started to store."""

import base64
import json

import pytest
from unit.sim.conftest import CHAT, LONG, cached_tokens, chat_body, png

RESPONSES = "/v1/responses"


@pytest.fixture
async def storing(serve, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
    return await serve("--block-size", "16")


def body(given, **fields):
    return {"model": "tiny", "input": given, "max_output_tokens": 4, **fields}


def said(response):
    return response["output"][0]["content"][0]["text"]


async def streamed(client, given):
    async with client.session.post(client.url + RESPONSES, json=given) as answer:
        return events(await answer.text())


def events(raw):
    return [json.loads(frame.partition("data: ")[2]) for frame in raw.split("\n\n") if frame]


async def test_a_response_has_the_prompt_and_the_answer_of_its_chat(serve):
    client = await serve()
    status, made = await client.post(RESPONSES, body(LONG))
    _, chat = await client.post(CHAT, chat_body(LONG))
    assert (status, made["object"], made["status"]) == (200, "response", "incomplete")
    assert said(made) == chat["choices"][0]["message"]["content"]
    assert made["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    found = await streamed(client, body(LONG, stream=True))
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    assert said(found[-1]["response"]) == said(made)
    assert "".join(each["delta"] for each in found if each["type"] == "response.output_text.delta") == said(made)


async def test_without_a_store_nothing_is_found_again(serve):
    client = await serve()
    _, made = await client.post(RESPONSES, body(LONG))
    for status, error in (
        await client.get(f"{RESPONSES}/{made['id']}"),
        await client.post(RESPONSES, body("x", previous_response_id=made["id"])),
    ):
        assert (status, error["error"]["param"]) == (404, "response_id")
    status, error = await client.post(RESPONSES, body("x", background=True))
    assert (status, error["error"]["param"]) == (400, "background")


async def test_a_stored_response_is_found_under_the_id_of_its_request_and_continued_with_its_messages(storing):
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    parts = [{"type": "input_text", "text": LONG}, {"type": "input_image", "image_url": url}]
    given = [{"role": "user", "content": parts}]
    _, first = await storing.post(RESPONSES, body(given, request_id="resp_mine", instructions="be brief"))
    assert first["id"] == "resp_mine"
    assert await storing.get(f"{RESPONSES}/resp_mine") == (200, first)
    _, second = await storing.post(RESPONSES, body("and?", previous_response_id="resp_mine"))
    chat = [
        {"role": "user", "content": [{"type": "text", "text": LONG}, {"type": "image_url", "image_url": {"url": url}}]}
    ]
    chat += [{"role": "assistant", "content": said(first)}, {"role": "user", "content": "and?"}]
    _, whole = await storing.post(CHAT, {**chat_body(""), "messages": chat})
    assert second["usage"]["input_tokens"] == whole["usage"]["prompt_tokens"]
    _, kept = await storing.post(RESPONSES, body("x", store=False))
    assert (await storing.get(f"{RESPONSES}/{kept['id']}"))[0] == 404


async def test_a_response_in_the_background_is_polled_streamed_and_cancelled(storing):
    _, queued = await storing.post(RESPONSES, body(LONG, background=True, request_id="resp_a"))
    assert (queued["status"], queued["output"]) == ("queued", [])
    while (made := (await storing.get(f"{RESPONSES}/resp_a"))[1])["status"] == "queued":
        pass
    assert (made["status"], made["usage"]["output_tokens"]) == ("incomplete", 4)
    status, error = await storing.post(f"{RESPONSES}/resp_a/cancel")
    assert (status, error["error"]["message"]) == (400, "Cannot cancel a synchronous response.")
    found = await streamed(storing, body(LONG, background=True, stream=True, request_id="resp_b"))
    assert found[-1]["type"] == "response.completed"
    _, again = await storing.get(f"{RESPONSES}/resp_b?stream=true&starting_after=1")
    assert events(again) == found[2:]
    await storing.post(RESPONSES, body(LONG, background=True, request_id="resp_c", max_output_tokens=1000))
    for path in ("/resp_c/cancel", "/resp_c"):
        ask = storing.post if path.endswith("cancel") else storing.get
        assert (await ask(RESPONSES + path))[1]["status"] == "cancelled"


async def test_sglangs_response_has_the_prompt_of_its_chat_and_an_answer_two_tokens_shorter_than_asked(serve_sglang):
    client = await serve_sglang()
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    parts = [{"type": "input_text", "text": LONG}, {"type": "input_image", "image_url": url}]
    given = body(
        [{"role": "user", "content": parts}], max_output_tokens=8, instructions="be brief", request_id="resp_a"
    )
    status, made = await client.post(RESPONSES, given)
    asked = [{"type": "text", "text": LONG}, {"type": "image_url", "image_url": {"url": url}}]
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": asked}]
    _, chat = await client.post(CHAT, {**chat_body(""), "messages": messages, "max_tokens": 6})
    assert status == 200, made
    assert (made["id"], made["object"], made["status"]) == ("resp_a", "response", "incomplete")
    assert said(made) == chat["choices"][0]["message"]["content"]
    assert made["usage"]["output_tokens"] == 6
    assert made["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert cached_tokens(chat) > 0
    found = await streamed(client, {**given, "stream": True})
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    assert found[-1]["type"] == "response.incomplete"
    assert said(found[-1]["response"]) == said(made)
    assert "".join(each["delta"] for each in found if each["type"] == "response.output_text.delta") == said(made)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"previous_response_id": "resp_x"}, "previous_response_id"), ({"background": True}, "background")],
)
async def test_sglang_without_a_store_refuses_what_needs_one_in_the_form_of_the_route(serve_sglang, fields, param):
    client = await serve_sglang()
    status, error = await client.post(RESPONSES, body(LONG, **fields))
    assert (status, error["error"]["param"]) == (400, param)
    assert "object" not in error


async def test_sglang_stores_continues_retrieves_and_cancels_where_its_flag_is_set(serve_sglang):
    client = await serve_sglang("--enable-response-store")
    _, first = await client.post(RESPONSES, body(LONG, request_id="resp_a", instructions="be brief"))
    assert await client.get(f"{RESPONSES}/resp_a") == (200, first)
    _, second = await client.post(RESPONSES, body("and?", previous_response_id="resp_a", request_id="resp_b"))
    turns = [{"role": "user", "content": LONG}, {"role": "assistant", "content": said(first)}]
    _, chat = await client.post(CHAT, {**chat_body(""), "messages": [*turns, {"role": "user", "content": "and?"}]})
    assert second["previous_response_id"] == "resp_a"
    assert second["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    _, third = await client.post(RESPONSES, body("why?", previous_response_id="resp_b"))
    assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"] + 4
    _, kept = await client.post(RESPONSES, body("x", store=False))
    assert (await client.get(f"{RESPONSES}/{kept['id']}"))[0] == 404
    status, error = await client.post(RESPONSES, body("x", previous_response_id="other"))
    assert (status, error["error"]["param"]) == (400, "response_id")

    found = await streamed(client, body(LONG, stream=True, request_id="resp_c"))
    assert (await client.get(f"{RESPONSES}/resp_c"))[1] == found[-1]["response"]
    assert (await client.post(f"{RESPONSES}/resp_c/cancel"))[1] == found[-1]["response"]  # it has ended
    _, queued = await client.post(RESPONSES, body(LONG, background=True, request_id="resp_d", max_output_tokens=1000))
    assert (queued["status"], queued["output"]) == ("queued", [])
    for ask, path in ((client.post, "/resp_d/cancel"), (client.get, "/resp_d")):
        assert (await ask(RESPONSES + path))[1]["status"] == "cancelled"
