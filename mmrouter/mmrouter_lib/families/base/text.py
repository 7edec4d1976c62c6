"""The family of a model whose texts are predicted and whose images, if it takes any, are not."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from mmrouter_lib.families.base.family import Family

if TYPE_CHECKING:
    from mmrouter_lib.prompt.tokenizer import TokenizerCodec


@dataclass(frozen=True, slots=True)
class TextOnly(Family):
    """A model folder of which only tokenizer and chat template are read. ``name``: its ``model_type``."""

    name: str
    placeholder_id: int = -1  # no token
    placeholder_text: str = ""
    media_text: ClassVar[Mapping[str, str]] = MappingProxyType({})
    places_images: ClassVar[bool] = False

    @property
    def may_have_states(self) -> bool:
        return True  # config.json's layers are not read

    def count(self, width: int, height: int) -> int:
        """Return 0: no image has a place in a predicted prompt."""
        return 0

    def check(self, codec: "TokenizerCodec") -> None:
        """There is no placeholder to check."""
