"""The published table is made from a run's figures, and says of every cell what it is."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from conformance.family_rows import GROUPS
from conformance.prediction import Report
from conformance.report import EXPECTED, PROVIDERS, Cells, exclusive, run_folder, table
from conformance.setups import (
    CELLS,
    ENGINES,
    FAMILIES,
    NOT_PART,
    NOT_RUN,
    SETUPS,
    SHOWN,
    Proof,
    named_families,
    not_run,
    places,
)

from mmrouter_lib.families import family_names

NOTHING: dict[str, Any] = {"date": "", "machine": "", "cells": [], "proofs": []}
TESTS = Path(__file__).resolve().parents[1]
DOCS = TESTS.parent / "docs"


def test_the_published_table_is_made_from_the_figures_beside_it() -> None:
    with exclusive(run_folder()):  # a session beside this one may be writing them
        figures, page = json.loads((DOCS / "conformance.json").read_text()), (DOCS / "conformance.md").read_text()
    assert page == table(figures)


def test_every_family_of_the_library_has_a_row_with_its_exactness() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(family_names())
    rows = [row.split(" | ") for row in table(NOTHING).splitlines()]
    found = {row[0]: row[2:] for row in rows if len(row) == 5}
    assert found["| Mistral 3"][:2] == ["exact", "exact"]
    assert found["| Llama 4"][:2] == ["exact", "affinity"]
    assert found["| Gemma 4"][0] == "exact"
    assert found["| Gemma 4"][1].startswith("bounded")


def test_a_family_is_as_exact_on_a_release_as_the_weakest_of_its_rows() -> None:
    def row(check: str, case: str, result: str = "passed", **figures: int) -> dict[str, Any]:
        return {"check": check, "case": case, "result": result, "figures": figures}

    equal = [row("prompts", "qwen3_vl-texts", equal=4), row("prompts", "qwen2_vl", equal=3)]
    rows = {
        "0.9": [*equal, row("front end", "llama4", prompts=2), row("prompts of text models", "llama", "not run: why")],
        "0.10": [equal[0] | {"figures": {"equal": 1, "by affinity": 2}}, row("prompts", "qwen2_vl", "differs: 1 | 2")],
        "0.11": [equal[0] | {"figures": {"equal": 1, "by affinity": 2}}, row("hits", "MLA", equal=5)],
    }
    page = table(NOTHING | {"releases": {"vllm": {release: {"date": "", "rows": rows[release]} for release in rows}}})
    head, _, *found = page[page.index("| family | vLLM 0.9 ") :].split("\n\n")[0].splitlines()
    assert head == "| family | vLLM 0.9 | vLLM 0.10 | vLLM 0.11 |"
    assert [line.split(" | ", 1)[1] for line in found] == [
        "not run | - | - |",
        "exact: 7 | differs | exact: 1, 2 by affinity |",
        "exact: 2 | - | - |",
    ]
    hidden = {"sglang": {"0.5": {"date": "", "rows": [row("prompts", "gemma4", equal=3)]}}}
    assert "\n| Gemma 4 | bounded: 3 |\n" in table(NOTHING | {"releases": hidden})


def test_a_cell_that_was_not_run_says_why(tmp_path: Path) -> None:
    cells = Cells(tmp_path)
    with pytest.raises(pytest.skip.Exception), cells.of("vllm", "llava", "uuid of ours"):
        pytest.skip("not run: no memory")
    with cells.of("vllm", "phi3_v", "uuid of ours") as cell:
        cell.version = "1.2"
    cells.compared("vllm", "phi3_v", Report(requests=3, blocks=12, matched=11, mismatches=["one"]), (5, 6))
    cells.scenarios("vllm", "phi3_v", {"http": [], "data": ["data 1: 4 blocks of hit expected, 3 found"]})
    text = (tmp_path / "conformance.md").read_text()
    rows = {row.split(" | ")[1]: row for row in text.splitlines() if row.startswith("| vLLM")}
    assert rows["LLaVA-1.5"].endswith("not run: no memory |")
    assert rows["Qwen2-VL"].endswith("not run: not part of a run yet |")
    assert "| vLLM 1.2 | Phi-3-vision | uuid of ours | 3 | 12 | 11 | 1 | 0.833 (5 of 6) | 1/10 |" in text
    assert "- Phi-3-vision on vllm, data: data 1: 4 blocks of hit expected, 3 found" in text
    assert text == table(json.loads((tmp_path / "conformance.json").read_text()))
    assert len(rows) == len(FAMILIES)
    assert sum(row.startswith("| SGLang") for row in text.splitlines()) == len(EXPECTED) - len(FAMILIES)


def test_every_family_has_a_row_for_every_engine_and_what_cannot_run_says_why() -> None:
    rows = [row.split(" | ") for row in table(NOTHING).splitlines()]
    reasons = {(row[0].removeprefix("| "), row[1]): row[-1] for row in rows if len(row) > 5}
    for engine, shown in ENGINES.items():
        for family, name in FAMILIES.items():
            why = NOT_RUN.get((engine, family), "not part of a run yet")
            assert reasons[shown, name] == f"not run: {why} |"


def result(text: str, cell: tuple[str, str, str]) -> str:
    engine, setup, family = cell
    section = text.partition(f"### {ENGINES[engine]}")[2].partition("\n### ")[0]
    (row,) = (row for row in section.splitlines() if row.startswith(f"| {setup} | {SHOWN[family]} |"))
    return row.split(" | ")[2].removesuffix(" |")


def test_every_setup_has_a_row_for_every_engine_and_family_and_says_why_it_was_not_run() -> None:
    assert set(product(ENGINES, SETUPS, FAMILIES)) <= set(CELLS)
    for cell in CELLS:
        assert result(table(NOTHING), cell) == f"not run: {not_run(*cell)}"


def phase(outcome: Any, when: Any = "call", why: Any = None) -> pytest.TestReport:
    return pytest.TestReport("", ("", 0, ""), {}, outcome, why, when)


def test_a_cell_is_proved_by_the_tests_that_are_marked_with_it_and_by_no_less(tmp_path: Path) -> None:
    passed, failed, skipped = (("vllm", "two workers", family) for family in ("llava", "phi3_v", "qwen3_vl"))
    cells = Cells(tmp_path)
    for test, figures in (("test_scenario[01]", {}), ("test_index", {"blocks": 7})):
        for when in ("setup", "call", "teardown"):
            cells.proof(passed, test, phase("passed", when), figures)
    cells.proof(failed, "test_scenario[01]", phase("passed"), {})
    cells.proof(failed, "test_index", phase("failed", "setup", "no engine"), {})
    cells.proof(skipped, "test_index", phase("skipped", "setup", ("file", 1, "Skipped: not run: no memory")), {})
    text = (tmp_path / "conformance.md").read_text()
    assert result(text, passed) == "proved: 1 of 10 scenarios, blocks 7, 2 tests"
    assert result(text, failed) == "failed: test_index"
    assert result(text, skipped) == "not run: no memory"


def test_a_run_keeps_the_cells_that_it_does_not_have_and_joins_its_sessions(tmp_path: Path) -> None:
    one, other = ("vllm", "two workers", "llava"), ("vllm", "two workers", "phi3_v")
    for cell in (one, other):
        Cells(tmp_path).proof(cell, "test_index", phase("passed"), {})
    with Cells(tmp_path).of("vllm", "llava", "uuid of ours"):
        pass
    run = tmp_path / "run"
    run.mkdir()
    (run / "cells-beside.json").write_text(
        json.dumps({"cells": [], "proofs": [asdict(Proof(*other, passed=2, scenarios=1))]})
    )
    Cells(tmp_path, run).proof(other, "test_index", phase("passed"), {"blocks": 7})
    text = (tmp_path / "conformance.md").read_text()
    assert result(text, one) == "proved: 1 test"
    assert result(text, other) == "proved: 1 of 10 scenarios, blocks 7, 3 tests"
    assert "not run: the run failed before it compared anything" in text


@pytest.mark.parametrize("families", ["", "mistral3", "llava", "all"])
def test_only_the_long_form_has_cells_of_its_own_each_of_a_family_that_the_engine_serves(
    families: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMROUTER_FAMILIES", families)
    found = {place.family for place in places()}
    assert found == {"llava": {"llava"}, "all": set(FAMILIES)}.get(families, set())
    assert all(not_run(*place) == NOT_PART for place in places())


def test_an_unknown_family_is_refused_with_the_known_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMROUTER_FAMILIES", "llava,qwen9")
    with pytest.raises(pytest.UsageError, match=r"^FAMILIES: qwen9 is no known family; .* qwen2_vl, .* qwen3_5$"):
        named_families()


def test_two_providers_of_one_family_are_two_rows(tmp_path: Path) -> None:
    cells = Cells(tmp_path)
    for provider, blocks in (("artifact", 5), ("learned", 7)):
        with cells.of("sglang", "qwen2_5_vl", provider):
            pass
        report = Report(requests=1, blocks=blocks, matched=blocks)
        cells.compared("sglang", "qwen2_5_vl", report, (0, 0), provider=provider)
        cells.scenarios("sglang", "qwen2_5_vl", {"http": []}, provider=provider)
    text = (tmp_path / "conformance.md").read_text()
    assert "| SGLang | Qwen2.5-VL | artifact | 1 | 5 | 5 | 0 | - | 1/10 |" in text
    assert "| SGLang | Qwen2.5-VL | learned | 1 | 7 | 7 | 0 | - | 1/10 |" in text


SESSION = """
import sys
from itertools import product
from pathlib import Path
from conformance.prediction import Report
from conformance.report import Cells
out, run, engine, provider = sys.argv[1:]
cells = Cells(Path(out), Path(run))
with cells.of(engine, "qwen3_vl", provider):
    pass
cells.compared(engine, "qwen3_vl", Report(requests=1, blocks=7, matched=7), (0, 0))
print(*cells.lines())
"""


def test_sessions_side_by_side_make_one_table(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SESSION, str(tmp_path), str(run), engine, PROVIDERS[engine]],
            env={**os.environ, "PYTHONPATH": str(TESTS)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for engine in ENGINES
    ]
    outputs = [session.communicate(timeout=600)[0].strip() for session in started]
    assert outputs == [
        f"{engine} qwen3_vl {PROVIDERS[engine]}: blocks 7, matched 7, mismatches 0" for engine in ENGINES
    ]
    done = json.loads((tmp_path / "conformance.json").read_text())
    assert sorted(cell["engine"] for cell in done["cells"]) == sorted(ENGINES)
    assert (tmp_path / "conformance.md").read_text() == table(done)
    assert table(done).count("| 1 | 7 | 7 | 0 |") == len(ENGINES)
