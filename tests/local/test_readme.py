"""Every command of the pages that needs no cluster runs, or is a target of make."""

import re
import shlex
import subprocess
import sys

import pytest
from doc_commands import CHART_PAGE, commands, needs_a_cluster, tour
from local.rig import ROOT

FOUND = [(page, command) for page, command in commands() if page != CHART_PAGE and not needs_a_cluster(command)]


def test_the_pages_hold_commands():
    assert sum(page == "README.md" for page, _ in FOUND) >= 7


@pytest.mark.parametrize("command", [c for c in [*(c for _, c in FOUND), *tour()] if c.startswith("make ")])
def test_make_targets_exist(command):
    done = subprocess.run([*shlex.split(command, comments=True), "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("page", "command"), [c for c in FOUND if not c[1].startswith("make ")])
def test_commands_succeed_as_they_stand(page, command, demo):
    if command.startswith(("URL=", ".venv/bin/mmrouter up")):
        return  # the fixture runs this very command; its endpoint takes the place of URL
    if "REQUEST_ID" in command:
        answer = subprocess.run(
            ["bash", "-c", _here(_curl(), demo)], cwd=ROOT, capture_output=True, text=True, check=True
        )
        command = command.replace("REQUEST_ID", re.search(r"x-mmrouter-request-id: (\S+)", answer.stdout)[1])
    done = subprocess.run(["bash", "-c", _here(command, demo)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "error" not in done.stdout


def _curl():
    return next(command for _, command in FOUND if command.startswith("curl"))


def _here(command, demo):
    return command.replace("$URL", demo.url).replace(".venv/bin/mmrouter", f"{sys.executable} -m mmrouter_cli")
