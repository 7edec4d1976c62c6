"""The commands of docs/gateway.md, as they stand, at a deployment behind Envoy."""

import re
import subprocess
import sys

import pytest
from doc_commands import commands
from local.rig import ROOT, Deployment

FOUND = [command for page, command in commands() if page == "gateway.md" and not command.startswith("make ")]
CURL = next(command for command in FOUND if "chat/completions" in command)


def test_page_leads_from_start_to_proof() -> None:
    assert any(command.startswith(".venv/bin/mmrouter up ") and "--gateway envoy" in command for command in FOUND)
    assert ".venv/bin/mmrouter verify $URL" in FOUND


@pytest.mark.parametrize("command", [each for each in FOUND if not each.startswith((".venv/bin/mmrouter up", "URL="))])
def test_command_succeeds_as_it_stands(command: str, settled: Deployment) -> None:
    def run(line: str) -> str:
        here = line.replace(".venv/bin/mmrouter", f"{sys.executable} -m mmrouter_cli").replace("$URL", settled.url)
        done = subprocess.run(["bash", "-c", here], cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    if "REQUEST_ID" in command:
        found = re.search(r"x-mmrouter-request-id: (\S+)", run(CURL))
        assert found
        command = command.replace("REQUEST_ID", found[1])
    assert "error" not in run(command)
