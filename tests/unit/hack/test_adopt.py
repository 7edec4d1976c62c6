"""What `make adopt` says of an engine's release: its wheel, what changed, and whether the release is good."""

import hashlib
import zipfile
from pathlib import Path

import pytest
from conformance.releases import Row, changed, comparison, tables

from hack.build_once import CannotMakeError, FailedError
from hack.engines import adopt

FIELDS = Row("request fields", "", "passed", {"/v1/completions": ["n", "prompt", "stop"]})


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index that has one wheel of vLLM."""
    wheel = tmp_path / "vllm-9.9.9-py3-none-any.whl"
    about = "vllm-9.9.9.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: vllm\nVersion: 9.9.9\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return wheel


def test_a_pinned_release_needs_no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert adopt.wheel("vllm", "0.33.0") == adopt.WHEELS["vllm"]


def test_another_release_has_the_hash_that_the_index_gives(index: Path) -> None:
    digest = hashlib.sha256(index.read_bytes()).hexdigest()
    assert adopt.wheel("vllm", "9.9.9") == f"vllm==9.9.9 --hash=sha256:{digest}"


def test_a_release_that_the_index_does_not_have_cannot_be_made(index: Path) -> None:
    with pytest.raises(CannotMakeError, match=r"no wheel of vllm 9\.9\.8"):
        adopt.wheel("vllm", "9.9.8")


def test_a_changed_list_names_what_came_and_went() -> None:
    later = Row("request fields", "", "failed: judge it", {"/v1/completions": ["n", "prompt", "seed"]})
    assert changed(FIELDS, Row(FIELDS.check, "", "passed", later.figures)) == "/v1/completions +seed -stop"
    assert changed(FIELDS, later) == "failed"
    assert changed(FIELDS, FIELDS) == ""
    assert changed(None, FIELDS) == "new"


def test_the_table_has_every_check_of_both_releases() -> None:
    gone = Row("hits", "MLA", "passed", {"equal": 300, "above": 0})
    lines = list(comparison([FIELDS, gone], [FIELDS, Row("front end", "gemma4", "passed")], "1.0", "1.1"))
    assert lines[2:] == [
        "| request fields | - | /v1/completions 3 | /v1/completions 3 | - |",
        "| front end | gemma4 | - | passed | new |",
        "| hits | MLA | equal 300, above 0 | - | did not run |",
    ]


def test_the_page_has_a_column_per_release() -> None:
    rows = [{"check": "hits", "case": "MLA", "result": "passed", "figures": {"equal": 300}}]
    found = {"vllm": {"1.0": {"date": "2026-11-01", "rows": rows}, "1.1": {"date": "2026-11-02", "rows": []}}}
    assert list(tables(found))[3:] == [
        "| check | case | 1.0 (2026-11-01) | 1.1 (2026-11-02) |",
        "|---|---|---|---|",
        "| hits | MLA | equal 300 | - |",
    ]


@pytest.mark.parametrize("passed", [[], [True, False]])
def test_a_release_is_good_only_if_every_check_ran_and_passed(passed: list[bool]) -> None:
    adopt.judge("vllm 1.1", [True, True])
    with pytest.raises(FailedError, match=r"vllm 1\.1"):
        adopt.judge("vllm 1.1", passed)
