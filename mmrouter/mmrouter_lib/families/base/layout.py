"""What families share whose images are more than a run of placeholders: rows or tiles, with tokens between them."""

from typing import TYPE_CHECKING

from mmrouter_lib.families.base.family import ImageSizeError, NotModelledError, PromptImage
from mmrouter_lib.model_folder import ModelFolderError

if TYPE_CHECKING:
    from mmrouter_lib.prompt.tokenizer import TokenizerCodec


def special_id(codec: "TokenizerCodec", text: str) -> int:
    """Return the id of a token that stands around or in images. Raises :class:`ModelFolderError` without it."""
    token = codec.token_id(text)
    if token is None:
        raise ModelFolderError(f"the tokenizer has no token {text!r}, which images need")
    return token


def size_of(image: PromptImage) -> tuple[int, int]:
    """Return an image's (width, height) in pixels. Raises :class:`NotModelledError` where it is not known."""
    if image.size is None:
        raise NotModelledError("the tokens of an image of this family depend on its size, which is not known")
    return image.size


def check_size(width: int, height: int) -> None:
    """Raise :class:`ImageSizeError` for an image without pixels."""
    if width < 1 or height < 1:
        raise ImageSizeError(f"an image of {width}x{height} pixels is empty")
