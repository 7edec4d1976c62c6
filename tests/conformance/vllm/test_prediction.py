"""What the library predicts, against a real vLLM with the families' real tokenizers, templates and image geometry.

The engine is sent every request of the workload with our identities in it, directly: no sidecar, no router. So a
difference here is the library's. Phi-3 runs as published, with its sliding window, and with two stand-ins of ours for
the remote code of its folder (``hack/engines/phi3v``).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from conformance.compare import Exchange, compare, repeats
from conformance.engine_process import BLOCK_SIZE, Engine, context_length
from conformance.predict import Predictor, image_places
from conformance.report import Cells
from conformance.scenarios import Scenario, faults, fetched, scenarios, served_images
from conformance.vllm.conftest import FAMILIES, Served
from conformance.workload import Case, case, user, workload

from mmrouter_lib.engines.base.events import Batch, Stored

OTHER = {name: "llava_next" if name == "phi3_v" else "phi3_v" for name in FAMILIES} | {
    "qwen2_vl": "qwen3_vl",
    "qwen2_5_vl": "qwen3_vl",
    "qwen3_vl": "qwen2_vl",
}
"""A family that counts otherwise: Qwen2-VL and Qwen2.5-VL count alike."""
MOST_TOKENS = 8000
"""Longer prompts are left out: together with the answer they would leave the context."""
SLOW = {"phi3_v": 8}
"""Families whose vision tower vLLM builds at its real width: how many of the requests with images are sent."""


@dataclass(frozen=True)
class Run:
    """One family's recorded run: nothing in it depends on the engine being alive."""

    predictor: Predictor
    wrong_family: Predictor
    exchanges: Sequence[Exchange]
    refused: dict[str, int]
    scenarios: Sequence[Scenario]
    batches: Sequence[Batch]
    live: Sequence[tuple[int, bytes]]
    replayed: Sequence[tuple[int, bytes]]


@pytest.fixture(scope="session")
def run(served: Served, shrunk: Callable[[str], Path], record: Callable[[str, Any], None]) -> Run:
    family, engine, predictor = served.family, served.engine, served.predictor
    wrong_family = predictor.of_family(shrunk(FAMILIES[OTHER[family]]))
    with served_images() as origin:
        ten = fetched(scenarios(origin))
    began = time.monotonic()
    refused: dict[str, int] = {}
    context = min(context_length(served.folder), MOST_TOKENS)
    cases = [one for scenario in ten for one in scenario.cases]
    cases += [*affordable(workload(), SLOW.get(family)), *whole_blocks(predictor), LAST]
    exchanges = [exchange for one in cases for exchange in ask(engine, predictor, one, refused, context)]
    engine.listener.wait_for_prompt(exchanges[-1].prompt_ids)
    figures = {
        "start_s": round(engine.start_s, 1),
        "memory_gb": round(engine.memory_bytes() / 1e9, 1),
        "workload_s": round(time.monotonic() - began, 1),
    }
    record(f"engine, {family}", figures)
    return Run(
        predictor=predictor,
        wrong_family=wrong_family,
        exchanges=exchanges,
        refused=refused,
        scenarios=ten,
        batches=engine.listener.batches(),
        live=list(engine.listener.frames),
        replayed=engine.listener.replayed(),
    )


def affordable(cases: Sequence[Case], most: int | None) -> Iterator[Case]:
    """Yield all cases without images, and every so many of those with images that ``most`` are left of them."""
    pictured = [one for one in cases if image_places(one)]
    step = 1 if most is None else -(-len(pictured) // most)
    kept = {one.name for one in pictured[::step]} | {"aspect above 200", "no picture", *NEEDED}
    yield from (one for one in cases if one.name in kept or not image_places(one))


NEEDED = (
    *("size 640x480", "size 640x480 again", "size 640x480, other picture"),
    *("two images", "two images swapped", "two images again", "two tiny images in a block", "two tiny images swapped"),
)
"""What the tests below name."""


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
            yield Exchange(one, served.chat(predictor.request(one)))


LAST = case("last", user("The last request of the run: when its blocks are seen, all blocks are. " * 3))


def whole_blocks(predictor: Predictor) -> Iterator[Case]:
    """A prompt of exactly n blocks, twice: the engine computes the last token again, and so the last block."""
    text = "Every word here counts."
    while len(predictor.predict(exact := case("whole blocks", user(text))).ids) % predictor.block_size:
        text += " more"
    yield exact
    yield replace(exact, name="whole blocks again")


def test_every_published_block_is_the_predicted_one(run: Run, record: Callable[[str, Any], None], cells: Cells) -> None:
    report = compare(run.exchanges, run.batches, run.predictor)
    name = run.predictor.family.name
    record(f"prediction, {name}", report.line)
    cells.compared("vllm", name, report, repeats(run.exchanges))
    print(f"\n{name}: {report.line}")
    assert report.mismatches == []
    assert report.blocks >= report.predicted > 500
    assert (report.ragged > 0) == (name == "phi3_v"), "Phi-3 as published has a sliding window"


def test_the_ten_scenarios_hit_what_they_must_and_nothing_else(run: Run, cells: Cells) -> None:
    cached = {exchange.case.name: exchange.cached_tokens for exchange in run.exchanges}
    results = {one.name: faults(one, run.predictor, cached) for one in run.scenarios}
    cells.scenarios("vllm", run.predictor.family.name, results)
    assert len(results) == 10
    assert {name: found for name, found in results.items() if found} == {}


def test_what_the_library_refuses_the_engine_refuses(run: Run, record: Callable[[str, Any], None]) -> None:
    """With 400, or with a 500 where the engine does not expect it: a template that drops an image, for one."""
    record(f"refused, {run.predictor.family.name}", run.refused)
    refused = {"no picture"} | ({"aspect above 200"} if run.predictor.family.name.startswith("qwen") else set())
    assert refused <= set(run.refused)
    assert [name for name, status in run.refused.items() if status < 400] == []


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


def test_the_replay_holds_what_was_published_live(run: Run) -> None:
    assert run.replayed == run.live
    assert [number for number, _ in run.live] == list(range(len(run.live)))


def test_a_wrong_family_is_noticed(run: Run) -> None:
    assert compare(run.exchanges, run.batches, run.wrong_family).mismatches


@pytest.mark.parametrize("size", [16, 64])
def test_a_wrong_block_size_is_noticed(run: Run, size: int) -> None:
    assert compare(run.exchanges, run.batches, replace(run.predictor, block_size=size)).mismatches


def test_swapped_identities_are_noticed(run: Run) -> None:
    """Also where the swapped request was sent as well, so that every key exists: only its place in the run is wrong."""
    report = compare(run.exchanges, run.batches, replace(run.predictor, swapped=True))
    assert any(text.startswith("two images: ") for text in report.mismatches)


def test_another_identity_key_is_noticed(run: Run) -> None:
    assert compare(run.exchanges, run.batches, replace(run.predictor, key=bytes(32))).mismatches


def test_a_lost_event_is_noticed(run: Run) -> None:
    at = next(n for n, batch in enumerate(run.batches) if any(isinstance(event, Stored) for event in batch.events))
    assert compare(run.exchanges, [*run.batches[:at], *run.batches[at + 1 :]], run.predictor).mismatches
