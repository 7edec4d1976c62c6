"""Load the tokenizer of a model folder, with the tokens that only tokenizer_config.json has."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from mmrouter_lib.model_folder import ModelFolderError, find_json
from mmrouter_lib.prompt.segment_cache import SegmentCache
from mmrouter_lib.prompt.templates import TemplateError
from mmrouter_lib.tokenizer_code import TextLimits

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerCodec:
    """A model folder's tokenizer, as far as families need it.

    ``special_texts``: of the tokens that tokenizer_config.json names as special (``eos_token`` ..., additional ones).
    ``begin_id``: of ``bos_token``, ``None`` without one. ``limits``: a text beyond them is refused, because
    code cuts it before the tokenizer gets it.
    """

    tokenizer: Tokenizer
    segments: SegmentCache
    special_texts: tuple[str, ...]
    begin_id: int | None
    limits: TextLimits | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: dict[str, Any], limits: TextLimits | None = None) -> Self:
        """Return the codec of a tokenizer whose tokenizer_config.json is ``config``."""
        begin = special_tokens(config).get("bos_token")
        begin_id = None if begin is None else tokenizer.token_to_id(begin)
        return cls(tokenizer, SegmentCache(tokenizer, limits=limits), tuple(_special_texts(config)), begin_id, limits)

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

    Transformers 5.19 ignores ``add_bos_token`` and ``add_eos_token`` beside a tokenizer.json. Raises
    :class:`ModelFolderError` for a file that cannot be read, and what :func:`add_configured` raises.
    """
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        # The tokenizers library raises bare Exception for a missing and for a malformed file alike.
        raise ModelFolderError(f"{path}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    add_configured(tokenizer, folder, with_added_tokens(folder, config, tokenizer.get_added_tokens_decoder()))
    return tokenizer


def with_added_tokens(
    folder: Path, config: dict[str, Any], present: Mapping[int, AddedToken] = MappingProxyType({})
) -> dict[str, Any]:
    """Return a configuration with the tokens of added_tokens.json, where no newer form replaces that file.

    ``present``: id -> token of those that the tokenizer's own file describes, which comes before this one.
    """
    if "added_tokens_decoder" in config:
        return config
    numbers, special = find_json(folder, "added_tokens.json") or {}, set(_special_texts(config))
    tokens = {
        text: {"content": text, "special": text in special, "normalized": text not in special} for text in numbers
    }
    # A named token has the properties that it has there, whatever its own are.
    named = {name: tokens[text] for name in _NAMED if (text := _text(config.get(name))) in tokens}
    texts = {token.content for token in present.values()}
    missing = {text: number for text, number in numbers.items() if number not in present and text not in texts}
    added = {str(number): tokens[text] for text, number in missing.items()}
    return {**config, **named, "added_tokens_decoder": added}


def add_configured(tokenizer: Tokenizer, folder: Path, config: dict[str, Any]) -> None:
    """Add the tokens of ``config``, the tokenizer_config.json of ``folder``, to its tokenizer.

    As transformers 5.19 does: tokens of ``added_tokens_decoder`` that the tokenizer lacks or has with other properties
    in the order of their ids, then named and additional special tokens that are still unknown. Qwen2-VL's placeholder
    is such a token. Raises :class:`ModelFolderError` for a token that does not get its configured id.
    """
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))
    claimed = claimed_tokens(folder, config)
    added = tokenizer.get_added_tokens_decoder().values()
    present = {repr(token) for token in added}
    missing = [token for _, token in sorted(claimed.items()) if repr(token) not in present]
    vocabulary = {token.content for token in (*added, *missing)}
    missing += [token for token in _special(config) if token.content not in vocabulary]
    named = set(special_tokens(config).values())
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


def add_around(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """Put the tokens around a text that ``add_bos_token`` and ``add_eos_token`` ask for, and no others.

    As transformers 5.19 does of a tokenizer that it makes of other files than tokenizer.json.
    """
    texts = special_tokens(config)
    begin, end = (texts.get(f"{at}_token") if config.get(f"add_{at}_token") else None for at in ("bos", "eos"))
    around = [text for text in (begin, end) if text is not None]
    tokenizer.post_processor = TemplateProcessing(
        single=[*([begin] if begin else ()), "$A", *([end] if end else ())],
        special_tokens=[(text, tokenizer.token_to_id(text)) for text in dict.fromkeys(around)],
    )


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return name -> text of the special tokens that a chat template can use as variables (``eos_token`` ...).

    A model's own are in ``extra_special_tokens``, or under any name that ends with ``_token`` (``image_token``).
    """
    texts = {name: _text(value) for name, value in _named(config).items()}
    return {name: text for name, text in texts.items() if text is not None}


def _named(config: dict[str, Any]) -> dict[str, Any]:
    values = {name: config.get(name) for name in _NAMED}
    own = {name: value for name, value in config.items() if name.endswith("_token") and name not in values}
    values |= {name: value for name, value in own.items() if isinstance(value, str) or _is_added(value)}
    extra = config.get("extra_special_tokens")
    return values | extra if isinstance(extra, dict) else values


def claimed_tokens(folder: Path, config: dict[str, Any]) -> dict[int, AddedToken]:
    """Return id -> token of ``added_tokens_decoder``. Raises :class:`ModelFolderError` for another form of it."""
    claimed: dict[int, AddedToken] = {}
    try:
        for number, fields in (config.get("added_tokens_decoder") or {}).items():
            claimed[int(number)] = _token(fields, special=bool(fields.get("special")))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelFolderError(f"{folder / 'tokenizer_config.json'}: added_tokens_decoder: {error!r}") from error
    return claimed


def _special_texts(config: dict[str, Any]) -> list[str]:
    return [token.content for token in _special(config)]


def _special(config: dict[str, Any]) -> list[AddedToken]:
    """Return the named special tokens and then the listed ones, each text once, as the last one has it."""
    lists = [config.get(key) for key in ("additional_special_tokens", "extra_special_tokens")]
    listed = [value for values in lists if isinstance(values, list) for value in values]
    tokens: dict[str, AddedToken] = {}
    for value, is_named in (
        *((value, True) for value in _named(config).values()),
        *((value, False) for value in listed),
    ):
        if (text := _text(value)) is not None:
            fields = value if isinstance(value, dict) else {"content": text}
            tokens[text] = _token(fields, special=is_named or bool(fields.get("special", True)))
    return list(tokens.values())


def _token(fields: dict[str, Any], *, special: bool) -> AddedToken:
    flags = {name: bool(fields[name]) for name in ("single_word", "lstrip", "rstrip", "normalized") if name in fields}
    return AddedToken(fields["content"], special=special, **flags)


def _is_added(value: object) -> bool:
    return isinstance(value, dict) and value.get("__type") == "AddedToken"


def _text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
