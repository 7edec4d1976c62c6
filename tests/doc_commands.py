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
MANY_MODELS = re.compile(r"^## Many models, one address\n.*?(?=^## )", re.MULTILINE | re.DOTALL)
"""The section whose commands need two deployments and a gateway, and are run by the test that has them."""
NEEDS_A_CLUSTER = ("kubectl ", ".venv/bin/mmrouter operator")
LOOKS_AT_ONE = (".venv/bin/mmrouter status", ".venv/bin/mmrouter doctor")
"""Commands that look at a cluster, unless they are given a URL."""


def commands() -> Iterator[tuple[str, str]]:
    """Yield (page, command) in their order, without those of the tour and of many models."""
    elsewhere = {PAGES[0]: TOUR, GATEWAY_PAGE: MANY_MODELS}
    for page in PAGES:
        text = page.read_text()
        for command in _commands(elsewhere[page].sub("", text) if page in elsewhere else text):
            yield page.name, command


def many_models() -> list[str]:
    """Return the commands of the section about many models."""
    found = MANY_MODELS.search(GATEWAY_PAGE.read_text())
    assert found, "the page has no section about many models"
    return list(_commands(found[0]))


def on_gateway_page(kind: str, **names: str) -> str:
    """Return an object of the page about gateways, with names in the place of the words in capitals."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", GATEWAY_PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = (str(each) for each in blocks if f"kind: {kind}\n" in each)
    for word, name in names.items():
        block = re.sub(rf"\b{word}\b", name, block)
    return block


def tour() -> list[str]:
    """Return the commands of the README's tour of a cluster."""
    found = TOUR.search(PAGES[0].read_text())
    assert found, "the README has no tour of a cluster"
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
