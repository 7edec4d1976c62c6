"""The commands of the README and the concept pages, as readers see them."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
CHART_PAGE = "install.md"
"""Its commands need helm, and are run by the chart's tests."""
NEEDS_A_CLUSTER = ("kubectl ", ".venv/bin/mmrouter operator")
LOOKS_AT_ONE = (".venv/bin/mmrouter status", ".venv/bin/mmrouter doctor")
"""Commands that look at a cluster, unless they are given a URL."""


def commands() -> Iterator[tuple[str, str]]:
    """Yield (page, command) in their order; a quoted body that runs over several lines is one command."""
    for page in PAGES:
        for block in BLOCK.findall(page.read_text()):
            lines = block.replace("\\\n", " ")
            pending = ""
            for line in lines.splitlines():
                pending = f"{pending}\n{line}" if pending else line
                if pending.count("'") % 2 == 0:
                    if pending.split("#")[0].strip():
                        yield page.name, pending.split("  #")[0].strip()
                    pending = ""


def needs_a_cluster(command: str) -> bool:
    """Whether a command is run by the tests on a real control plane, not by those on local processes."""
    looks = command.startswith(LOOKS_AT_ONE) and "--url" not in command
    return command.startswith(NEEDS_A_CLUSTER) or looks or "--against cluster" in command
