"""Requests through real Envoy, which asks the routers where they go: the frontend's promises, by another transport."""

import json
import secrets
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from local.rig import Deployment
from scenarios import SCENARIOS, Chat, Folder, Scenario, title
from waiting import wait_for

from mmrouter_cli.sample_images import data_uri, picture

CONNECTIONS = 64


@pytest.mark.parametrize("scenario", SCENARIOS, ids=title)
def test_scenario(scenario: Scenario, chat: Chat, web: Folder) -> None:
    scenario(chat, web)


def test_verify_proves_exact_routing_at_the_gateways_address(settled: Deployment) -> None:
    assert httpx.URL(settled.url).port == 8080
    settled.assert_gate_passes()


def test_explain_shows_the_decision_of_a_request_and_its_parity(settled: Deployment) -> None:
    answer = settled.client().chat.completions.with_raw_response.create(
        model="demo", max_tokens=2, messages=[{"role": "user", "content": "Name the harbours of the north. " * 20}]
    )
    done = settled.mmrouter("explain", settled.url, answer.headers["x-mmrouter-request-id"], "--parity", "--json")
    trace = json.loads(done.stdout)
    assert len(trace["candidates"]) == 3
    assert [attempt["outcome"] for attempt in trace["attempts"]] == ["answered 200"]
    assert trace["parity"]["result"] == "True", trace["parity"]


def test_streams_arrive_in_pieces_with_usage_and_done(settled: Deployment) -> None:
    options = {"include_usage": True}
    messages = [{"role": "user", "content": "Tell of the sea."}]
    chunks = list(
        settled.client().chat.completions.create(
            model="demo", messages=messages, max_tokens=6, stream=True, stream_options=options
        )
    )
    assert sum(bool(c.choices and c.choices[0].delta.content) for c in chunks) >= 2
    assert chunks[-1].usage.completion_tokens == 6


def test_messages_in_anthropics_form_are_served(settled: Deployment) -> None:
    body = {"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": "Tell of the sea."}]}
    answer = httpx.post(f"{settled.url}/v1/messages", json=body, timeout=60)
    assert (answer.status_code, answer.json()["type"]) == (200, "message"), answer.text
    with httpx.stream("POST", f"{settled.url}/v1/messages", json={**body, "stream": True}, timeout=60) as stream:
        assert "event: message_stop" in stream.read().decode()


def test_responses_are_served_as_the_chats_that_they_become(settled: Deployment) -> None:
    body = {"model": "demo", "max_output_tokens": 4, "input": "Tell of the sea."}
    answer = httpx.post(f"{settled.url}/v1/responses", json=body, timeout=60)
    assert (answer.status_code, answer.json()["object"]) == (200, "response"), answer.text
    with httpx.stream("POST", f"{settled.url}/v1/responses", json={**body, "stream": True}, timeout=60) as stream:
        assert "event: response.completed" in stream.read().decode()


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b'{"model": "other", "messages": []}', 404, "model_not_found"),
        (b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 10000000}', 400, None),
    ],
    ids=["not JSON", "another model", "refused by the engine"],
)
def test_errors_have_openais_shape(settled: Deployment, body: bytes, status: int, code: str | None) -> None:
    answer = httpx.post(f"{settled.url}/v1/chat/completions", content=body, timeout=60)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert code is None or error["code"] == code
    assert "127.1." not in answer.text


def test_client_cannot_choose_the_engine_by_the_pickers_header(settled: Deployment) -> None:
    answer = httpx.get(f"{settled.url}/v1/models", headers={"x-gateway-destination-endpoint": "127.0.0.1:9"})
    assert [model["id"] for model in answer.json()["data"]] == ["demo"]
    body = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    headers = {"x-gateway-destination-endpoint": "127.0.0.1:9"}
    assert httpx.post(f"{settled.url}/v1/chat/completions", json=body, headers=headers, timeout=60).status_code == 200


@pytest.mark.parametrize("megabytes", [1, 20])
def test_large_bodies_pass_whole(settled: Deployment, megabytes: int) -> None:
    # A GIF's comment makes a file of any size; the engine counts the tokens of its few pixels.
    image = padded_gif(megabytes * 3 << 18)
    content = [{"type": "image_url", "image_url": {"url": data_uri(image).replace("image/png", "image/gif", 1)}}]
    body = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    raw = json.dumps(body).encode()
    assert len(raw) > megabytes * 10**6
    answer = httpx.post(f"{settled.url}/v1/chat/completions", content=raw, timeout=120)
    assert answer.status_code == 200, answer.text


def padded_gif(size: int) -> bytes:
    import io

    from PIL import Image

    out = io.BytesIO()
    Image.new("L", (64, 64)).save(out, "GIF")
    block = b"\x21\xfe" + b"".join(b"\xff" + secrets.token_bytes(255) for _ in range(size // 256)) + b"\x00"
    return out.getvalue()[:-1] + block + b";"


def test_64_connections_are_all_answered_and_spread(settled: Deployment) -> None:
    def ask(number: int) -> str:
        with httpx.Client(timeout=120) as client:
            content = [
                {"type": "text", "text": f"Visitor {number} " * 8},
                {"type": "image_url", "image_url": {"url": data_uri(picture(f"visitor {number}", 56, 56))}},
            ]
            body = {"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": content}]}
            headers = {"x-mmrouter-control": settled.token}
            answer = client.post(f"{settled.url}/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            return answer.headers["x-mmrouter-worker"]

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        assert len(set(pool.map(ask, range(CONNECTIONS)))) == 3


def test_client_that_disconnects_ends_the_request_at_the_engine(settled: Deployment) -> None:
    def under_way() -> int:
        return sum(worker["in_flight"] for n in (0, 1) for worker in settled.state(n)["workers"])

    wait_for(lambda: under_way() == 0, 60, "nothing runs")
    body = {"model": "demo", "messages": [{"role": "user", "content": "Tell of the sea."}], "max_tokens": 12_000}
    body |= {"ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{settled.url}/v1/chat/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines)
        assert under_way() == 1
    wait_for(lambda: under_way() == 0, 60, "the request has ended")
    assert settled.metric("mmrouter_client_disconnects_total") >= 1


def test_official_client_lists_the_model(settled: Deployment) -> None:
    client = openai.OpenAI(base_url=f"{settled.url}/v1", api_key="any", max_retries=0)
    assert [model.id for model in client.models.list()] == ["demo"]
