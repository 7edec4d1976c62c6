"""What a node needs of a machine is what the guide names and what continuous integration installs."""

import re

import artefacts as making
import pytest

from hack.machine import PROGRAMS
from hack.machine import missing as lacks

ROOT = making.TOOLS.parent
PLUGINS = "containernetworking-plugins"
BUILD = {"buildah", "mmdebstrap"}
"""What the images are built with on a machine without a registry."""


def row(level: str) -> set[str]:
    """Return the words of what a level needs, by the table of CONTRIBUTING."""
    found = re.search(rf"^\| {level} \|.*\|(.*)\|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert found
    return set(re.findall(r"[\w-]+", found[1]))


def installed() -> dict[str, str]:
    """Return command -> package of what ``.ci/run`` installs."""
    found = re.search(r"^declare -A packages=\((.*?)^\)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE | re.DOTALL)
    assert found
    return dict(re.findall(r"\[(\S+)\]=(\S+)", found[1]))


def test_the_guide_names_every_package_of_a_node() -> None:
    assert {*PROGRAMS.values(), PLUGINS, *BUILD} - row("e2e") == set()


def test_continuous_integration_installs_every_package_of_a_node() -> None:
    assert {*PROGRAMS.values(), *BUILD} - set(installed().values()) == set()
    assert {command: PROGRAMS[command] for command in installed() if command in PROGRAMS}.items() <= installed().items()
    assert PLUGINS in (ROOT / ".ci" / "run").read_text()


def test_the_guide_names_what_a_control_plane_needs() -> None:
    assert {"etcd", "openssl", "Go"} <= row("cluster")


def test_what_is_missing_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert [text for text in lacks() if "plugins" not in text] == [
        f"{command} (Debian: {package})" for command, package in PROGRAMS.items()
    ]
