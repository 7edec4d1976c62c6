"""The workflow of continuous integration and its cluster: read by the programs that will read them, and complete.

The workflow has never run where it is meant to run; these tests are what is known of it.
"""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from artefacts import go_programs
from chart.helm import ROOT

from hack import run_levels
from hack.images.base_image import write_image
from hack.kind import cluster
from mmrouter_operator.model.accelerators import ACCELERATORS

WORKFLOW = ROOT / ".github" / "workflows" / "ci.yaml"
RELEASE = WORKFLOW.with_name("release.yaml")
WORKFLOWS = sorted(WORKFLOW.parent.iterdir())
KIND_CONFIG = ROOT / ".github" / "kind-config.yaml"


@pytest.fixture(scope="module")
def tools() -> Path:
    """The folder with actionlint and kind."""
    return go_programs("workflow")


@pytest.fixture(scope="module")
def jobs() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    return found


def steps(jobs: dict[str, Any], field: str) -> list[str]:
    return [step[field] for job in jobs.values() for step in job["steps"] if field in step]


def by_tag(text: str) -> str:
    """Return the workflow with tags for commits: only of tags does actionlint know which inputs an action has."""
    return re.sub(r"@[0-9a-f]{40} # (v\d+)\S*", r"@\1", text)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
@pytest.mark.parametrize("change", [str, by_tag])
def test_actionlint_accepts_the_workflow(tools: Path, workflow: Path, change: Callable[[str], str]) -> None:
    # Not the linters of other languages that it would call where they happen to be installed.
    command = [tools / "actionlint", "-shellcheck=", "-pyflakes=", "-no-color", "-"]
    text = change(workflow.read_text())
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout


def test_every_action_is_pinned_by_commit_and_says_its_version() -> None:
    used = [each for workflow in WORKFLOWS for each in re.findall(r"uses: (\S+)(.*)", workflow.read_text())]
    assert used
    for action, comment in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+(/[\w-]+)*@[0-9a-f]{40}", action)
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action
    assert len({action.partition("@")[0] for action, _ in used}) == len({action for action, _ in used})


def test_the_jobs_run_every_level(jobs: dict[str, Any]) -> None:
    targets = {
        name for run in steps(jobs, "run") for line in re.findall(r"make ([a-z0-9 -]+)", run) for name in line.split()
    }
    assert {name.removeprefix("test-") for name in targets} >= set(run_levels.LEVELS)


def test_the_job_with_real_engines_has_what_it_needs_or_does_not_begin(jobs: dict[str, Any]) -> None:
    job = jobs["conformance"]
    (env,) = [step["env"] for step in job["steps"] if step.get("run") == "make conformance"]
    assert set(env) == {"MMROUTER_TORCH_INDEX", "MMROUTER_MODELS"}
    named = set(re.findall(r"vars\.(\w+)", " ".join(env.values())))
    assert job["if"] == " && ".join(f"vars.{name} != ''" for name in ("TORCH_INDEX", "MODELS"))
    assert named == {"TORCH_INDEX", "MODELS"}
    readme = (ROOT / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in re.findall(r"vars\.(\w+)", WORKFLOW.read_text()))


def test_every_job_has_a_time_limit_and_no_right_to_write(jobs: dict[str, Any]) -> None:
    assert yaml.safe_load(WORKFLOW.read_text())["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 120 and "permissions" not in job for job in jobs.values())


@pytest.fixture(scope="module")
def release() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(RELEASE.read_text())
    return found


def test_only_a_tag_publishes_and_only_what_was_built_twice(release: dict[str, Any]) -> None:
    build, images, publish = (release["jobs"][name] for name in ("build", "images", "publish"))
    assert release["permissions"] == {"contents": "read"}
    assert "permissions" not in build | images
    assert (publish["if"], publish["needs"]) == ("startsWith(github.ref, 'refs/tags/')", ["build", "images"])
    commands = [step["run"] for step in build["steps"] if "run" in step]
    assert commands.index("make dist") + 1 == commands.index(
        "make dist ARGS=build/again && diff --recursive dist build/again"
    )
    assert not [step for step in publish["steps"] if "make" in step.get("run", "").split()]


def test_publishing_pushes_each_image_with_all_its_architectures(release: dict[str, Any], tmp_path: Path) -> None:
    """The step's own script, with a buildah that records its commands."""
    architectures = [each["architecture"] for each in release["jobs"]["images"]["strategy"]["matrix"]["include"]]
    folders = [tmp_path / f"images-{architecture}" for architecture in architectures]
    (tmp_path / "layer").touch()
    for folder in folders:
        folder.mkdir()
        for name in ("mmrouter", "sim"):
            write_image(folder / f"{name}.tar", tmp_path / "layer", f"docker.io/mmrouter/{name}:0.1.0", {})
    (tmp_path / "hack").symlink_to(ROOT / "hack")
    buildah = tmp_path / "buildah"
    buildah.write_text('#!/bin/bash\necho "${*:4}" >>commands\n')  # the first three say where its storage is
    buildah.chmod(0o755)
    (script,) = [step["run"] for step in release["jobs"]["publish"]["steps"] if step.get("name") == "images"]
    env = {"PATH": f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin", "REGISTRY": "registry.example/team"}
    subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, env=env, check=True)
    commands = (tmp_path / "commands").read_text().splitlines()
    for name in ("mmrouter", "sim"):
        index = f"docker.io/mmrouter/{name}:0.1.0"
        place = f"docker://registry.example/team/mmrouter/{name}:0.1.0"
        added = [f"manifest add {index} docker-archive:{folder.name}/{name}.tar" for folder in folders]
        pushed = f"manifest push --quiet --all {index} {place}"
        assert [line for line in commands if index in line] == [f"manifest create {index}", *added, pushed]


def test_kind_accepts_its_configuration(tools: Path) -> None:
    command = [tools / "kind", "create", "cluster", f"--config={KIND_CONFIG}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": "/nowhere"})
    # Where it finds no container runtime, it has read its configuration before.
    assert (done.returncode != 0, "failed to get docker info" in done.stderr) == (True, True), done.stderr


def test_the_workflow_makes_the_cluster_with_the_kind_that_read_its_configuration(
    jobs: dict[str, Any], tools: Path
) -> None:
    version = subprocess.run([tools / "kind", "version"], capture_output=True, text=True, check=True).stdout.split()[1]
    asked = [step["with"] for step in jobs["e2e"]["steps"] if "kind-action" in step.get("uses", "")]
    assert [(each["version"], each["config"]) for each in asked] == [(version, str(KIND_CONFIG.relative_to(ROOT)))]


def test_make_kind_runs_the_jobs_steps_from_the_images_to_the_tests() -> None:
    commands = [re.findall(r"^(?:make \w+|kind load|hack/\S+)", step[-1], re.MULTILINE) for step in cluster.steps()]
    assert commands == [["make images"], ["kind load"], ["hack/kind/routes.sh"], ["make e2e"]]


def test_kinds_workers_have_the_labels_by_which_pods_find_gpus_and_xpus() -> None:
    nodes = yaml.safe_load(KIND_CONFIG.read_text())["nodes"]
    labels = [set(node["labels"].items()) for node in nodes if node["role"] == "worker"]
    for kind in ("nvidia", "intel-i915", "intel-xe"):
        assert any(found & set(ACCELERATORS[kind].node_labels) for found in labels), kind
    assert all(re.search(r"@sha256:[0-9a-f]{64}$", node["image"]) for node in nodes)
