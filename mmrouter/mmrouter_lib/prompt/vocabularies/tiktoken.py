"""Build the tokenizer of a folder that has ``tiktoken.model`` and code of its own (:mod:`mmrouter_lib.tokenizer_code`).

The library ``tiktoken`` merges the two neighbours in a word whose joint bytes have the lowest rank in the vocabulary,
unless the word is in it as a whole. The library ``tokenizers`` merges by a list of pairs, so the list has every pair
whose joint bytes are in the vocabulary, by their rank. Pairs of the same joint bytes have ranks of their own in the
list; no drawn text has other tokens for it. ``tests/conformance/vllm/test_kimi.py`` compares both.
"""

import base64
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from mmrouter_lib.model_folder import TIKTOKEN_VOCABULARY, ModelFolderError
from mmrouter_lib.prompt.tokenizer import add_configured, claimed_tokens
from mmrouter_lib.tokenizer_code import TokenizerCode

_SHOWN: Final = (*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""Bytes that stand for themselves in a vocabulary of ``tokenizers``; the others are characters from 256 on."""


def load_tiktoken(folder: Path, config: dict[str, Any], code: TokenizerCode) -> Tokenizer:
    """Return the tokenizer. ``config``: tokenizer_config.json. Raises :class:`ModelFolderError`."""
    path = folder / TIKTOKEN_VOCABULARY
    ranks = _read(path)
    shown = byte_texts()
    texts = {token: "".join(map(shown.__getitem__, token)) for token in ranks}
    merges = [(texts[left], texts[right]) for token in ranks for left, right in _pairs(token, ranks)]
    model = models.BPE(vocab={text: ranks[token] for token, text in texts.items()}, merges=merges, ignore_merges=True)
    tokenizer = Tokenizer(model)
    try:
        split = pre_tokenizers.Split(Regex(code.pattern), "isolated")
    except Exception as error:
        # The tokenizers library raises bare Exception for a pattern that it cannot read.
        raise ModelFolderError(f"{path}: the pattern of words: {error}") from error
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    claimed, first = claimed_tokens(folder, config), len(ranks)
    tokenizer.add_tokens(
        [
            # Normalized, so that no text is cut at them: transformers does not know them, and cuts at the others alone.
            claimed.get(number) or AddedToken(f"<|reserved_token_{number}|>", special=True, normalized=True)
            for number in range(first, first + code.reserved)
        ]
    )
    add_configured(tokenizer, folder, config)
    return tokenizer


def byte_texts() -> dict[int, str]:
    """Return byte -> the character that stands for it in a vocabulary of ``tokenizers`` (``ByteLevel``)."""
    hidden = (byte for byte in range(256) if byte not in _SHOWN)
    return {byte: chr(byte) for byte in _SHOWN} | {byte: chr(256 + at) for at, byte in enumerate(hidden)}


def _read(path: Path) -> dict[bytes, int]:
    """Return token -> rank in the order of ranks, which are the ids. Raises :class:`ModelFolderError`."""
    ranks: dict[bytes, int] = {}
    try:
        for line in path.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{path}: {error}") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ModelFolderError(f"{path}: ranks must be the numbers from 0, each once")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise ModelFolderError(f"{path}: a byte has no token")
    return dict(sorted(ranks.items(), key=lambda pair: pair[1]))


def _pairs(token: bytes, ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the pairs of tokens that are a token together."""
    for at in range(1, len(token)):
        if token[:at] in ranks and token[at:] in ranks:
            yield token[:at], token[at:]
