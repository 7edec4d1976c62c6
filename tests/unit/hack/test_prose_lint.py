"""The prose check finds what it bans, and fields and variables that the pages name exist."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.prose_lint import LINK, ROOT, Finding, check


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
        ("It is in ``missing_module.py``", "there is no missing_module.py"),
    ],
)
def test_a_citation_that_does_not_resolve_is_found(tmp_path: Path, text: str, message: str) -> None:
    assert findings(tmp_path, f"\n{text}.\n", "module.py") == [f"2: citations: {message}"]


def test_citations_that_resolve_and_paths_elsewhere_are_free(tmp_path: Path) -> None:
    text = "docs/exactness.md, `prose_lint.py`, `hack/prose_lint.py`, /etc/docs/page.md, ../docs/page.md, "
    text += "router/.../index.py"
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


README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*/README.md"))]
SECTIONS = "model|engine|frontend|routing|pools|verification|sidecar|observability|networkPolicy"
FIELD = re.compile(rf"`(?:spec\.)?((?:{SECTIONS})(?:\[\])?\.[A-Za-z.\[\]]+)`")
ROOMS = ("mmrouter", "router", "sidecar", "operator", "cli")
VARIABLE = re.compile(r"\bMMROUTER_[A-Z_]*[A-Z]\b")
INTERNAL = {
    "MMROUTER_LOCAL_RUN": "the mark by which `mmrouter up` knows its own processes",
    "MMROUTER_SERVICE_ACCOUNT_DIR": "tests stand in for the pod's service account by it",
}
"""Variables that users do not set, and what each is for."""
CHART_VALUES = {"networkPolicy.lookupApiServer"}


def fields(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Every field below a schema, lists without brackets."""
    for name, inner in schema.get("properties", {}).items():
        yield f"{path}{name}"
        yield from fields(inner, f"{path}{name}.")
        yield from fields(inner.get("items", {}), f"{path}{name}.")


def test_the_readme_leads_to_every_page() -> None:
    linked = {README.parent / target for target, _ in LINK.findall(README.read_text())}
    assert {page for page in PAGES if page.parent.name == "docs"} <= linked


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_fields_that_a_page_names_are_in_the_resource(page: Path) -> None:
    definition = yaml.safe_load((ROOT / "crds" / "mmrouter.io_mmrouterdeployments.yaml").read_text())
    (version,) = definition["spec"]["versions"]
    known = set(fields(version["schema"]["openAPIV3Schema"]["properties"]["spec"])) | CHART_VALUES
    assert "pools.sharedMemory.scope" in known
    assert {name.replace("[]", "") for name in FIELD.findall(page.read_text())} <= known


def test_every_variable_that_a_pod_or_a_command_reads_is_documented() -> None:
    code = "".join(file.read_text() for room in ROOMS for file in (ROOT / room).rglob("*.py"))
    pages = "".join(page.read_text() for page in PAGES)
    read = set(VARIABLE.findall(code))
    assert {"MMROUTER_CONFIG", "MMROUTER_CONTROL_TOKEN"} <= read
    assert read - set(VARIABLE.findall(pages)) == set(INTERNAL)
