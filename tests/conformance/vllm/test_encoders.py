"""A real encoder, an engine that reads its embeddings, and a renderer whose processed images it takes as well.

All are stock vLLM with the plugin, and have weights, so that every pixel changes the probabilities of an answer. The
encoder writes embeddings to files, because vLLM's other connectors do not run on a CPU. The last test sends a prompt
without pixels past the router, to show why the router never sends one (docs/disaggregation.md).
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from conformance.conftest import Figure, Shrunk
from conformance.engine_process import VLLM_ENVIRONMENT, require_memory
from conformance.engines import REPOSITORY, History, Pod, deployed, environment, pods, pool, resource
from conformance.vllm.test_handover import WEIGHTS, weighted
from local.rig import Deployment
from scenarios import Chat, assert_only_text, assert_whole, open_chat
from waiting import wait_for

from handover.tests.support import without_bytes
from mmrouter_cli.sample_images import data_uri, picture
from mmrouter_lib.engines.vllm.plugin_api import is_cache_miss
from mmrouter_lib.engines.vllm.stage_requests import RENDER_PATH
from mmrouter_lib.media_identity import to_wire

pytestmark = [pytest.mark.proves("vllm", "encoder, worker", "qwen2_vl"), pytest.mark.long_form]
GENERATE_PATH = "/inference/v1/generate"
EMBEDDING = "encoder_cache.safetensors"
FORGETS = {"VLLM_SERVER_DEV_MODE": "1"}
"""Enables the routes that clear an engine's caches, which otherwise happens only when they are full."""
Body = dict[str, Any]


@pytest.fixture(scope="module")
def deployment(vllm_env: Path, shrunk: Shrunk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    require_memory(engines=2)
    folder = tmp_path_factory.mktemp("encoders")
    model = weighted(shrunk(REPOSITORY), folder / "models", vllm_env)
    forgets = {"spec": {"containers": [{"name": "engine", "env": environment({**VLLM_ENVIRONMENT, **FORGETS})}]}}
    pools = [pool("encoder"), pool("worker", podTemplate=forgets), pool("renderer")]
    made = resource(model, pools, args=WEIGHTS, frontend={"MMROUTER_HANDOVER": "always"}, transfer="shm")
    with deployed(vllm_env, folder, made) as deployment:
        with open_chat(deployment, max_retries=0) as chat:
            # The router queries the plugins' capabilities periodically.
            wait_for(lambda: set(ways(asked(deployment, chat, chat.image("a"))[0])) == {"shm"}, 60, "images go by shm")
        yield deployment


def asked(deployment: Deployment, chat: Chat, *content: str) -> tuple[Body, Body]:
    raw = chat.client.chat.completions.with_raw_response.create(
        model="demo", messages=chat.messages(*content), max_tokens=8, temperature=0, logprobs=True, top_logprobs=5
    )
    return deployment.decision(raw), json.loads(raw.text)


def ways(decision: Body) -> list[str]:
    return [image["how"] for image in decision["travelled"]]


def probabilities(answer: Body) -> list[tuple[float, list[float]]]:
    """Return the probability of each token and of its alternatives, which depend on every pixel."""
    content = answer["choices"][0]["logprobs"]["content"]
    return [(token["logprob"], [other["logprob"] for other in token["top_logprobs"]]) for token in content]


def body_of(uuid: str, data: bytes, **more: Any) -> Body:
    image = {"type": "image_url", "image_url": {"url": data_uri(data)}, "uuid": uuid}
    content = [
        {"type": "text", "text": "What is to be seen? " * 12},
        image,
        {"type": "text", "text": "In one word. " * 9},
    ]
    generation = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": True, "top_logprobs": 5}
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": content}],
        **generation,
        "return_token_ids": True,
    } | more


def named(what: str) -> tuple[str, bytes]:
    return to_wire(hashlib.sha256(what.encode()).digest()), picture(what, 224, 224)


def encoded(encoder: Pod, uuid: str, data: bytes) -> Body:
    image = {"type": "image_url", "image_url": {"url": data_uri(data)}, "uuid": uuid}
    asked = {"model": "demo", "messages": [{"role": "user", "content": [image]}], "max_tokens": 1}
    params: Body = encoder.ask(asked).raise_for_status().json()["ec_transfer_params"]
    return params


def embedding(worker: Pod, uuid: str) -> Path:
    return Path(worker.processes[0].environ()["MMROUTER_SHARED_DIR"]) / uuid / EMBEDDING


def forget(worker: Pod, *caches: str) -> None:
    for cache in caches:
        httpx.post(f"http://{worker.ip}:8000/reset_{cache}_cache", timeout=20).raise_for_status()


def renders(deployment: Deployment, worker: Pod) -> Pod:
    (found,) = deployment.state()["renderers"]
    return replace(worker, name=found["name"], uid=found["uid"], ip=found["ip"])


def without_pixels(renderer: Pod, body: Body, params: Mapping[str, Any]) -> Body:
    made: Body = renderer.ask(body, RENDER_PATH).raise_for_status().json()
    return {**made, "features": {**made["features"], "kwargs_data": None}, "ec_transfer_params": dict(params)}


def test_the_gate_passes(deployment: Deployment) -> None:
    deployment.assert_gate_passes()


def test_an_image_is_encoded_by_the_encoder_and_its_blocks_are_predicted(
    deployment: Deployment, chat: Chat, figure: Figure
) -> None:
    a, b = chat.image("a"), chat.image("b")
    # Long enough that the last image lies in complete blocks: then a repeat needs no encoder.
    question = "What is to be seen in these two pictures, and in which of them is more of it? " * 4
    first = chat.send(a, b, question)
    seen = asked(deployment, replace(chat, nonce=chat.nonce + "other"), a, b, question)[0]
    assert [(note["stage"], note["outcome"]) for note in seen["chain"]] == [
        ("encode", "done"),
        ("answer", "first_byte"),
    ]
    assert seen["chain"][0]["images"] == 2
    assert_whole(first, chat.send(a, b, question))
    assert asked(deployment, chat, a, b, question)[0]["chain"][0]["outcome"] == "held"
    assert_only_text(chat.send(b, a, question))
    worker = pods(deployment)["worker"]
    truth = History(deployment, worker.ip, REPOSITORY)
    wait_for(
        lambda: truth.keys() == set(deployment.keys(worker.uid)["keys"]["0"]), 10, "the frontend and the engine agree"
    )
    figure("images encoded", seen["chain"][0]["images"])
    figure("blocks compared", len(truth.keys()))
    figure("mismatches", 0)


def test_an_image_that_was_handed_over_processed_is_taken_from_the_encoder_too(
    deployment: Deployment, chat: Chat
) -> None:
    worker, image = pods(deployment)["worker"], chat.image("c")

    def both(nonce: str) -> tuple[Body, Body]:
        """Send the chat through the router, and to the worker alone, which then encodes the image itself."""
        own = replace(chat, nonce=nonce)
        decision, answer = asked(deployment, own, image, "what?")
        assert decision["chain"][0]["outcome"] == "done"
        assert ways(decision)[-1] == "shm"  # its image_url is null, beside the encoder's parameters
        alone = {"messages": own.messages(image, "what?"), "model": "demo", "max_tokens": 8, "temperature": 0}
        return answer, worker.ask({**alone, "logprobs": True, "top_logprobs": 5}).raise_for_status().json()

    through, alone = both(chat.nonce + "1")
    assert through["choices"][0]["message"]["content"] == alone["choices"][0]["message"]["content"]
    assert probabilities(through) == probabilities(alone)
    assert through["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    # A changed embedding changes the answer: the engine reads it and does not encode the handed-over image.
    forget(worker, "encoder")
    (identity,) = {image["identity"] for image in asked(deployment, chat, image, "so?")[0]["travelled"]}
    forget(worker, "encoder")
    overwrite(embedding(worker, identity))
    through, alone = both(chat.nonce + "2")
    assert probabilities(through) != probabilities(alone)
    # Without the embedding, the engine encodes the handed-over image.
    forget(worker, "encoder")
    embedding(worker, identity).unlink()
    through, alone = both(chat.nonce + "3")
    assert probabilities(through) == probabilities(alone)


def overwrite(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    head = 8 + int.from_bytes(raw[:8], "little")
    file.write_bytes(raw[:head] + bytes(len(raw) - head))


def test_what_an_engine_does_not_hold_is_refused_where_nothing_says_what_it_is_and_the_engine_goes_on(
    deployment: Deployment,
) -> None:
    engines = pods(deployment)
    worker, renderer = engines["worker"], renders(deployment, engines["worker"])
    uuid, data = named("unknown")
    body, params = body_of(uuid, data), encoded(engines["encoder"], uuid, data)
    bare = renderer.ask({**body, "mm_payload": "none"}, RENDER_PATH).raise_for_status().json()
    assert worker.ask({**bare, "ec_transfer_params": params}, GENERATE_PATH).status_code == 500
    null = without_bytes(body, {uuid})
    refused = worker.ask({**null, "ec_transfer_params": params})
    assert is_cache_miss(refused.status_code, refused.content)
    assert worker.ask({**body, "ec_transfer_params": params}).status_code == 200


# Ends the engine, so it runs last.


def test_a_prompt_without_pixels_makes_the_next_chat_with_pixels_end_the_engine(deployment: Deployment) -> None:
    """In vLLM's cache of processed images, a prompt without pixels replaces the complete image."""
    engines = pods(deployment)
    worker, renderer = engines["worker"], renders(deployment, engines["worker"])
    uuid, data = named("twice")
    body = body_of(uuid, data)

    def shown_again() -> httpx.Response:
        """Send the image again after its blocks and embedding are gone; the engine still has it processed."""
        forget(worker, "prefix", "encoder")
        embedding(worker, uuid).unlink(missing_ok=True)
        return worker.ask(body)

    own = worker.ask(body).raise_for_status().json()
    again = shown_again().raise_for_status().json()
    assert probabilities(again) == probabilities(own)
    made = without_pixels(renderer, body, encoded(engines["encoder"], uuid, data))
    worker.ask(made, GENERATE_PATH).raise_for_status()
    with suppress(httpx.TransportError):  # its connections end with it
        assert shown_again().status_code == 500
    wait_for(lambda: not any(alive(process) for process in worker.processes), 60, "the engine ends")


def alive(process: Any) -> bool:
    return bool(process.is_running()) and process.status() != "zombie"
