"""SGLang engines behind the product: identities computed or learned, repeats exact, and the engine says the same."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from local.rig import Deployment, deployed, example
from streams import SECONDS, body
from waiting import wait_for

from mmrouter_cli.sample_images import data_uri, picture

BLOCK = 16
LONG = "The lamps along the quay are lit one after the other while the evening ferry is made fast. " * 3
Answer = dict[str, Any]
"""A decision, and the engine's count of ``prompt`` tokens and of ``cached`` ones."""


@dataclass(frozen=True)
class Served:
    """A deployment whose engines name images as ``provider`` says."""

    provider: str
    deployment: Deployment

    def ask(self, *parts: dict[str, Any]) -> Answer:
        body = {"model": "demo", "messages": [{"role": "user", "content": list(parts)}], "max_tokens": 1}
        answer = httpx.post(f"{self.deployment.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {**self.deployment.decision(answer), "prompt": usage["prompt_tokens"], "cached": cached}

    def known(self, *parts: dict[str, Any]) -> Answer:
        """Ask until every frontend knows the images; what is not known yet is partial and never hits past the text."""

        def exact() -> Answer | None:
            answers = [self.ask(*parts) for _ in range(4)]
            for answer in answers:
                if answer["exactness"] != "exact":
                    assert answer["exactness"] == "partial"
                    assert answer["reasons"][0].startswith("learning:messages[0].content[")
                assert answer["overlap"] * BLOCK <= answer["cached"]
            return answers[-1] if all(answer["exactness"] == "exact" for answer in answers) else None

        return dict(wait_for(exact, 60, "both frontends know the images"))

    def held(self, *parts: dict[str, Any]) -> Answer:
        """Ask until the frontend that answers has heard that all blocks are there."""

        def whole() -> Answer | None:
            answer = self.ask(*parts)
            return answer if answer["overlap"] == answer["blocks"] else None

        return dict(wait_for(whole, 30, "a repeat is predicted whole"))


@pytest.fixture(scope="module", params=["artifact", "learned"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    resource = example()
    args = ["--mm-preprocess-cache-size-mb", "0"] if request.param == "learned" else []
    image = "example.invalid/sglang:0.5.23"
    resource["spec"]["engine"] = {"type": "sglang", "image": image, "blockSize": BLOCK, "args": args}
    resource["spec"]["pools"][0]["replicas"] = 2
    with deployed(tmp_path_factory.mktemp("sglang"), resource) as deployment:
        wait_for(deployment.settled, 60, "verified engines")
        yield Served(request.param, deployment)


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(seed: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_uri(picture(seed, 112, 84))}}


def test_repeats_are_exact_hits_and_another_image_hits_the_text_before_it_alone(served: Served) -> None:
    parts = [text(f"{served.provider} one. {LONG}"), image("one"), text(LONG)]
    first = served.known(*parts)
    for again in (served.held(*parts), served.held(*parts)):
        assert (again["exactness"], again["worker"]) == ("exact", first["worker"])
        assert again["cached"] == again["blocks"] * BLOCK < again["prompt"]
    assert again["identity"]["provider"] == served.provider
    before = again["images"][0]["offset"] // BLOCK
    other = served.ask(parts[0], image("another"), parts[2])
    assert other["overlap"] == before
    assert (other["worker"], other["cached"]) == (first["worker"], before * BLOCK)


def test_swapped_images_share_the_text_before_them_alone(served: Served) -> None:
    head, tail = text(f"{served.provider} two. {LONG}"), text(LONG)
    served.known(head, image("left"), image("right"), tail)
    swapped = served.ask(head, image("right"), image("left"), tail)
    before = swapped["images"][0]["offset"] // BLOCK
    assert (swapped["exactness"], swapped["overlap"], swapped["cached"]) == ("exact", before, before * BLOCK)
    again = served.held(head, image("right"), image("left"), tail)
    assert (again["exactness"], again["cached"]) == ("exact", again["blocks"] * BLOCK)


def test_a_response_hits_what_the_chat_of_its_prompt_left(served: Served) -> None:
    parts = [text(f"{served.provider} three. {LONG}"), image("three"), text(LONG)]
    served.known(*parts)
    chat = served.held(*parts)
    url = parts[1]["image_url"]["url"]
    given = [{"type": "input_text", "text": parts[at]["text"]} for at in (0, 2)]
    given.insert(1, {"type": "input_image", "image_url": url})
    asked = {"model": "demo", "input": [{"role": "user", "content": given}], "max_output_tokens": 3}

    def whole() -> bool:
        answer = httpx.post(f"{served.deployment.url}/v1/responses", json=asked, timeout=60)
        assert answer.status_code == 200, answer.text
        decision, usage = served.deployment.decision(answer), answer.json()["usage"]
        assert (decision["exactness"], decision["worker"]) == ("exact", chat["worker"])
        assert usage["input_tokens"] == chat["prompt"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        assert decision["overlap"] * BLOCK <= cached
        return bool(decision["overlap"] * BLOCK == cached == chat["cached"])

    wait_for(whole, 30, "the response is predicted whole")


def test_a_sampled_stream_whose_engine_ends_gets_an_error_that_names_the_cause(served: Served) -> None:
    deployment, request = served.deployment, body(2, 400, stream=True, temperature=1)
    with httpx.stream("POST", f"{deployment.url}/v1/chat/completions", json=request, timeout=SECONDS) as answer:
        lines = answer.iter_lines()
        next(lines)
        decision = deployment.decision(answer)
        deployment.processes("sglang")[decision["worker"]].kill()
        *_, error, end = [line for line in lines if line]
    assert decision["stream"] == "engine"
    assert (json.loads(error[6:])["error"]["code"], end) == ("stream_engine", "data: [DONE]")
