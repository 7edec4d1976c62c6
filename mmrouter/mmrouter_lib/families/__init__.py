"""Model families: image size -> number and layout of placeholder tokens, exactly as the engine's processor has it.

A family is a file here with ``MODEL_TYPE`` and ``load``, and a line in :func:`load`.
"""

from pathlib import Path

from mmrouter_lib.families import llava, llavanext, phi3v, qwen2vl, qwen3vl, qwen25vl
from mmrouter_lib.families.family import Codec, Family, ImageSizeError, ProcessorLimits
from mmrouter_lib.families.folder import ModelFolderError, read_json
from mmrouter_lib.families.layout import Expanded, PlaceholderError, PromptImage, expand_ids

__all__ = [
    "Codec",
    "Expanded",
    "Family",
    "ImageSizeError",
    "ModelFolderError",
    "PlaceholderError",
    "ProcessorLimits",
    "PromptImage",
    "expand_ids",
    "load",
]


def load(model_dir: Path, processor: ProcessorLimits | None) -> Family | None:
    """Return the family of a model folder, ``None`` for a ``model_type`` or vision tower that is not modelled.

    ``processor`` holds the resource's processor options, which win over the folder's. Raises :class:`ModelFolderError`
    for a folder whose config.json cannot be read, or of a known family with a geometry that cannot be used.
    """
    config = read_json(model_dir, "config.json")
    match config.get("model_type"):
        case qwen2vl.MODEL_TYPE:
            return qwen2vl.load(model_dir, config, processor)
        case qwen25vl.MODEL_TYPE:
            return qwen25vl.load(model_dir, config, processor)
        case qwen3vl.MODEL_TYPE:
            return qwen3vl.load(model_dir, config, processor)
        case llava.MODEL_TYPE:
            return llava.load(model_dir, config, processor)
        case llavanext.MODEL_TYPE:
            return llavanext.load(model_dir, config, processor)
        case phi3v.MODEL_TYPE:
            return phi3v.load(model_dir, config, processor)
        case _:
            return None
