"""Real encoders of SGLang and a real engine that asks them through its sidecar."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from conformance.conftest import Figure, Shrunk
from conformance.engine_process import require_memory
from conformance.engines import deployed, sglang_manifest
from local.rig import Deployment, metric
from scenarios import Chat
from waiting import wait_for

# tests/local/test_staged_sglang.py has simulated encoders, and test_pairs.py a real pair, in every run.
pytestmark = [pytest.mark.proves("sglang", "encoder, worker", "qwen2_5_vl"), pytest.mark.long_form]
REPOSITORY = "Qwen/Qwen2.5-VL-7B-Instruct"
PROVE_SECONDS, LEARN_SECONDS = 120.0, 60.0
LEAST_IMAGES, MOST_IMAGES = 4, 24
"""Of two encoders, one gets them all once in 8 million times."""
MOST_ASKS = 5
"""SGLang neither counts nor keeps an image that it encodes in one batch with another request, as a health check is."""


@pytest.fixture(scope="module")
def deployment(sglang_env: Path, shrunk: Shrunk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    require_memory()
    made = sglang_manifest(shrunk(REPOSITORY), REPOSITORY, [("encoder", 2), ("worker", 1)])
    with deployed(sglang_env, tmp_path_factory.mktemp("encoders"), made) as deployment:
        wait_for(lambda: proved(deployment), PROVE_SECONDS, "the engine is verified: its images were encoded")
        yield deployment


def proved(deployment: Deployment) -> bool:
    return {worker["standing"] for worker in deployment.workers("worker")} == {"verified"}


def counted(deployment: Deployment, name: str) -> dict[str, float]:
    return {each["name"]: metric(each["ip"], f"sglang:{name}", 8000) for each in deployment.workers("encoder")}


def asked(deployment: Deployment) -> dict[str, float]:
    return counted(deployment, "encoder_cache_total_files_total")


def grown(before: dict[str, float], after: dict[str, float]) -> set[str]:
    return {name for name in after if after[name] > before.get(name, 0)}


def test_the_gate_passes(deployment: Deployment) -> None:
    deployment.assert_gate_passes("--no-strict")


def test_an_image_keeps_to_its_encoder_which_has_its_embedding(
    deployment: Deployment, chat: Chat, figure: Figure
) -> None:
    def counted_ask(image: str) -> tuple[set[str], bool]:
        """Ask about an image; return the encoders that encoded it, and whether one had its embedding."""
        for _ in range(MOST_ASKS):
            before, hits = asked(deployment), counted(deployment, "encoder_cache_hit_files_total")
            # Other words first: the engine has none of its blocks.
            chat.decided(os.urandom(4).hex() * 20, image, "what?")
            hit = bool(grown(hits, counted(deployment, "encoder_cache_hit_files_total")))
            if encoders := grown(before, asked(deployment)):
                return encoders, hit
        raise AssertionError(f"no encoder counted any of {MOST_ASKS} requests")

    used: set[str] = set()
    for number in range(MOST_IMAGES):
        figure("images encoded", number + 1)
        asks = [counted_ask(one) for one in [chat.image(f"kept {number}")] * 3]
        (encoder,) = asks[0][0]
        assert asks == [({encoder}, False), ({encoder}, True), ({encoder}, True)]
        used.add(encoder)
        if len(used) == 2 and number + 1 >= LEAST_IMAGES:
            break
    assert len(used) == 2


def test_an_image_is_learned_by_its_embedding_and_its_repeat_is_a_whole_hit(deployment: Deployment, chat: Chat) -> None:
    question = "What is to be seen here, and what of it is in the middle? " * 4
    one = chat.image("learned")
    wait_for(lambda: chat.decided(one, question)["exactness"] == "exact", LEARN_SECONDS, "it is known")
    again = chat.decided(one, question)
    assert again["identity"]["provider"] == "learned"
    assert (again["exactness"], again["overlap"]) == ("exact", len(again["keys"]))
