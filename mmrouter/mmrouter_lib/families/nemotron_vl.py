"""Nemotron Nano VL v2: tiles as InternVL has them, and a language model whose layers keep states.

Covers ``NemotronH_Nano_VL_V2`` with images in tiles, as Nemotron Nano 12B v2 VL has them. vLLM 0.32 reads the geometry
from config.json alone (``NanoNemotronVLProcessor``): at most 12 tiles and the whole picture, whatever the files of the
processor say. Folders with ``min_num_patches``, whose images are not cut, are ``nemotron_omni.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from mmrouter_lib.families.base.family import ProcessorLimits, refuse_options, register
from mmrouter_lib.families.internvl import InternVL, tile_tokens
from mmrouter_lib.model_folder import (
    ModelFolderError,
    added_token_id,
    find_json,
    has_tokenizer_code,
    vision_config,
    whole_number,
)

ARCHITECTURE = "NemotronH_Nano_VL_V2"
IMAGE = "<image>"
_MOST = 12  # tiles, the engine's own limit


@dataclass(frozen=True, slots=True)
class NemotronVL(InternVL):
    """A Nemotron Nano VL v2 folder; the fields are InternVL's."""

    placeholder_text: str = IMAGE
    name: str = ARCHITECTURE
    media_text: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"image": IMAGE, "video": "<video>", "audio": "<so_embedding>"}
    )

    @property
    def may_have_states(self) -> bool:
        return True  # its language model has layers of Mamba


def radio_settings(file: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the vision tower, RADIO. Raises :class:`ModelFolderError` without them."""
    settings = vision_config(file, config).get("args")
    if not isinstance(settings, dict):
        raise ModelFolderError(f"{file}: vision_config must hold args, not {settings!r}")
    return settings


def load(folder: Path, config: dict[str, Any], limits: ProcessorLimits | None) -> NemotronVL | None:
    """Return the family of a folder, ``None`` where images are not cut into tiles or the tokenizer is code of its own.

    Raises :class:`ModelFolderError` for a geometry that is not modelled.
    """
    refuse_options(limits, "min_pixels", "max_pixels", "num_crops", family=ARCHITECTURE)
    file = str(folder / "config.json")
    settings = radio_settings(file, config)
    if "min_num_patches" in settings or has_tokenizer_code(find_json(folder, "tokenizer_config.json") or {}):
        return None
    if config.get("use_thumbnail") is not True:
        raise ModelFolderError(f"{file}: use_thumbnail must be true, not {config.get('use_thumbnail')!r}")
    tile, patch = (whole_number(file, config, key) for key in ("force_image_size", "patch_size"))
    tokens, image = tile_tokens(file, config, tile, patch), added_token_id(folder, IMAGE)
    if image is None:
        raise ModelFolderError(f"{file}: the tokenizer has no token {IMAGE}")
    return NemotronVL(image, tile, tokens, 1, _MOST)


register(ARCHITECTURE, load, proved_on=("vllm",))
