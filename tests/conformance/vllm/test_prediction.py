"""What the library predicts, against a real vLLM with the families' real tokenizers, templates and image geometry.

The engine is sent every request of the workload with our identities in it, past the router. So a difference here is the
library's. Phi-3 runs as published, with its sliding window, and with two stand-ins of ours for
the remote code of its folder (``hack/engines/phi3v``).
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from artefacts import Record
from conformance.conftest import Figure, Shrunk
from conformance.engine_process import BLOCK_SIZE, TESTED_KERNELS, Engine, context_length, engine, env_version
from conformance.event_listener import ReplayListener
from conformance.prediction import Exchange, Predictor, compare, image_places
from conformance.report import Cells
from conformance.scenarios import Run, faults, fetched, figures, recorded, scenarios, served_images
from conformance.setups import NEWER, REPOSITORIES
from conformance.vllm.conftest import Served
from conformance.workload import Case, case, user, workload

from mmrouter_lib import families
from mmrouter_lib.engines.base.events import Stored

OTHER = {name: "llava_next" if name == "phi3_v" else "phi3_v" for name in REPOSITORIES} | {
    "qwen2_vl": "qwen3_vl",
    "qwen2_5_vl": "qwen3_vl",
    "qwen3_vl": "qwen2_vl",
}
"""A family that counts otherwise: Qwen2-VL and Qwen2.5-VL count alike."""
MOST_TOKENS = 8000
"""Longer prompts are left out: together with the answer they would leave the context."""
SLOW = {"phi3_v": 8}
"""Families whose vision tower vLLM builds at its real width: how many of the requests with images are sent."""


@pytest.fixture(scope="session")
def refused() -> dict[str, dict[str, int]]:
    """Family -> requests that the library refuses, with the engine's status."""
    return {}


@pytest.fixture(scope="session")
def run(served: Served, record: Record, refused: dict[str, dict[str, int]]) -> Run:
    family, engine, predictor = served.family, served.engine, served.predictor
    engine.listener = ReplayListener(engine.ip)  # without what the router sent
    with served_images() as origin:
        ten = fetched(scenarios(origin))
    began = time.monotonic()
    context = min(context_length(served.folder), MOST_TOKENS)
    cases = [one for scenario in ten for one in scenario.cases]
    cases += [*affordable(workload(), SLOW.get(family)), *whole_blocks(predictor), LAST]
    refusals = refused.setdefault(family, {})
    exchanges = [exchange for one in cases for exchange in ask(engine, predictor, one, refusals, context)]
    made = recorded("vllm", engine, predictor, exchanges, ten)
    record(f"engine, {family}", figures(engine, began))
    return made


def affordable(cases: Sequence[Case], most: int | None) -> Iterator[Case]:
    pictured = [one for one in cases if image_places(one)]
    step = 1 if most is None else -(-len(pictured) // most)
    kept = {one.name for one in pictured[::step]} | {"aspect above 200", "no picture", *NEEDED}
    yield from (one for one in cases if one.name in kept or not image_places(one))


NEEDED = (
    *("size 640x480", "size 640x480 again", "size 640x480, other picture"),
    *("two images", "two images swapped", "two images again", "two tiny images in a block", "two tiny images swapped"),
)


def ask(served: Engine, predictor: Predictor, one: Case, refused: dict[str, int], context: int) -> Iterator[Exchange]:
    """Send a case. What the library refuses is sent too: ``refused`` keeps the engine's status."""
    try:
        predicted = predictor.predict(one)
    except ValueError:
        # The engine closes the connection after a 500, so the next request must not be sent on it.
        refused[one.name] = served.post(predictor.request(one), headers={"connection": "close"}).status_code
    else:
        # vLLM remembers the image of a request that it refuses for its length, and answers the next one that has the
        # image with 500: such a request would spoil the one after it.
        if len(predicted.ids) + one.body.get("max_tokens", 2) <= context:
            answer = served.chat(predictor.request(one))
            details = answer["usage"]["prompt_tokens_details"]
            images = (details.get("multimodal_tokens") or {}).get("image", 0)
            answer_ids = answer["choices"][0]["token_ids"][:-1]
            yield Exchange(one, answer["prompt_token_ids"], answer_ids, details["cached_tokens"], images)


LAST = case("last", user("The last request of the run: when its blocks are seen, all blocks are. " * 3))


def whole_blocks(predictor: Predictor) -> Iterator[Case]:
    """A prompt of exactly n blocks, twice: the engine computes the last token again, and so the last block."""
    text = "Every word here counts."
    while len(predictor.predict(exact := case("whole blocks", user(text))).ids) % predictor.block_size:
        text += " more"
    yield exact
    yield replace(exact, name="whole blocks again")


def test_every_published_block_is_the_predicted_one(run: Run, record: Record, cells: Cells) -> None:
    report = run.assert_predicted(record, cells, 500)
    assert (report.ragged > 0) == (run.predictor.family.name == "phi3_v"), "Phi-3 as published has a sliding window"


def test_the_ten_scenarios_hit_what_they_must_and_nothing_else(run: Run, cells: Cells) -> None:
    run.assert_scenarios(cells)


def test_what_the_library_refuses_the_engine_refuses(
    run: Run, refused: dict[str, dict[str, int]], record: Record
) -> None:
    """With 400, or with a 500 where the engine does not expect it: a template that drops an image, for one."""
    family = run.predictor.family.name
    record(f"refused, {family}", refused[family])
    expected = {"no picture"} | ({"aspect above 200"} if family.startswith("qwen") else set())
    assert expected <= set(refused[family])
    assert [name for name, status in refused[family].items() if status < 400] == []


def test_the_workload_holds_every_kind_of_hit(run: Run) -> None:
    """Otherwise the comparison above would prove little."""
    cached = {exchange.case.name: (exchange.cached_tokens, len(exchange.prompt_ids)) for exchange in run.exchanges}
    whole = [name for name, (hit, length) in cached.items() if hit == length // BLOCK_SIZE * BLOCK_SIZE > 0]
    partial = [name for name, (hit, length) in cached.items() if 0 < hit < length // BLOCK_SIZE * BLOCK_SIZE]
    assert len(whole) >= 4
    assert len(partial) >= 8
    assert cached["whole blocks again"] == (cached["whole blocks"][1] - BLOCK_SIZE, cached["whole blocks"][1])


def test_another_picture_never_hits_past_the_text_before_it(run: Run) -> None:
    exchanges = {exchange.case.name: exchange for exchange in run.exchanges}
    for name in ("size 640x480, other picture", "two images swapped", "two tiny images swapped"):
        span = run.predictor.predict(exchanges[name].case).spans[0]
        assert exchanges[name].cached_tokens <= span.offset


def test_a_wrong_family_is_noticed(run: Run, shrunk: Shrunk) -> None:
    other = families.load_family(shrunk(REPOSITORIES[OTHER[run.predictor.family.name]]), None)
    assert run.compared(family=other).mismatches


@pytest.mark.parametrize(
    ("changes", "where"),
    # Also where the swapped request was sent as well, so that every key exists: only its place in the run is wrong.
    [({"block_size": 16}, ""), ({"block_size": 64}, ""), ({"swapped": True}, "two images: "), ({"key": bytes(32)}, "")],
    ids=["a smaller block", "a larger block", "swapped identities", "another identity key"],
)
def test_a_broken_prediction_is_noticed(run: Run, changes: dict[str, Any], where: str) -> None:
    assert any(text.startswith(where) for text in run.compared(**changes).mismatches)


def test_a_lost_event_is_noticed(run: Run) -> None:
    at = next(n for n, batch in enumerate(run.batches) if any(isinstance(event, Stored) for event in batch.events))
    assert compare(run.exchanges, [*run.batches[:at], *run.batches[at + 1 :]], run.predictor).mismatches


@pytest.mark.long_form
@pytest.mark.proves("vllm", NEWER, "qwen2_vl")
def test_a_newer_release_publishes_the_predicted_blocks_and_hits_what_it_must(
    newer_vllm_env: Path, shrunk: Shrunk, tmp_path: Path, figure: Figure
) -> None:
    assert f"vLLM {env_version(newer_vllm_env)}" == NEWER
    folder = shrunk(REPOSITORIES["qwen2_vl"])
    with engine(newer_vllm_env, folder, tmp_path / "engine.log", variables=TESTED_KERNELS) as served:
        predictor = replace(Predictor.load(folder, BLOCK_SIZE), model=served.model)
        with served_images() as origin:
            ten = fetched(scenarios(origin))
        cases = [*(one for scenario in ten for one in scenario.cases), *workload(), *whole_blocks(predictor), LAST]
        exchanges = [found for one in cases for found in ask(served, predictor, one, {}, MOST_TOKENS)]
        done = recorded("vllm", served, predictor, exchanges, ten)
    report, cached = done.compared(), {exchange.case.name: exchange.cached_tokens for exchange in exchanges}
    figure("blocks compared", report.blocks)
    figure("mismatches", len(report.mismatches))
    assert report.mismatches == []
    assert report.matched == report.blocks > 500
    assert [faults(one, predictor, cached) for one in ten] == [[]] * 10
    assert done.compared(swapped=True).mismatches
