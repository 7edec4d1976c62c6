"""Model families: image size -> number and layout of placeholder tokens, exactly as the engine's processor has it.

Every module of this package registers the families it implements
(:func:`~mmrouter_lib.families.base.family.register`); adding a family adds one module.
"""

import importlib
import pkgutil

from mmrouter_lib.families.base.family import Expanded as Expanded
from mmrouter_lib.families.base.family import Family as Family
from mmrouter_lib.families.base.family import ImageSizeError as ImageSizeError
from mmrouter_lib.families.base.family import NotModelledError as NotModelledError
from mmrouter_lib.families.base.family import PlaceholderError as PlaceholderError
from mmrouter_lib.families.base.family import ProcessorLimits as ProcessorLimits
from mmrouter_lib.families.base.family import PromptImage as PromptImage
from mmrouter_lib.families.base.family import expand_ids as expand_ids
from mmrouter_lib.families.base.family import family_name as family_name
from mmrouter_lib.families.base.family import family_names as family_names
from mmrouter_lib.families.base.family import is_proved as is_proved
from mmrouter_lib.families.base.family import load_family as load_family
from mmrouter_lib.families.base.text import TextOnly as TextOnly
from mmrouter_lib.model_folder import ModelFolderError as ModelFolderError

for _module in pkgutil.iter_modules(__path__):
    if not _module.ispkg:
        importlib.import_module(f"{__name__}.{_module.name}")
