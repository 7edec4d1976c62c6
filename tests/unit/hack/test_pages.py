"""What the pages say can be followed: links lead somewhere, fields and variables exist, and none is left out."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*/README.md"))]
LINK = re.compile(r"\[[^\]\[]*\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
SECTIONS = "model|engine|frontend|routing|pools|verification|sidecar|observability|networkPolicy"
FIELD = re.compile(rf"`(?:spec\.)?((?:{SECTIONS})(?:\[\])?\.[A-Za-z.\[\]]+)`")
ROOMS = ("mmrouter", "router", "sidecar", "operator", "cli")
VARIABLE = re.compile(r"\bMMROUTER_[A-Z_]*[A-Z]\b")
OF_NOBODY = {
    "MMROUTER_LOCAL_RUN": "the mark by which `mmrouter up` knows its own processes",
    "MMROUTER_SERVICE_ACCOUNT_DIR": "tests stand in for the pod's service account by it",
}
"""Variables that nobody sets, and why they are there."""
CHART_VALUES = {"networkPolicy.lookupApiServer"}


def anchors(page: Path) -> set[str]:
    """The names that a page's headings have in links."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def fields(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Every field below a schema, lists without brackets."""
    for name, inner in schema.get("properties", {}).items():
        yield f"{path}{name}"
        yield from fields(inner, f"{path}{name}.")
        yield from fields(inner.get("items", {}), f"{path}{name}.")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading_that_are_there(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text()):
        if "://" in target:
            continue
        file = page.parent / target if target else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{target}#{anchor}"


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


def test_every_variable_that_a_pod_or_a_command_reads_is_told_on_a_page() -> None:
    code = "".join(file.read_text() for room in ROOMS for file in (ROOT / room).rglob("*.py"))
    told = "".join(page.read_text() for page in PAGES)
    read = set(VARIABLE.findall(code))
    assert {"MMROUTER_CONFIG", "MMROUTER_CONTROL_TOKEN"} <= read
    assert read - set(VARIABLE.findall(told)) == set(OF_NOBODY)
