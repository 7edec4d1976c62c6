"""The commands of the README and the concept pages, as readers see them."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
CHART_PAGE = "install.md"
"""Its commands need helm, and are run by the chart's tests."""
TOUR = re.compile(r"^## On Kubernetes\n.*?(?=^## )", re.MULTILINE | re.DOTALL)
"""The README's section whose commands need real pods, and are run in their order by the tests that have some."""
GATEWAY_PAGE = ROOT / "docs" / "gateway.md"
FROM_EMPTY = re.compile(r"^## From an empty cluster\n.*?(?=^## )", re.MULTILINE | re.DOTALL)
"""The section whose commands need real pods and a gateway, and are run by the tests that have both."""
MANY_MODELS = re.compile(r"^## Many models, one address\n.*?(?=^## )", re.MULTILINE | re.DOTALL)
"""The section whose commands need two deployments and a gateway, and are run by the test that has them."""
NEEDS_A_CLUSTER = ("kubectl ", ".venv/bin/mmrouter operator")
LOOKS_AT_ONE = (".venv/bin/mmrouter status", ".venv/bin/mmrouter doctor")
"""Commands that look at a cluster, unless they are given a URL."""


def commands() -> Iterator[tuple[str, str]]:
    """Yield (page, command) in their order, without those of sections that other tests run."""
    for page in PAGES:
        text = page.read_text()
        for section in {PAGES[0]: (TOUR,), GATEWAY_PAGE: (MANY_MODELS, FROM_EMPTY)}.get(page, ()):
            text = section.sub("", text)
        for command in _commands(text):
            yield page.name, command


def many_models() -> list[str]:
    """Return the commands of the section about many models."""
    return _commands_of(GATEWAY_PAGE, MANY_MODELS)


def from_empty_cluster() -> list[str]:
    """Return the commands that lead from an empty cluster to an answer through a gateway, and clean up."""
    return _commands_of(GATEWAY_PAGE, FROM_EMPTY)


def on_gateway_page(kind: str, **names: str) -> str:
    """Return an object of the page about gateways, with names in the place of the words in capitals."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", GATEWAY_PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = (str(each) for each in blocks if f"kind: {kind}\n" in each)
    for word, name in names.items():
        block = re.sub(rf"\b{word}\b", name, block)
    return block


def tour() -> list[str]:
    """Return the commands of the README's tour of a cluster."""
    return _commands_of(PAGES[0], TOUR)


def _commands_of(page: Path, section: re.Pattern[str]) -> list[str]:
    found = section.search(page.read_text())
    assert found, f"{page.name} has no {section.pattern.splitlines()[0]}"
    return list(_commands(found[0]))


def _commands(text: str) -> Iterator[str]:
    """Yield the commands of a text; a quoted body that runs over several lines is one command."""
    for block in BLOCK.findall(text):
        pending = ""
        for line in block.replace("\\\n", " ").splitlines():
            pending = f"{pending}\n{line}" if pending else line
            if pending.count("'") % 2 == 0:
                if pending.split("#")[0].strip():
                    yield pending.split("  #")[0].strip()
                pending = ""


def needs_a_cluster(command: str) -> bool:
    """Whether a command is run by the tests on a real control plane, not by those on local processes."""
    looks = command.startswith(LOOKS_AT_ONE) and "--url" not in command
    return command.startswith(NEEDS_A_CLUSTER) or looks or "--against cluster" in command
