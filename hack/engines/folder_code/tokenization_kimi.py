"""A tokenizer of the form that Kimi's folders have: the library tiktoken, with a pattern and special tokens of its own.

Names of the file, the class and its constants are those of the published folders, and so are the limits of the texts
that tiktoken gets. Tools reach the template as a text, too, which another file of the folder writes.
"""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers import PreTrainedTokenizer

from .tool_declaration_ts import encode_tools_to_typescript_style

SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]


class TikTokenTokenizer(PreTrainedTokenizer):
    vocab_files_names: ClassVar[dict[str, str]] = {"vocab_file": "tiktoken.model"}
    num_reserved_special_tokens = 256
    pat_str = "|".join(
        [
            r"[\p{Han}]+",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        ]
    )

    def __init__(self, vocab_file: str, added_tokens_decoder: dict[int, Any] | None = None, **others: Any) -> None:
        ranks = load_tiktoken_bpe(vocab_file)
        numbers = range(len(ranks), len(ranks) + self.num_reserved_special_tokens)
        named = {number: token.content for number, token in (added_tokens_decoder or {}).items()}
        special = {named.get(number, f"<|reserved_token_{number}|>"): number for number in numbers}
        name = Path(vocab_file).name
        self.model = tiktoken.Encoding(name, pat_str=self.pat_str, mergeable_ranks=ranks, special_tokens=special)
        self.shown = byte_texts()
        self.decoder = {
            number: "".join(map(self.shown.__getitem__, self.model.decode_single_token_bytes(number)))
            for number in range(self.model.n_vocab)
        }
        self.encoder = {text: number for number, text in self.decoder.items()}
        super().__init__(added_tokens_decoder=added_tokens_decoder, **others)

    def encode(self, text: str, allow_special_tokens: bool = True, **others: Any) -> list[int]:
        if others:
            return list(super().encode(text, **others))
        MAX_ENCODE_CHARS = 400_000  # noqa: N806 - the published name
        MAX_NO_WHITESPACES_CHARS = 25_000  # noqa: N806 - the published name
        allowed = {"allowed_special": "all"} if allow_special_tokens else {"disallowed_special": ()}
        parts = [text[at : at + MAX_ENCODE_CHARS] for at in range(0, len(text), MAX_ENCODE_CHARS)]
        pieces = (
            piece
            for part in parts
            for piece in self._split_whitespaces_or_nonwhitespaces(part, MAX_NO_WHITESPACES_CHARS)
        )
        return [number for piece in pieces for number in self.model.encode(piece, **allowed)]

    @staticmethod
    def _split_whitespaces_or_nonwhitespaces(text: str, most: int) -> Iterator[str]:
        """Cut a text where a row of blanks or of other characters has ``most`` of them."""
        start = at = 0
        for _, row in groupby(text, str.isspace):
            length = len(list(row))
            for cut in range(at + most, at + length, most):
                yield text[start:cut]
                start = cut
            at += length
        yield text[start:]

    @property
    def vocab_size(self) -> int:
        return int(self.model.n_vocab)

    def get_vocab(self) -> dict[str, int]:
        return self.encoder

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [self.decoder[number] for number in self.encode(text)]

    def _convert_token_to_id(self, token: str) -> int | None:
        return self.encoder.get(token)

    def _convert_id_to_token(self, index: int) -> str | None:
        return self.decoder.get(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        bytes_of = {text: byte for byte, text in self.shown.items()}
        return bytes(bytes_of[character] for character in "".join(tokens)).decode("utf-8", "replace")

    def apply_chat_template(
        self, conversation: Any, tools: list[dict[str, Any]] | None = None, thinking: bool = True, **others: Any
    ) -> Any:
        tools = deep_sort_dict(tools)
        if tools:
            try:
                others["tools_ts_str"] = encode_tools_to_typescript_style(tools)
            except Exception as error:  # as published: tools without a text reach the template alone
                print(f"tools without a text: {error}")
        return super().apply_chat_template(conversation, tools=tools, thinking=thinking, **others)


def byte_texts() -> dict[int, str]:
    hidden = [byte for byte in range(256) if byte not in SHOWN]
    return {byte: chr(byte) for byte in SHOWN} | {byte: chr(256 + at) for at, byte in enumerate(hidden)}


def deep_sort_dict(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: deep_sort_dict(value[name]) for name in sorted(value)}
    return [deep_sort_dict(each) for each in value] if isinstance(value, list) else value
