"""Model folders: the real ones where this machine has them, and small ones written for one test."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from unit.conftest import shared_folder

FolderMaker = Callable[..., Path]


def limits(**options: int) -> SimpleNamespace:
    """The resource's processor options."""
    return SimpleNamespace(**{"min_pixels": None, "max_pixels": None, "num_crops": None, **options})


@pytest.fixture
def make_folder(write_folder: FolderMaker) -> FolderMaker:
    """Return a maker of folders with Qwen2-VL's geometry; keyword arguments change preprocessor_config.json."""

    def make(model_type: str = "qwen2_vl", patch: int = 14, **processor: Any) -> Path:
        vision = {"patch_size": patch, "spatial_merge_size": 2}
        config = {"model_type": model_type, "image_token_id": 7, "vision_config": vision}
        values = {"patch_size": patch, "merge_size": 2, **processor}
        return write_folder(config=config, preprocessor_config={k: v for k, v in values.items() if v is not None})

    return make


@pytest.fixture
def write_folder(tmp_path: Path) -> FolderMaker:
    """Return a writer of model folders: each argument is a file's name without ``.json`` and its object."""

    def write(**files: dict[str, Any]) -> Path:
        for name, values in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(values))
        return tmp_path

    return write


@pytest.fixture(scope="session")
def models() -> Path:
    """The folder of real models' metadata."""
    return shared_folder("MMROUTER_MODELS", "models")


@pytest.fixture(scope="session")
def images(models: Path) -> Path:
    """Test images with the token counts that the Hugging Face processors give them."""
    folder = models.parent / "images"
    if not (folder / "expected_tokens.json").is_file():
        pytest.skip(f"not run: no images with expected counts at {folder}")
    return folder
