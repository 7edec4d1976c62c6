"""Fields and variables that the pages name exist, and no variable lacks documentation."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.prose_lint import LINK

ROOT = Path(__file__).resolve().parents[3]
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
    told = "".join(page.read_text() for page in PAGES)
    read = set(VARIABLE.findall(code))
    assert {"MMROUTER_CONFIG", "MMROUTER_CONTROL_TOKEN"} <= read
    assert read - set(VARIABLE.findall(told)) == set(INTERNAL)
