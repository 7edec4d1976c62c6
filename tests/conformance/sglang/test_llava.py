"""LLaVA as its authors publish it, which SGLang expands in its scheduler: predicted prompts against a real engine.

*pad* is LLaVA-1.5, *anyres* LLaVA-NeXT. What the engine calls an image follows from its pixels, so the run begins with
a lesson for each image, from whose blocks the router's own code learns it, as the router does (``test_routing.py``).
"""

import random
import subprocess
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from artefacts import Record
from conformance.conftest import Shrunk
from conformance.engine_process import BLOCK_SIZE, Engine, engine, env_version
from conformance.own_code import answer_of
from conformance.prediction import Exchange, Predicted, Predictor, image_places
from conformance.report import Cells
from conformance.scenarios import Run, fetched, figures, recorded, scenarios, served_images
from conformance.sglang.llava_checkpoint import PINPOINTS
from conformance.sglang.test_prediction import LAST, SglangPredictor, predicted_of
from conformance.workload import Case, case, formats, positions, salted, several, sizes, texts, user
from long_form import parameters

from mmrouter_lib.engines.base.events import Stored
from mmrouter_lib.families.llava_original import LlavaOriginal
from mmrouter_router.sentinels.table import Values, fill_sentinels, observe_sentinels

FAMILIES = {"pad": "llava", "anyres": "llava_next"}
LESSON = "A picture follows, and nothing of it has been said before. "


@dataclass(frozen=True)
class LlavaPredictor(Predictor):
    """Fills in the sentinels that were learned: an image's media identity -> its sentinels."""

    learned: dict[bytes, Values] = field(default_factory=dict)

    def predict(self, case: Case) -> Predicted:
        plain = super().predict(case)
        filled = fill_sentinels(plain.ids, plain.spans, self.learned.get)
        return plain if filled.unknown is not None else replace(plain, filled=filled.ids)

    request = SglangPredictor.request


@pytest.fixture(scope="module", params=parameters(FAMILIES))
def run(
    request: pytest.FixtureRequest,
    shrunk: Shrunk,
    tmp_path_factory: pytest.TempPathFactory,
    record: Record,
    cells: Cells,
) -> Run:
    mode: str = request.param
    with cells.of("sglang", FAMILIES[mode], "learned") as cell:
        env: Path = request.getfixturevalue("sglang_env")
        cell.version, cell.note = env_version(env), "the authors' checkpoints"
        made = tmp_path_factory.mktemp(f"llava-{mode}")
        folder = checkpoint(env, shrunk, made, mode)
        with served_images() as origin:
            ten = fetched(scenarios(origin))
        with engine(env, folder, made / "engine.log", "--load-format", "auto", kind="sglang") as served:
            began = time.monotonic()
            predictor = LlavaPredictor.load(folder, BLOCK_SIZE, "sglang")
            turned = (one for one in formats() if "EXIF" in one.name)
            shapes = (*sizes(), *turned) if mode == "anyres" else ()  # in the other mode all images have one length
            workload = [*texts(), *shapes, *positions(), *several(), *salted()]
            cases = [*(one for scenario in ten for one in scenario.cases), *predicted_of(predictor, workload)]
            lessons = lessons_of(cases)
            exchanges = [ask(served, predictor, one) for one in (*lessons, *cases, LAST)]
            done = replace(recorded("sglang", served, predictor, exchanges, ten), row=(FAMILIES[mode], "learned"))
            record(f"engine, sglang {mode}", figures(served, began))
    stored = [event for batch in done.batches for event in batch.events if isinstance(event, Stored)]
    predictor.learned.update(learned(predictor, lessons, stored))
    return done


def checkpoint(env: Path, shrunk: Shrunk, made: Path, mode: str) -> Path:
    """Make an authors' checkpoint."""
    script, folder = str(Path(__file__).with_name("llava_checkpoint.py")), made / f"llava-original-{mode}"
    python, model = str(env / "bin" / "python"), str(shrunk("llava-hf/llava-1.5-7b-hf"))
    subprocess.run([python, script, model, str(folder), mode], check=True)
    return folder


def lessons_of(cases: list[Case]) -> list[Case]:
    """Return a request for each image that some request shows first, behind a text that no other request has."""
    urls = dict.fromkeys(places[0][2] for one in cases if (places := image_places(one)))
    return [
        case(
            f"lesson {n}",
            user(f"Lesson {n}: {LESSON * 4}", "Look."),
            user({"type": "image_url", "image_url": {"url": url}}, "?"),
        )
        for n, url in enumerate(urls)
    ]


def learned(predictor: Predictor, lessons: list[Case], stored: list[Stored]) -> dict[bytes, Values]:
    found: dict[bytes, Values] = {}
    for one in lessons:
        plain = predictor.predict(one)
        values = observe_sentinels(plain.ids, plain.spans[0], BLOCK_SIZE, stored)
        assert values is not None, one.name
        found[plain.spans[0].identity] = values
    return found


def ask(served: Engine, predictor: Predictor, one: Case) -> Exchange:
    """Ask for one token. The engine returns ids with one placeholder for an image, and the length of the whole."""
    answer = served.chat(predictor.request(one) | {"return_prompt_token_ids": True, "max_tokens": 1})
    usage, ids = answer["usage"], answer["choices"][0]["prompt_token_ids"]
    image_tokens = 0
    if image_places(one):
        at, image_tokens = ids.index(predictor.family.placeholder_id), usage["prompt_tokens"] - len(ids) + 1
        ids = ids[:at] + [predictor.family.placeholder_id] * image_tokens + ids[at + 1 :]
    assert len(ids) == usage["prompt_tokens"]
    return Exchange(one, ids, [], usage["prompt_tokens_details"]["cached_tokens"], image_tokens)


def test_every_published_page_is_the_predicted_one(run: Run, record: Record, cells: Cells) -> None:
    run.assert_predicted(record, cells, 300)


def test_the_ten_scenarios_hit_what_they_must_and_nothing_else(run: Run, cells: Cells) -> None:
    run.assert_scenarios(cells)


def test_one_sentinel_stands_for_an_image(run: Run) -> None:
    values = list(run.predictor.learned.values())  # type: ignore[attr-defined]
    assert {len(each) for each in values} == {1}
    assert len(set(values)) > 5


def test_a_broken_prediction_is_noticed(run: Run) -> None:
    assert any(text.startswith("two images: ") for text in run.compared(swapped=True).mismatches)
    assert run.compared(more=1).mismatches


def test_the_length_of_an_image_is_that_of_the_engines_scheduler(sglang_env: Path) -> None:
    """On drawn sizes, some of them with a side of a few pixels."""
    draw = random.Random(18)
    most = [(3000, 3000), (1200, 1200), (5, 6000), (6000, 5)]
    drawn = [[draw.randint(1, side) for side in most[n % len(most)]] for n in range(20_000)]
    script = Path(__file__).with_name("llava_lengths.py")
    theirs = answer_of(sglang_env, [script], {"pinpoints": PINPOINTS, "sizes": drawn})
    family = LlavaOriginal(32000, "<image>", 336, 14, 576, pinpoints=tuple((high, wide) for wide, high in PINPOINTS))

    assert [size for size, length in zip(drawn, theirs, strict=True) if family.count(*size) != length] == []
    assert len(set(theirs)) > 100
