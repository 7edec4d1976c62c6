"""What the families share whose placeholder is one token of the vocabulary: the engine searches for that token."""

from collections.abc import Sequence

from mmrouter_lib.families.family import Codec
from mmrouter_lib.families.folder import ModelFolderError
from mmrouter_lib.families.layout import Expanded, PromptImage, expand_ids


class SinglePlaceholder:
    """Tokenise the text once, then replace the placeholder tokens one by one."""

    __slots__ = ()

    placeholder_id: int
    placeholder_text: str

    @property
    def fragile(self) -> bool:
        return False

    def check(self, codec: Codec) -> None:
        """Raise :class:`ModelFolderError` for a tokenizer that has the placeholder under another id."""
        found = codec.token_id(self.placeholder_text)
        if found != self.placeholder_id:
            raise ModelFolderError(
                f"the tokenizer has {self.placeholder_text!r} as {found}, config.json as {self.placeholder_id}"
            )

    def expand(self, codec: Codec, text: str, images: Sequence[PromptImage], *, add_special_tokens: bool) -> Expanded:
        """Return the expanded prompt, as :func:`expand_ids` has it."""
        ids = codec.encode(text, add_special_tokens=add_special_tokens)
        return expand_ids(ids, self.placeholder_id, images)
