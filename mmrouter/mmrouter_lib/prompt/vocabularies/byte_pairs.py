"""Build the tokenizer of a folder that has ``vocab.json`` and ``merges.txt``, and no tokenizer.json.

The parts around the vocabulary are those of the class ``Qwen2Tokenizer`` of transformers 5.19, which such folders
declare (InternVL 3 and 3.5, older ones of Qwen). Other classes have other parts and are not modelled.
"""

from pathlib import Path
from typing import Any, Final

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from mmrouter_lib.model_folder import BYTE_PAIRS, BYTE_PAIRS_CLASS, ModelFolderError
from mmrouter_lib.prompt.tokenizer import add_around, add_configured, with_added_tokens
from mmrouter_lib.prompt.tokenizer_class import TokenizerClassError

_END: Final = "<|endoftext|>"
_NAMED: Final = {"unk_token": _END, "eos_token": _END, "pad_token": _END}
_WORD: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""What a word is, as published with Qwen2."""


def load_byte_pairs(folder: Path, config: dict[str, Any], name: str) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer of a folder, and ``config`` (its tokenizer_config.json) with the named tokens that the class
    has by default, and those of added_tokens.json.

    ``name``: the class that transformers chooses. Raises :class:`~mmrouter_lib.model_folder.ModelFolderError`, and
    :class:`~mmrouter_lib.prompt.tokenizer_class.TokenizerClassError` for a class other than ``BYTE_PAIRS_CLASS`` and
    for one that puts a blank before a text.
    """
    if name != BYTE_PAIRS_CLASS or config.get("add_prefix_space") not in (None, False):
        raise TokenizerClassError(name)
    try:
        model = models.BPE.from_file(*(str(folder / file) for file in BYTE_PAIRS))
    except Exception as error:
        # The tokenizers library raises bare Exception for files that cannot be read or do not fit together.
        raise ModelFolderError(f"{folder / BYTE_PAIRS[0]}: {error}") from error
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORD), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    config = with_added_tokens(folder, {**_NAMED, **config})
    add_configured(tokenizer, folder, config)
    add_around(tokenizer, config)
    return tokenizer, config
