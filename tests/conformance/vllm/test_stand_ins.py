"""Families whose published folders are not at hand, with the folders of ``hack/engines/unknown_families.py``.

Their prompts are compared with those of vLLM's own request models, renderer and processor, without an engine, and every
block of the named families with what a real engine publishes. Part of the long form. Qwen3.5 has Qwen3-VL's tokenizer
and template.
"""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from artefacts import Record, run_tool_or_skip
from conformance.conftest import Figure
from conformance.corpus import corpus
from conformance.engine_process import BLOCK_SIZE, engine
from conformance.prediction import Predictor, Published
from conformance.rendering import own_prompts
from conformance.vllm.test_prediction import LAST, ask
from conformance.workload import Case, positions, several, sizes, texts, user
from waiting import wait_for

from mmrouter_lib.engines.base.events import Ragged, Stored
from mmrouter_lib.media_identity import to_wire
from mmrouter_lib.prompt import NotModelledError

pytestmark = pytest.mark.long_form
NAMED = os.environ.get("MMROUTER_FAMILIES", "")
FAMILIES = {"qwen3_5": "bfloat16", "gemma3": "float32"}
"""Family -> the type that an engine computes with on a CPU."""
PROMPTED = [*FAMILIES, "paddleocr_vl", "deepseek_ocr", "deepseek_ocr2"]
"""Families whose prompts are compared with those of vLLM's own code."""
ON_A_CPU: dict[str, dict[str, Any]] = {
    "qwen3_5": {"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "gemma3": {"layer_types": ["full_attention"] * 6},
}
"""Family -> sizes that the engine's kernels for CPUs take, and no windows, which test_unknown_families.py has."""
SERVED = [family for family in FAMILIES if NAMED == "all" or family in NAMED.split(",")]
ALONE = {"no tools in the list"}
"""What the engine alone refuses: ``tools`` must not be an empty list."""
NOT_MODELLED = {"gemma3": 200}
"""Most conversations that a family does not model: Gemma 3's adjacent images."""


@pytest.fixture(scope="module", params=PROMPTED)
def folder(request: pytest.FixtureRequest) -> Path:
    return Path(run_tool_or_skip("engines.unknown_families", request.param))


def ours(predictor: Predictor, one: Case) -> Any:
    """Return the prompt in the script's form; an empty text where it is not modelled."""
    try:
        predicted = predictor.predict(one)
    except NotModelledError:
        return ""
    except ValueError as error:
        return {"refused": str(error)}
    images = [[to_wire(span.identity), span.offset, span.length] for span in predicted.spans]
    return {"ids": predicted.ids.tolist(), "images": images} if images else predicted.ids.tolist()


@pytest.mark.adopts(engine="vllm", check="prompts of stand-ins")
def test_the_prompts_are_the_engines_own(folder: Path, vllm_env: Path, record: Record, figure: Figure) -> None:
    predictor, cases = Predictor.load(folder, BLOCK_SIZE), corpus(folder.name)
    bodies = [{key: value for key, value in predictor.request(one).items() if key != "model"} for one in cases]
    wrong, equal, unmodelled = [], 0, 0
    answers = own_prompts(vllm_env, {folder: {"chats": bodies}})[folder].listed()
    for one, theirs in zip(cases, answers, strict=True):
        mine = ours(predictor, one)
        refused = [isinstance(side, dict) and "refused" in side for side in (mine, theirs)]
        unmodelled += mine == ""
        equal += mine == theirs
        if mine not in ("", theirs) and not (all(refused) or (refused[1] and one.name in ALONE)):
            wrong.append(f"{one.name}: {mine} for {theirs}"[:2000])
    figure("prompts", equal)
    figure("not modelled", unmodelled)
    figure("mismatches", len(wrong))
    record(f"stand-in {folder.name}: prompts equal, not modelled, mismatches", [equal, unmodelled, len(wrong)])
    assert "\n".join(wrong) == ""
    assert equal > 300
    assert unmodelled <= NOT_MODELLED.get(folder.name, 0)


@pytest.mark.parametrize("family", SERVED)
def test_the_published_blocks_are_the_predicted_ones(
    family: str, vllm_env: Path, tmp_path: Path, record: Record
) -> None:
    """Every block of full attention, and no other; what layers of other kinds keep decides hits, not names."""
    made = tmp_path / family
    shutil.copytree(run_tool_or_skip("engines.unknown_families", family), made)
    config = json.loads((made / "config.json").read_text())
    config["text_config"].update(ON_A_CPU[family])
    (made / "config.json").write_text(json.dumps(config))
    predictor, refused = Predictor.load(made, BLOCK_SIZE), dict[str, int]()
    cases = [*texts(), *list(sizes())[:9], *positions(), *several(), LAST]
    with engine(vllm_env, made, tmp_path / "engine.log", "--dtype", FAMILIES[family]) as served:
        exchanges = [exchange for one in cases for exchange in ask(served, predictor, one, refused, 8000)]
        wait_for(lambda: len(served.listener.frames) >= len(exchanges) // 2, 60, "blocks are published")
        served.post({"messages": [user("The end. " * 400)]})
    full = [
        msgspec.structs.replace(batch, events=tuple(filter(is_full_attention, batch.events)))
        for batch in served.listener.batches()
    ]
    (size,) = {event.block_size for batch in full for event in batch.events if isinstance(event, Stored)}
    predictor = replace(predictor, block_size=size)
    seen = Published(full, predictor)
    keys, wrong = set[int](), list[str]()
    for exchange in exchanges:
        predicted = predictor.predict(exchange.case)
        wrong += [] if predicted.ids.tolist() == exchange.prompt_ids else [exchange.case.name]
        keys.update(predictor.keys(predicted, exchange.answer_ids))
    record(f"prediction, stand-in {family}", f"requests {len(exchanges)}, blocks of {size} tokens {len(keys)}")
    assert (wrong, seen.faults) == ([], [])
    assert keys <= set(seen.keys)
    assert len(keys) > 100


def is_full_attention(event: Any) -> bool:
    return not isinstance(event, Stored | Ragged) or (not event.window and "mamba" not in event.kind)
