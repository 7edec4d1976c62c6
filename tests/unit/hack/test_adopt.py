"""What `make adopt` says of an engine's release: its wheel, what changed, and whether the release is good."""

import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conformance.own_code import EngineError
from conformance.releases import Row, changed, comparison, result, tables

from hack.build_once import CannotMakeError, FailedError
from hack.engines import adopt

COUNTED = "cError: 1 error for M Value error, no class."
FIELDS = Row("request fields", "", "passed", {"/v1/completions": ["n", "prompt", "stop"]})


Index = Callable[..., str]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """An empty package index, and how to add a wheel to it: returns the wheel's line of a requirements file."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

    def add(name: str, version: str, *needs: str) -> str:
        wheel, about = tmp_path / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
        needed = "".join(f"Requires-Dist: {one}\n" for one in needs)
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}")
            archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{about}/RECORD", "")
        return f"{name}=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}"

    return add


def test_a_pinned_release_needs_no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert adopt.wheels("vllm", "0.33.0") == adopt.WHEELS["vllm"]


def test_another_release_has_the_hash_that_the_index_gives(index: Index) -> None:
    line = index("vllm", "9.9.9", "transformers>=5", "openai==1.0")
    assert adopt.wheels("vllm", "9.9.9") == line


@pytest.mark.parametrize("needed", ["transformers==5.0.1", "transformers<5.1,>=4"])
def test_a_release_that_does_not_permit_every_later_transformers_comes_with_the_newest_it_does(
    index: Index, needed: str
) -> None:
    lines = [index("sglang", "9.9.9", needed, "openai==1.0"), index("transformers", "5.0.1")]
    index("transformers", "5.0.0")
    index("transformers", "5.2.0")
    assert adopt.wheels("sglang", "9.9.9").splitlines() == lines


def test_a_release_that_a_later_transformers_breaks_comes_with_an_earlier_one_and_what_that_needs(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(adopt.UNBOUNDED, "vllm==9.9.9", "transformers<5.1")
    lines = [index("vllm", "9.9.9", "transformers>=5"), index("transformers", "5.0.1", "huggingface_hub<2", "numpy<2")]
    lines.append(index("huggingface_hub", "1.9"))
    index("transformers", "5.1.0")
    index("huggingface_hub", "2.0")
    assert adopt.wheels("vllm", "9.9.9").splitlines() == lines


def test_a_release_that_the_index_does_not_have_cannot_be_made(index: Index) -> None:
    index("vllm", "9.9.9")
    with pytest.raises(CannotMakeError, match=r"no wheel of vllm==9\.9\.8"):
        adopt.wheels("vllm", "9.9.8")


def test_a_changed_list_names_what_came_and_went() -> None:
    later = Row("request fields", "", "differs: judge it", {"/v1/completions": ["n", "prompt", "seed"]})
    assert changed(FIELDS, Row(FIELDS.check, "", "passed", later.figures)) == "/v1/completions +seed -stop"
    assert changed(FIELDS, later) == "was exact"
    assert changed(FIELDS, FIELDS) == ""
    assert changed(None, FIELDS) == "new"


def test_the_table_has_every_check_of_both_releases() -> None:
    gone = Row("hits", "MLA", "passed", {"equal": 300, "above": 0})
    lines = list(comparison([FIELDS, gone], [FIELDS, Row("front end", "gemma4", "passed")], "1.0", "1.1"))
    assert lines[2:] == [
        "| request fields | - | exact: names 3 | exact: names 3 | - |",
        "| front end | gemma4 | - | exact | new |",
        "| hits | MLA | exact: equal 300 | - | did not run |",
    ]


DAY = "2026-11-01"


def column(result: str = "passed", **figures: Any) -> dict[str, Any]:
    return {"date": DAY, "rows": [{"check": "hits", "case": "MLA", "result": result, "figures": figures}]}


def test_the_page_has_a_column_per_release_in_their_order_and_says_how_exact_each_is() -> None:
    releases = {
        "0.10.0": column("differs: 5 for 4"),
        "0.9.0": column(equal=5, below=4, above=0),
        (proved := adopt.PROVED["vllm"]): column(equal=300, below=0),
        "0.8.0": {"date": DAY, "rows": [], "not_run": "no wheel | of it"},
    }
    assert list(tables({"vllm": releases}))[3:] == [
        f"| check | case | 0.8.0 ({DAY}) | 0.9.0 ({DAY}) | 0.10.0 ({DAY}) | {proved} ({DAY}) |",
        "|---|---|---|---|---|---|",
        "| hits | MLA | not run: no wheel / of it | bounded: equal 5, below 4 | differs: 5 for 4 | exact: equal 300 |",
        "",
        f"Names and counts that are not those of {proved}, the proved release:",
        "",
        "- 0.9.0, hits of MLA: equal 300 -> 5, below 0 -> 4, above None -> 0",
    ]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (EngineError("Traceback\n  at\nab.cError: no module\nleaked 2\n"), "not run: ab.cError: no module"),
        (EngineError("cError: 1 error for M\n  Value error, no class. [type=a, '/b']\n    For"), "not run: " + COUNTED),
        (EngineError("killed\n"), "not run: killed"),
        (AssertionError("[1]\n== [2]"), "differs: [1] == [2]"),
    ],
)
def test_engine_code_that_ends_did_not_run_and_does_not_differ(error: Exception, expected: str) -> None:
    report = pytest.TestReport("test", ("test", 1, "test"), {}, "failed", None, "call")
    assert result(report, error) == expected


def test_why_an_environment_is_not_made_is_written_where_no_earlier_run_has_figures(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adopt, "FIGURES", tmp_path / "conformance.json")
    figures = {"date": "", "machine": "", "cells": [], "proofs": [], "releases": {"vllm": {"9.9.7": column(equal=1)}}}
    adopt.FIGURES.write_text(json.dumps(figures))
    for release in ("9.9.7", "9.9.8"):
        with pytest.raises(CannotMakeError):
            adopt.adopt("vllm", release, write=True)
    written = json.loads(adopt.FIGURES.read_text())["releases"]["vllm"]
    assert written["9.9.7"] == column(equal=1)
    assert written["9.9.8"]["not_run"].startswith("pip finds no wheel of vllm==9.9.8: ")
    assert "| not run: pip finds no wheel of vllm==9.9.8: " in (tmp_path / "conformance.md").read_text()


@pytest.mark.parametrize("passed", [[], [True, False]])
def test_a_release_is_good_only_if_every_check_ran_and_passed(passed: list[bool]) -> None:
    adopt.judge("vllm 1.1", [True, True])
    with pytest.raises(FailedError, match=r"vllm 1\.1"):
        adopt.judge("vllm 1.1", passed)
