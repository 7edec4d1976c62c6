"""Build the tokenizer of a folder that has ``tokenizer.model``, a model of SentencePiece, and no tokenizer.json.

Transformers 5.19 makes a tokenizer of the ``tokenizers`` library of it, and so does this module. Its ids are not those
of SentencePiece: every split of a piece into two pieces is a merge, in the order of the pieces, whatever their scores
are, and a text gets no blank at its beginning unless the class puts it there. ``tests/conformance`` compares both.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from tokenizers import Tokenizer, models, normalizers

from mmrouter_lib.model_folder import ModelFolderError, find_json
from mmrouter_lib.prompt.tokenizer import add_around, add_configured, with_added_tokens
from mmrouter_lib.prompt.tokenizer_class import AS_FILE, TokenizerClassError

FILE: Final = "tokenizer.model"
_LLAMA: Final[Mapping[str, Any]] = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_UNIGRAM, _CONTROL, _TYPED = 1, 3, 4  # of the file: a kind of model, and two of pieces


class NoSentencePieceError(ValueError):
    """``tokenizer.model`` holds another format, such as tiktoken's."""


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """What a tokenizer needs of ``tokenizer.model``. ``pieces``: text and kind of each, in the order of their ids.

    The numbers of its fields are those of SentencePiece's ``sentencepiece_model.proto``.
    """

    pieces: list[tuple[str, int]]
    trainer: Mapping[int, Any]
    charsmap: bytes

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Raises :class:`NoSentencePieceError`."""
        pieces: list[tuple[str, int]] = []
        trainer: dict[int, Any] = {}
        charsmap = b""
        try:
            for number, content in _fields(data):
                if number == 1:
                    piece = dict(_fields(content))
                    pieces.append((str(piece.get(1, b""), "utf-8"), piece.get(3, 1)))
                elif number == 2:
                    trainer |= dict(_fields(content))
                elif number == 3:
                    charsmap = dict(_fields(content)).get(2, b"")
        except (IndexError, TypeError, UnicodeDecodeError, ValueError) as error:
            raise NoSentencePieceError(f"no model of SentencePiece: {error!r}") from error
        if not pieces:
            raise NoSentencePieceError("no model of SentencePiece: it has no pieces")
        return cls(pieces, trainer, charsmap)

    def named(self) -> dict[str, str]:
        """Return the special tokens that the model itself names."""
        places = {"unk_token": (40, 0, 45, "<unk>"), "bos_token": (41, 1, 46, "<s>"), "eos_token": (42, 2, 47, "</s>")}
        return {
            name: self._text(text, default) or default
            for name, (number, id_, text, default) in places.items()
            if self.trainer.get(number, id_) < 1 << 31  # a negative number is a large one here
        }

    def added(self) -> list[dict[str, Any]]:
        """Return the pieces that are tokens of their own wherever a text has them."""
        kept = [(text, kind) for text, kind in self.pieces if kind in (_CONTROL, _TYPED)]
        return [{"content": text, "normalized": False, "special": kind == _CONTROL} for text, kind in kept]

    @property
    def is_unigram(self) -> bool:
        return bool(self.trainer.get(3, _UNIGRAM) == _UNIGRAM)

    def tokenizer(self, renamed: Mapping[int, str]) -> Tokenizer:
        """Return the bare tokenizer. ``renamed``: id -> another text for its piece, unless a piece has that text."""
        vocabulary = {text: number for number, (text, _) in enumerate(self.pieces)}
        merges = _merges(vocabulary)
        texts = {number: text for text, number in vocabulary.items()}
        for number, text in renamed.items():
            if number in texts and text not in vocabulary:
                vocabulary[text] = vocabulary.pop(texts[number])
        unknown, fallback = self._text(45, "<unk>"), bool(self.trainer.get(35, False))
        made = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=fallback))
        before = [normalizers.Precompiled(self.charsmap)] if self.charsmap else []
        made.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
        return made

    def _text(self, number: int, default: str) -> str:
        value = self.trainer.get(number)
        return default if value is None else str(value, "utf-8")


def load_sentencepiece(folder: Path, config: dict[str, Any], name: str) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer of ``folder/tokenizer.model``, and ``config`` with what is there by default.

    ``config``: tokenizer_config.json, with the tokens that older folders have in files of their own. ``name``: the
    class that transformers chooses. The tokenizer is the one of ``AS_FILE``, to be used by
    :func:`~mmrouter_lib.prompt.tokenizer_class.as_class`.

    Raises :class:`NoSentencePieceError`, :class:`~mmrouter_lib.model_folder.ModelFolderError`, and
    :class:`~mmrouter_lib.prompt.tokenizer_class.TokenizerClassError` for another class than those two, and for a model
    of the kind unigram that is no ``LlamaTokenizer``: the engine copies such a tokenizer through texts, which changes
    its scores a little.
    """
    if name not in (AS_FILE, "LlamaTokenizer"):
        raise TokenizerClassError(name)
    try:
        model = SentencePieceModel.read((folder / FILE).read_bytes())
    except OSError as error:
        raise ModelFolderError(f"{folder / FILE}: {error}") from error
    if name == AS_FILE and model.is_unigram:
        raise TokenizerClassError("unigram")
    config = {**(model.named() if name == AS_FILE else _LLAMA), **with_added_tokens(folder, config)}
    config = _with_listed(folder, config, model)
    claimed = config.get("added_tokens_decoder") or {}
    renamed = {int(number): fields["content"] for number, fields in claimed.items()} if name == AS_FILE else {}
    try:
        tokenizer = model.tokenizer(renamed)
    except Exception as error:
        # The tokenizers library raises bare Exception for a vocabulary that does not fit together.
        raise ModelFolderError(f"{folder / FILE}: {error}") from error
    add_configured(tokenizer, folder, config)
    add_around(tokenizer, config)
    return tokenizer, config


def _with_listed(folder: Path, config: dict[str, Any], model: SentencePieceModel) -> dict[str, Any]:
    """Return a configuration whose listed special tokens are those of the model, unless tokenizer_config.json has some.

    Those that special_tokens_map.json alone lists are ignored.
    """
    own = find_json(folder, "tokenizer_config.json") or {}
    listed = {name: own[name] for name in ("additional_special_tokens", "extra_special_tokens") if name in own}
    if any(not isinstance(value, dict) for value in listed.values()):
        return config
    return {**config, "additional_special_tokens": model.added()}


def _merges(vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    return [
        (piece[:cut], piece[cut:])
        for piece in sorted(vocabulary, key=vocabulary.__getitem__)
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each field of a protobuf message: an integer, or the bytes of anything else."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        value: int | bytes
        if tag & 7 == 0:
            value, at = _varint(data, at)
        else:
            size = {1: 8, 5: 4}.get(tag & 7)
            if tag & 7 == 2:
                size, at = _varint(data, at)
            if size is None or at + size > len(data):
                raise ValueError(f"field {tag >> 3} at byte {at}")
            value, at = data[at : at + size], at + size
        yield tag >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError(f"a number at byte {at} is too long")
