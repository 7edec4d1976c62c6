"""The tools around the real engine refuse clearly and keep what decides a prompt."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hack.build_once import ROOT, FailedError
from hack.engines import vllm_env
from hack.engines.shrink_model import shrink, shrink_config


def script(cache: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "MMROUTER_CACHE": str(cache), **environment}
    command = [sys.executable, "-m", "hack.engines.vllm_env", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env, check=False)


def test_the_environment_lies_in_the_cache(tmp_path: Path) -> None:
    where = script(tmp_path, "--where")
    assert (where.returncode, where.stdout) == (0, f"{tmp_path}/engines/vllm-0.32.0-cpu\n")
    assert list(tmp_path.iterdir()) == []


def test_an_environment_that_cannot_be_made_has_a_status_and_one_reason(tmp_path: Path) -> None:
    made = script(tmp_path, MMROUTER_ENGINE_PYTHON="/nowhere/python3")
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
    assert script(tmp_path, MMROUTER_ENGINE_PYTHON="/nowhere/python3").stdout == f"{env}\n"
    (env / "mmrouter-recipe").write_text("another")
    assert script(tmp_path, MMROUTER_ENGINE_PYTHON="/nowhere/python3").returncode == 3


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


CONFIG = {
    "model_type": "qwen3_vl",
    "image_token_id": 7,
    "text_config": {
        "vocab_size": 9,
        "hidden_size": 2048,
        "head_dim": 128,
        "dtype": "bfloat16",
        "max_position_embeddings": 4096,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20]},
    },
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


def test_an_unknown_family_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'llama' is none of qwen2_vl"):
        shrink_config({"model_type": "llama"})
