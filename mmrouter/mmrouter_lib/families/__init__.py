"""Model families: image size -> number and layout of placeholder tokens, exactly as the engine's processor has it.

Every module of this package registers the families it implements
(:func:`~mmrouter_lib.families.base.family.register`); adding a family adds one module.
"""

import importlib
import pkgutil

from mmrouter_lib.families.base.family import (
    Codec,
    Expanded,
    Family,
    ImageSizeError,
    PlaceholderError,
    ProcessorLimits,
    PromptImage,
    expand_ids,
    is_proved,
    load_family,
)
from mmrouter_lib.model_folder import ModelFolderError

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
    "is_proved",
    "load_family",
]

for _module in pkgutil.iter_modules(__path__):
    if not _module.ispkg:
        importlib.import_module(f"{__name__}.{_module.name}")
