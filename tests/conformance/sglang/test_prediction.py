"""What the library and the router's identity provider predict, against a real SGLang: sentinels, pages, order, hits.

SGLang has no field for an identity of ours on its chat endpoint. It writes sentinels over an image's tokens, which the
*artifact* provider computes from the encoded bytes and from what the engine says of itself. So every family runs
as the product starts it, where that provider holds.
"""

import hashlib
import time
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from artefacts import Record
from conformance.conftest import Shrunk
from conformance.engine_process import BLOCK_SIZE, Engine, engine, env_version
from conformance.prediction import Exchange, Predicted, Predictor, decode, image_places
from conformance.report import Cells
from conformance.scenarios import Run, fetched, figures, recorded, scenarios, served_images
from conformance.sglang.test_rendering import own_fields
from conformance.workload import Case, case, positions, salted, several, sizes, texts, user
from long_form import parameters

from mmrouter_lib.engines.base.adapter import ImageRewrite
from mmrouter_lib.engines.base.events import Cleared
from mmrouter_lib.engines.sglang.adapter import INFO_PATHS, SGLANG, parse_info
from mmrouter_lib.engines.sglang.events import decode_batch
from mmrouter_lib.engines.sglang.identity import artifact_hash_of, sentinels
from mmrouter_lib.prompt import TemplateError
from mmrouter_router.sentinels.evidence import plan_fingerprints
from mmrouter_router.sentinels.table import fill_sentinels

FAMILIES = {
    "qwen2_vl": "Qwen/Qwen2-VL-2B-Instruct",
    "qwen2_5_vl": "Qwen/Qwen2.5-VL-7B-Instruct",
    "qwen3_vl": "Qwen/Qwen3-VL-2B-Instruct",
}
LAST = case("last", user("The last request of the run: when its blocks are seen, all blocks are. " * 3))


@dataclass(frozen=True)
class SglangPredictor(Predictor):
    """Fills in sentinels with the router's own code. ``fingerprint``: the digest that its provider tries first.
    ``legacy``: the engine writes one sentinel per image.
    """

    fingerprint: str = ""
    legacy: bool = False

    def predict(self, case: Case) -> Predicted:
        plain = super().predict(case)
        data = {self._identity(found): found for found in (decode(url) for _, _, url in image_places(case))}

        def values_of(identity: bytes) -> tuple[int, ...]:
            return sentinels(self.item_hash(data[identity]), legacy=self.legacy)

        filled = fill_sentinels(plain.ids, plain.spans, values_of)
        assert filled.unknown is None
        return replace(plain, filled=filled.ids)

    def item_hash(self, data: bytes) -> int:
        return artifact_hash_of(hashlib.sha256(data).hexdigest(), self.fingerprint, {})

    def request(self, case: Case) -> dict[str, Any]:
        rewrites = [ImageRewrite(at, number, url, "") for at, number, url in image_places(case)]
        return SGLANG.rewrite_chat(case.body, rewrites, model=self.model, cache_salt=case.salt).body


@pytest.fixture(scope="session", params=parameters(FAMILIES, "qwen3_vl"))
def run(
    request: pytest.FixtureRequest,
    shrunk: Shrunk,
    tmp_path_factory: pytest.TempPathFactory,
    record: Record,
    cells: Cells,
) -> Run:
    family: str = request.param
    with cells.of("sglang", family, "artifact") as cell:
        env: Path = request.getfixturevalue("sglang_env")
        cell.version = env_version(env)
        folder = shrunk(FAMILIES[family])
        with served_images() as origin:
            ten = fetched(scenarios(origin))
        log = tmp_path_factory.mktemp(f"sglang-{family}") / "engine.log"
        with engine(env, folder, log, kind="sglang") as served:
            began = time.monotonic()
            predictor = predictor_of(folder, served)
            workload = (*texts(), *own_fields(family), *sizes(), *positions(), *several(), *salted())
            cases = [*(one for scenario in ten for one in scenario.cases), *predicted_of(predictor, workload), LAST]
            exchanges = [ask(served, predictor, one) for one in cases]
            made = recorded("sglang", served, predictor, exchanges, ten)
            record(f"engine, sglang {family}", figures(served, began))
    return made


def predicted_of(predictor: SglangPredictor, cases: Iterable[Case]) -> Iterator[Case]:
    """Yield the cases that the library does not refuse; ``test_rendering.py`` compares the refusals.

    Without those that force a tool's call, because the engine runs without a grammar.
    """
    for one in cases:
        with suppress(TemplateError):
            predictor.predict(one)
            if one.body.get("tool_choice", "auto") in (None, "auto", "none"):
                yield one


def predictor_of(folder: Path, served: Engine) -> SglangPredictor:
    """Return what the router's provider makes of the engine's own account, at its first try."""
    info = parse_info([served.client.get(path).json() for path in INFO_PATHS])
    assert info is not None
    chosen = plan_fingerprints(info.version, info.facts)
    assert chosen.candidates, chosen.why
    loaded = SglangPredictor.load(folder, BLOCK_SIZE, "sglang")
    return replace(loaded, fingerprint=chosen.candidates[0].digest(), legacy=chosen.legacy)


def ask(served: Engine, predictor: SglangPredictor, one: Case) -> Exchange:
    """Ask for one token, which is never fed back: none of the answer is in a block."""
    answer = served.chat(predictor.request(one) | {"return_prompt_token_ids": True, "max_tokens": 1})
    details = answer["usage"]["prompt_tokens_details"]
    prompt_ids = answer["choices"][0]["prompt_token_ids"]
    return Exchange(one, prompt_ids, [], details["cached_tokens"], details.get("image_tokens") or 0)


def test_every_published_page_is_the_predicted_one(run: Run, record: Record, cells: Cells) -> None:
    run.assert_predicted(record, cells, 300)


def test_the_ten_scenarios_hit_what_they_must_and_nothing_else(run: Run, cells: Cells) -> None:
    run.assert_scenarios(cells)


def test_sentinels_stand_in_the_published_ids(run: Run) -> None:
    """The engine's own ids, image by image: what the provider computes is what was written, and nothing else above."""
    published = {value for batch in run.batches for event in batch.events for value in getattr(event, "ids", ())}
    predicted = {
        value
        for exchange in run.exchanges
        for value in (run.predictor.predict(exchange.case).filled or array("Q"))
        if value >= 1_000_000
    }
    assert len(predicted) > 40
    assert {value for value in published if value >= 1_000_000} <= predicted


@pytest.mark.parametrize(
    ("changes", "where"),
    [({"fingerprint": "sha256:" + "0" * 64}, ""), ({"swapped": True}, "two images: "), ({"block_size": 64}, "")],
    ids=["another fingerprint", "swapped images", "a wrong page size"],
)
def test_a_broken_prediction_is_noticed(run: Run, changes: dict[str, Any], where: str) -> None:
    assert any(text.startswith(where) for text in run.compared(**changes).mismatches)


def test_the_replay_holds_what_was_published_live(run: Run) -> None:
    # The engine announces its empty cache when it starts, now and then before our subscription has reached it.
    early = len(run.replayed) - len(run.live)
    assert early in (0, 1)
    assert run.replayed[early:] == run.live
    announced = [event for _, payload in run.replayed[:early] for event in decode_batch(payload).events]
    assert all(isinstance(event, Cleared) for event in announced)


@pytest.mark.long_form
def test_an_older_release_writes_one_sentinel_per_image_as_predicted(
    older_sglang_env: Path, shrunk: Shrunk, tmp_path: Path, record: Record
) -> None:
    folder = shrunk(FAMILIES["qwen2_vl"])
    with engine(older_sglang_env, folder, tmp_path / "engine.log", kind="sglang") as served:
        predictor = predictor_of(folder, served)
        exchanges = [ask(served, predictor, one) for one in (*several(), LAST)]
        done = recorded("sglang", served, predictor, exchanges, ())
    report = done.compared()
    record(f"prediction, sglang {env_version(older_sglang_env)} qwen2_vl", report.line)
    assert report.mismatches == []
    assert report.matched > 20
    for broken in ({"legacy": False}, {"swapped": True}):
        assert any(text.startswith("two images: ") for text in done.compared(**broken).mismatches)
