"""The published table is made from a run's figures, and says of every cell what it is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conformance.prediction import Report
from conformance.report import ENGINES, EXPECTED, NAMES, NOT_RUN, PROVIDERS, Cells, exclusive, run_folder, table

TESTS = Path(__file__).resolve().parents[1]
DOCS = TESTS.parent / "docs"


def test_the_published_table_is_made_from_the_figures_beside_it() -> None:
    with exclusive(run_folder()):  # a session beside this one may be writing them
        figures, page = json.loads((DOCS / "conformance.json").read_text()), (DOCS / "conformance.md").read_text()
    assert page == table(figures)


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
    assert rows["Qwen2-VL"].endswith("not run: not part of this run |")
    assert "| vLLM 1.2 | Phi-3-vision | uuid of ours | 3 | 12 | 11 | 1 | 0.833 (5 of 6) | 1/10 |" in text
    assert "- Phi-3-vision on vllm, data: data 1: 4 blocks of hit expected, 3 found" in text
    assert text == table(json.loads((tmp_path / "conformance.json").read_text()))
    assert len(rows) == len(NAMES)
    assert sum(row.startswith("| SGLang") for row in text.splitlines()) == len(EXPECTED) - len(NAMES)


def test_every_family_has_a_row_for_every_engine_and_what_cannot_run_says_why() -> None:
    rows = [row.split(" | ") for row in table({"date": "", "machine": "", "cells": []}).splitlines()]
    reasons = {(row[0].removeprefix("| "), row[1]): row[-1] for row in rows if len(row) > 5}
    for engine, shown in ENGINES.items():
        for family, name in NAMES.items():
            why = NOT_RUN.get((engine, family), "not part of this run")
            assert reasons[shown, name] == f"not run: {why} |"


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
    outputs = [session.communicate(timeout=60)[0].strip() for session in started]
    assert outputs == [
        f"{engine} qwen3_vl {PROVIDERS[engine]}: blocks 7, matched 7, mismatches 0" for engine in ENGINES
    ]
    done = json.loads((tmp_path / "conformance.json").read_text())
    assert sorted(cell["engine"] for cell in done["cells"]) == sorted(ENGINES)
    assert (tmp_path / "conformance.md").read_text() == table(done)
    assert table(done).count("| 1 | 7 | 7 | 0 |") == len(ENGINES)
