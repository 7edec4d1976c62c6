"""DeepSeek-OCR and DeepSeek-OCR-2: square tiles of a large image, and the whole picture, as one run of placeholders.

Covers ``DeepseekOCRForCausalLM`` and ``DeepseekOCR2ForCausalLM``, whose ``model_type`` is that of DeepSeek-VL2. Sides
and limits are constants of vLLM 0.32 (``DeepseekOCRProcessingInfo``, ``DeepseekOCR2ProcessingInfo``); no file of the
folder changes them. The grid is chosen as InternVL's is. The folders are published without a chat template: vLLM has
one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from mmrouter_lib.families.base.family import Family, ProcessorLimits, refuse_options, register
from mmrouter_lib.families.base.layout import check_size
from mmrouter_lib.families.internvl import grid
from mmrouter_lib.model_folder import ModelFolderError, added_token_id, find_json

MODEL_TYPE = "deepseek_vl_v2"
IMAGE = "<image>"
_BASE = 1024  # side in pixels of the whole picture
_TOKEN = 64  # side in pixels of the square that one token stands for: patches of 16, merged 4x4
_LEAST, _MOST = 2, 6  # tiles of an image that is cut


@dataclass(frozen=True, slots=True)
class DeepseekOCR(Family):
    """A DeepSeek-OCR folder. ``tile`` is a tile's side in pixels; ``rows_end``: whether each row of tokens has one more
    at its end.
    """

    name: str
    placeholder_id: int
    tile: int
    rows_end: bool
    placeholder_text: str = IMAGE
    media_text: ClassVar[Mapping[str, str]] = MappingProxyType({"image": IMAGE})
    chat_template: ClassVar[str] = (
        "{%- set first = messages[0] -%}{%- set begins = first['role'] == 'system' -%}"
        "{{- bos_token + (first['content'] if begins else '') -}}"
        "{%- for turn in (messages[1:] if begins else messages) -%}"
        "{%- if (turn['role'] == 'user') != (loop.index0 is even) -%}"
        "{{- raise_exception('user and assistant must take turns') -}}{%- endif -%}"
        "{{- turn['content'] -}}{%- endfor -%}"
    )

    def count(self, width: int, height: int) -> int:
        """Return the tokens of tiles and whole picture, and one between them. Raises :class:`ImageSizeError` for no
        pixels.
        """
        check_size(width, height)
        tokens = self._tokens(_BASE, 1, 1) + 1
        if max(width, height) > self.tile:
            tokens += self._tokens(self.tile, *grid(width, height, self.tile, _LEAST, _MOST))
        return tokens

    def _tokens(self, side: int, columns: int, rows: int) -> int:
        across = side // _TOKEN
        return rows * across * (columns * across + self.rows_end)


def load(folder: Path, config: dict[str, Any], limits: ProcessorLimits | None) -> DeepseekOCR | None:
    """Return the family of a folder, ``None`` for a configuration that is not DeepSeek-VL2's, and for a template where
    vLLM does not look for one. Raises :class:`ModelFolderError` for a geometry that is not modelled.
    """
    name = str(config["architectures"][0])
    file, values = folder / "processor_config.json", find_json(folder, "processor_config.json") or {}
    unread = "chat_template" in values or (folder / "chat_template.json").exists()
    if config.get("model_type") != MODEL_TYPE or unread:
        return None
    refuse_options(limits, "min_pixels", "max_pixels", "num_crops", family=name)
    for key, modelled in (("image_token", IMAGE), ("max_crops", _MOST)):
        if values.get(key, modelled) != modelled:
            raise ModelFolderError(f"{file}: {key} {values[key]!r} is not modelled, only {modelled!r}")
    image = added_token_id(folder, IMAGE)
    if image is None:
        raise ModelFolderError(f"{folder / 'tokenizer.json'}: the tokenizer has no token {IMAGE}")
    return DeepseekOCR(name, image, *ARCHITECTURES[name])


ARCHITECTURES: Mapping[str, tuple[int, bool]] = MappingProxyType(
    {"DeepseekOCRForCausalLM": (640, True), "DeepseekOCR2ForCausalLM": (768, False)}
)
for architecture in ARCHITECTURES:
    register(architecture, load, proved_on=("vllm",))
