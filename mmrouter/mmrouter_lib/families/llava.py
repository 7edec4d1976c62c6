"""LLaVA-1.5: every image becomes one square picture of a CLIP vision tower, so all have the same number of tokens.

The tower's geometry is read from the model folder: 576 tokens as published.

vLLM 0.32 counts tokens from config.json alone, while the image processor's settings decide the size of the picture.
Where the two differ the engine fails on the first image, so such a folder is refused. It starts a prompt with the
beginning-of-text token only where the request asks for special tokens, although ``add_bos_token`` is set. Its chat
endpoint does not ask, with or without an image (recorded requests of LLaVA-1.5).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from mmrouter_lib.families import pixtral
from mmrouter_lib.families.base.family import Family, ImageSizeError, ProcessorLimits, refuse_options, register
from mmrouter_lib.model_folder import ModelFolderError, find_json, image_processor, whole_number

IMAGE_TOKEN_ID, IMAGE_TOKEN = 32000, "<image>"  # the configuration and processor classes' own defaults
_WHOLE_TOWER = {"image_size": 336, "patch_size": 14}  # the tower of a config.json without vision_config
_BARE_TOWER = {"image_size": 224, "patch_size": 32}  # CLIP's own defaults, for keys that vision_config leaves out
_PICTURE = 224  # the image processors' own default for size and crop_size, in pixels


@dataclass(frozen=True, slots=True)
class Llava(Family):
    """A LLaVA-1.5 folder. ``image_size`` and ``patch_size`` are the sides of the square picture and its patches."""

    placeholder_id: int
    placeholder_text: str
    image_size: int
    patch_size: int
    base_tokens: int
    """Tokens of one whole picture: its patches, and with feature selection ``full`` the class token as well."""
    name: str = "llava"
    media_text: ClassVar[Mapping[str, str]] = MappingProxyType({"image": IMAGE_TOKEN})

    def count(self, width: int, height: int) -> int:
        """Return the number of placeholder tokens: (picture side / patch side)^2."""
        if width < 1 or height < 1:
            raise ImageSizeError(f"an image of {width}x{height} pixels is empty")
        return self.base_tokens


def load(folder: Path, config: dict[str, Any], limits: ProcessorLimits | None) -> Llava | None:
    """Return the family of a folder, ``None`` where its vision tower is not CLIP.

    Raises :class:`ModelFolderError`.
    """
    file, name = str(folder / "config.json"), str(config["model_type"])
    vision = config.get("vision_config")
    if not (vision is None or isinstance(vision, dict)):
        raise ModelFolderError(f"{file}: vision_config must be an object, not {type(vision).__name__}")
    if vision is not None and vision.get("model_type", "clip_vision_model") != "clip_vision_model":
        return None
    refuse_options(limits, "min_pixels", "max_pixels", "num_crops", family=name)
    defaults = _WHOLE_TOWER if vision is None else _BARE_TOWER
    size, patch = (whole_number(file, vision or {}, key, defaults[key]) for key in ("image_size", "patch_size"))
    if size % patch:
        raise ModelFolderError(f"{file}: image_size {size} is not a multiple of patch_size {patch}")
    strategy = config.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise ModelFolderError(f"{file}: vision_feature_select_strategy must be default or full, not {strategy!r}")
    _check_pictures(folder, size)
    base_tokens = (size // patch) ** 2 + (strategy == "full")
    text = _check_processor(folder, patch, strategy)
    return Llava(_placeholder_id(file, config), text, size, patch, base_tokens, name)


def _placeholder_id(file: str, config: dict[str, Any]) -> int:
    """``image_token_index``, which newer files call ``image_token_id``."""
    ids = {whole_number(file, config, key, least=0) for key in ("image_token_index", "image_token_id") if key in config}
    if len(ids) > 1:
        raise ModelFolderError(f"{file}: image_token_index and image_token_id differ: {sorted(ids)}")
    return ids.pop() if ids else IMAGE_TOKEN_ID


def _check_processor(folder: Path, patch: int, strategy: str) -> str:
    """Return the placeholder's text; refuse a processor_config.json that counts otherwise than config.json does."""
    file, values = folder / "processor_config.json", find_json(folder, "processor_config.json") or {}
    wanted = {"patch_size": patch, "vision_feature_select_strategy": strategy, "num_additional_image_tokens": 1}
    for key, value in wanted.items():
        if values.get(key, value) not in (None, value):
            raise ModelFolderError(f"{file}: {key} is {values[key]!r}, by config.json it must be {value!r}")
    text = values.get("image_token", IMAGE_TOKEN)
    if isinstance(text, dict):
        text = text.get("content")
    if not isinstance(text, str) or not text:
        raise ModelFolderError(f"{file}: image_token must be a text, not {text!r}")
    return text


def _check_pictures(folder: Path, side: int) -> None:
    """Refuse an image processor whose pictures are not squares of ``side`` pixels."""
    file, values = image_processor(folder)
    if values.get("do_resize") is False:
        raise ModelFolderError(f"{file}: do_resize false is not modelled")
    crops = values.get("do_center_crop") is not False
    sides = {"size": picture_sides(file, values, "size")}
    if crops:
        sides["crop_size"] = picture_sides(file, values, "crop_size")
    for key, (high, wide) in sides.items():
        if {high, wide} != {side}:
            raise ModelFolderError(f"{file}: {key} is {wide}x{high}, config.json's image_size is {side}")
    if not crops and "shortest_edge" in (values.get("size") or {}):
        raise ModelFolderError(f"{file}: size by shortest_edge without do_center_crop gives pictures of any shape")


def picture_sides(file: str, values: dict[str, Any], key: str) -> tuple[int, int]:
    """Return (height, width) in pixels of ``size`` or ``crop_size``: a number, two sides, or the shorter side."""
    value: Any = values.get(key)
    match value:
        case {"height": _, "width": _}:
            return whole_number(file, value, "height"), whole_number(file, value, "width")
        case {"shortest_edge": _}:
            side = whole_number(file, value, "shortest_edge")
        case dict():
            raise ModelFolderError(f"{file}: {key} must hold height and width, or shortest_edge, not {value!r}")
        case _:
            side = whole_number(file, values, key, _PICTURE)
    return side, side


def load_any(folder: Path, config: dict[str, Any], limits: ProcessorLimits | None) -> Family | None:
    """Return the family of a folder by its vision tower: Pixtral's folders have the same ``model_type``.

    Raises :class:`ModelFolderError`.
    """
    vision = config.get("vision_config")
    if isinstance(vision, dict) and vision.get("model_type") == "pixtral":
        return pixtral.load(folder, config, limits)
    return load(folder, config, limits)


# SGLang expands the placeholders of LLaVA in its scheduler, by rules that are not modelled
# (docs/engine-facts/sglang.md#identity-per-family).
register("llava", load_any, proved_on=("vllm",))
