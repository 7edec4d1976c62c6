"""The prose lint reports banned phrases, citations and links that do not resolve; the repository's own resolve."""

import subprocess
import sys
from pathlib import Path

import pytest

from hack.prose_lint import ROOT, Finding, check


def findings(folder: Path, text: str, name: str = "page.md") -> list[str]:
    """Return what the lint reports of a text, each as ``LINE: RULE: TEXT``."""
    file = folder / name
    file.write_text(text)
    return [f"{found.line}: {found.rule}: {found.text}" for found in check([file])]


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("Nobody waits.", "Nobody"),
        ("def test_nobody_waits(): ...", "nobody"),
        ("# A page that is\n    # told twice.", "is # told"),
        ("OF_NOBODY = 1", "NOBODY"),
        ("What came of it.", "came of"),
        ("The engine was asked.", "was asked"),
        ("/// It goes\n/// without.", "goes /// without"),
    ],
)
def test_a_banned_phrase_is_found_in_prose_and_identifiers_and_over_the_end_of_a_line(
    tmp_path: Path, text: str, phrase: str
) -> None:
    (found,) = findings(tmp_path, text, "module.py")
    assert found.startswith(f"1: words: {phrase!r}: ")


def test_words_that_only_contain_a_banned_one_are_free(tmp_path: Path) -> None:
    assert findings(tmp_path, "The tokens are tolder than a nobodyish task.") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("see docs/missing.md", "there is no docs/missing.md"),
        ("see docs/exactness.md#nothing-here", "docs/exactness.md has no heading #nothing-here"),
        ("(facts on vLLM 2.3)", "'facts on vLLM' is not in the repository: cite a section of docs/"),
        ("as DESIGN says", "'DESIGN' is not in the repository: cite a section of docs/"),
        ("`tests/unit/hack/test_missing.py` proves it", "there is no tests/unit/hack/test_missing.py"),
    ],
)
def test_a_citation_that_does_not_resolve_is_found(tmp_path: Path, text: str, message: str) -> None:
    assert findings(tmp_path, f"\n{text}.\n", "module.py") == [f"2: citations: {message}"]


def test_citations_that_resolve_and_paths_elsewhere_are_free(tmp_path: Path) -> None:
    text = "docs/exactness.md, hack/prose_lint.py, /etc/docs/page.md, ../docs/page.md, router/.../index.py"
    assert findings(tmp_path, text) == []


def test_a_link_leads_to_a_file_and_a_heading(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `heading`, here\n\n```sh\n# a comment\n```\n")
    text = "[a](other.md#a-heading-here) [b](gone.md) [c](other.md#a-comment) [d](#own) [e](https://a.example/b.md)\n"
    assert findings(tmp_path, text) == [
        "1: links: there is no gone.md",
        "1: links: other.md has no heading #a-comment",
        "1: links: page.md has no heading #own",
    ]


def test_the_command_prints_findings_and_counts(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "hack" / "prose_lint.py"), "--only", "links"]
    done = subprocess.run([*command, "CONTRIBUTING.md"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_finding_names_its_file_from_the_root() -> None:
    assert str(Finding(ROOT / "docs" / "a.md", 3, "links", "there is no b")) == "docs/a.md:3: links: there is no b"
