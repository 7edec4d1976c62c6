"""Load the tokenizer of a model folder, with the tokens that only tokenizer_config.json has."""

from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tokenizers import AddedToken, Tokenizer

from mmrouter_lib.model_folder import ModelFolderError
from mmrouter_lib.prompt.segment_cache import SegmentCache
from mmrouter_lib.prompt.templates import TemplateError

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerCodec:
    """A model folder's tokenizer, as far as families need it.

    ``special_texts``: of the tokens that tokenizer_config.json names as special (``eos_token`` ..., additional ones).
    ``begin_id``: of ``bos_token``, ``None`` without one.
    """

    tokenizer: Tokenizer
    segments: SegmentCache
    special_texts: tuple[str, ...]
    begin_id: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: dict[str, Any]) -> Self:
        """Return the codec of a tokenizer whose tokenizer_config.json is ``config``."""
        begin = special_tokens(config).get("bos_token")
        begin_id = None if begin is None else tokenizer.token_to_id(begin)
        return cls(tokenizer, SegmentCache(tokenizer), tuple(_special_texts(config)), begin_id)

    def encode(self, text: str, *, add_special_tokens: bool) -> "array[int]":
        """Return the token ids (u32) of a text. Raises :class:`TemplateError` for text that is not Unicode."""
        try:
            return self.segments(text, add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise TemplateError("the prompt holds half of a surrogate pair, which is no character") from error

    def decode(self, ids: "array[int]") -> str:
        """Return the text of token ids, special tokens included."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def token_id(self, text: str) -> int | None:
        """Return the id of a text that is one token of the vocabulary, ``None`` otherwise."""
        return self.tokenizer.token_to_id(text)


def load_tokenizer(folder: Path, config: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer of ``folder/tokenizer.json`` completed by ``config`` (its tokenizer_config.json).

    As transformers 5.19 does: tokens of ``added_tokens_decoder`` that the file lacks or has with other properties are
    added in the order of their ids, then named and additional special tokens that are still unknown. Qwen2-VL's
    placeholder is such a token. It ignores ``add_bos_token`` and ``add_eos_token`` beside a tokenizer.json.

    Raises :class:`ModelFolderError` for a file that cannot be read or a token that does not get its configured id.
    """
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        # The tokenizers library raises bare Exception for a missing and for a malformed file alike.
        raise ModelFolderError(f"{path}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))
    claimed = _claimed_tokens(folder, config)
    added = tokenizer.get_added_tokens_decoder().values()
    present = {repr(token) for token in added}
    missing = [token for _, token in sorted(claimed.items()) if repr(token) not in present]
    vocabulary = {token.content for token in (*added, *missing)}
    missing += [AddedToken(text, special=True) for text in _special_texts(config) if text not in vocabulary]
    named = {_text(config.get(name)) for name in _NAMED}
    for token in missing:
        token.special = token.special or token.content in named
    if missing:
        tokenizer.add_tokens(missing)
    for number, token in claimed.items():
        if tokenizer.token_to_id(token.content) != number:
            raise ModelFolderError(
                f"{folder / 'tokenizer_config.json'}: {token.content!r} is given the id {number}, "
                f"but the tokenizer has it as {tokenizer.token_to_id(token.content)}"
            )
    return tokenizer


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return name -> text of the special tokens that a chat template can use as variables (``eos_token`` ...).

    A model's own are in ``extra_special_tokens``, or under any name that ends with ``_token`` (``image_token``).
    """
    texts = {name: _text(config.get(name)) for name in _NAMED}
    own = {name: value for name, value in config.items() if name.endswith("_token") and name not in texts}
    texts |= {name: _text(value) for name, value in own.items() if isinstance(value, str) or _is_added(value)}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        texts |= {name: _text(value) for name, value in extra.items()}
    return {name: text for name, text in texts.items() if text is not None}


def _claimed_tokens(folder: Path, config: dict[str, Any]) -> dict[int, AddedToken]:
    claimed: dict[int, AddedToken] = {}
    try:
        for number, fields in (config.get("added_tokens_decoder") or {}).items():
            flags = {k: bool(v) for k, v in fields.items() if k in ("single_word", "lstrip", "rstrip", "normalized")}
            claimed[int(number)] = AddedToken(fields["content"], special=bool(fields.get("special")), **flags)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelFolderError(f"{folder / 'tokenizer_config.json'}: added_tokens_decoder: {error!r}") from error
    return claimed


def _special_texts(config: dict[str, Any]) -> list[str]:
    listed = [config.get(key) for key in ("additional_special_tokens", "extra_special_tokens")]
    texts = [_text(value) for values in listed if isinstance(values, list) for value in values]
    return list(dict.fromkeys([*special_tokens(config).values(), *(text for text in texts if text is not None)]))


def _is_added(value: object) -> bool:
    return isinstance(value, dict) and value.get("__type") == "AddedToken"


def _text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
