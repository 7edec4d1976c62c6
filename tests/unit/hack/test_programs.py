"""The Go programs of test clusters: their folders, the reasons not to build them, and the packages of a node."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hack.build_once import ROOT, CannotMakeError
from hack.cluster import programs
from hack.cluster.programs import NODE_PACKAGES, missing_for_node

CNI_PACKAGE = "containernetworking-plugins"
IMAGE_BUILDERS = {"buildah", "mmdebstrap"}
"""Packages that build the images on a machine that reaches no registry."""


def tool(cache: Path, *arguments: str, path: str = os.environ["PATH"]) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "MMROUTER_CACHE": str(cache), "PATH": path}
    command = [sys.executable, "-m", "hack.cluster.programs", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env, check=False)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("kubernetes", r"cluster/1\.35\.4-[0-9a-f]{8}"),
        ("node", "node/[0-9a-f]{8}"),
        ("helm", r"helm/4\.3\.1"),
        ("workflow", "workflow/[0-9a-f]{8}"),
    ],
)
def test_a_folder_lies_in_the_cache_and_names_version_or_recipe(tmp_path: Path, name: str, folder: str) -> None:
    where = tool(tmp_path, name, "--where")
    assert where.returncode == 0
    assert re.fullmatch(rf"{tmp_path}/{folder}\n", where.stdout)
    assert list(tmp_path.iterdir()) == []


def test_without_a_writable_cache_the_reason_is_one_line(tmp_path: Path) -> None:
    cache = tmp_path / "file"
    cache.touch()
    done = tool(cache, "helm")
    assert (done.returncode, done.stdout) == (3, "")
    assert str(cache) in done.stderr.strip().splitlines()[-1]


def command(folder: Path, name: str, prints: str = "") -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho {prints}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(("present", "missing"), [((), "etcd"), (("etcd",), "openssl")])
def test_a_missing_command_is_the_reason(tmp_path: Path, present: tuple[str, ...], missing: str) -> None:
    for name in present:
        command(tmp_path / "bin", name)
    done = tool(tmp_path, "kubernetes", path=str(tmp_path / "bin"))
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(f"there is no {missing} here (Debian: ")


@pytest.fixture
def bin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder that commands are searched in."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(programs, "GO_FOLDERS", ())
    return tmp_path / "bin"


@pytest.mark.parametrize(
    ("prints", "reason"),
    [
        (None, "there is no Go here to build Kubernetes 1.35.4 with"),
        ("go1.19.8", "is go1.19.8, Kubernetes 1.35.4 needs go 1.25"),
        ("", "broken"),
    ],
)
def test_a_missing_or_old_go_is_not_used(bin: Path, prints: str | None, reason: str) -> None:
    if prints is not None:
        command(bin, "go", prints)
    with pytest.raises(CannotMakeError, match=reason):
        programs.find_go()


def test_a_newer_go_is_used(bin: Path) -> None:
    command(bin, "go", "go1.30")
    assert programs.find_go() == str(bin / "go")


def requirements(level: str) -> set[str]:
    """Return the words of what a level needs, by the table of CONTRIBUTING."""
    match = re.search(rf"^\| {level} \|.*\|(.*)\|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert match
    return set(re.findall(r"[\w-]+", match[1]))


def installed() -> dict[str, str]:
    """Return command -> package of what ``.ci/run`` installs."""
    match = re.search(r"^declare -A packages=\((.*?)^\)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE | re.DOTALL)
    assert match
    return dict(re.findall(r"\[(\S+)\]=(\S+)", match[1]))


def test_the_guide_names_every_requirement_of_a_node_and_a_control_plane() -> None:
    assert {*NODE_PACKAGES.values(), CNI_PACKAGE, *IMAGE_BUILDERS} - requirements("e2e") == set()
    assert {"etcd", "openssl", "Go"} <= requirements("cluster")


def test_continuous_integration_installs_every_package_of_a_node() -> None:
    packages = installed()
    assert {*NODE_PACKAGES.values(), *IMAGE_BUILDERS} - set(packages.values()) == set()
    assert {name: NODE_PACKAGES[name] for name in packages if name in NODE_PACKAGES}.items() <= packages.items()
    assert CNI_PACKAGE in (ROOT / ".ci" / "run").read_text()


def test_missing_commands_are_named_with_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert [text for text in missing_for_node() if "plugins" not in text] == [
        f"{command} (Debian: {package})" for command, package in NODE_PACKAGES.items()
    ]
