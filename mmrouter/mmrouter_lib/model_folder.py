"""Read the metadata files of a model folder."""

import json
from pathlib import Path
from typing import Any

from blake3 import blake3


class ModelFolderError(ValueError):
    """A model folder whose metadata cannot be used; the message names the file."""


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in ``folder/name``. Raises :class:`ModelFolderError` when there is none."""
    value = find_json(folder, name)
    if value is None:
        raise ModelFolderError(f"{folder / name}: no such file")
    return value


def find_json(folder: Path, name: str) -> dict[str, Any] | None:
    """Return the JSON object in ``folder/name``, ``None`` without that file. Raises :class:`ModelFolderError`."""
    path = folder / name
    text = find_text(folder, name)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ModelFolderError(f"{path}: no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path}: a JSON object is expected, not {type(value).__name__}")
    return value


def find_text(folder: Path, name: str) -> str | None:
    """Return the text (UTF-8) of ``folder/name``, ``None`` without that file. Raises :class:`ModelFolderError`."""
    path = folder / name
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFolderError(f"{path}: {error}") from error


def whole_number(file: str, values: dict[str, Any], key: str, default: int | None = None, *, least: int = 1) -> int:
    """Return ``values[key]``, a whole number of at least ``least``. Raises :class:`ModelFolderError`."""
    value = default if values.get(key) is None else values[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ModelFolderError(f"{file}: {key} must be a whole number of at least {least}, not {value!r}")
    return value


def vision_config(file: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the vision tower in ``config.json``. Raises :class:`ModelFolderError` without them."""
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        raise ModelFolderError(f"{file}: vision_config is missing")
    return vision


def image_processor(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the image processor's settings: processor_config.json comes before a file of their own."""
    nested = (find_json(folder, "processor_config.json") or {}).get("image_processor")
    if isinstance(nested, dict):
        return str(folder / "processor_config.json"), nested
    return str(folder / "preprocessor_config.json"), read_json(folder, "preprocessor_config.json")


def has_tokenizer_code(described: dict[str, Any]) -> bool:
    """Whether a tokenizer_config.json names a class in code of the folder, in its older or present form."""
    named = described.get("auto_map")
    return isinstance(named, list) or (isinstance(named, dict) and named.get("AutoTokenizer") is not None)


def has_byte_pairs(folder: Path) -> bool:
    """Whether a folder has a vocabulary of byte pairs and no tokenizer.json, which comes before its files."""
    return not (folder / "tokenizer.json").is_file() and all((folder / file).is_file() for file in BYTE_PAIRS)


def has_lossless_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer is tokenizer.json, or byte pairs of Qwen's class, and its ids decode to the text itself."""
    described = find_json(folder, "tokenizer_config.json") or {}
    if has_tokenizer_code(described) or described.get("clean_up_tokenization_spaces"):
        return False
    qwen = str(described.get("tokenizer_class")).removesuffix("Fast") == BYTE_PAIRS_CLASS
    in_pairs = has_byte_pairs(folder) and qwen and not described.get("add_prefix_space")
    return (folder / "tokenizer.json").is_file() or in_pairs


def added_token_id(folder: Path, text: str) -> int | None:
    """Return the id of a token that the tokenizer has beside its vocabulary, ``None`` without it."""
    added = (find_json(folder, "tokenizer.json") or {}).get("added_tokens") or ()
    for number, fields in ((each.get("id"), each) for each in added):
        if fields.get("content") == text:
            return int(number)
    decoder = (find_json(folder, "tokenizer_config.json") or {}).get("added_tokens_decoder") or {}
    return next((int(number) for number, fields in decoder.items() if fields.get("content") == text), None)


MISTRAL_WEIGHTS = "consolidated*.safetensors"
"""Weights in Mistral's format. Beside them, and only there, vLLM prefers Mistral's tokenizer to tokenizer.json."""

TIKTOKEN_VOCABULARY = "tiktoken.model"
TOKENIZER_CODE, TOOL_CODE = "tokenization_kimi.py", "tool_declaration_ts.py"
"""Code of a folder of which constants are read (:mod:`mmrouter_lib.tokenizer_code`); none is run."""

BYTE_PAIRS, BYTE_PAIRS_CLASS = ("vocab.json", "merges.txt"), "Qwen2Tokenizer"
"""Files of a vocabulary of byte pairs, and the class whose parts around it are modelled."""

NAMES = (
    *("tokenizer.json", "tokenizer.model", "tekken.json", TIKTOKEN_VOCABULARY, TOKENIZER_CODE, TOOL_CODE),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", *BYTE_PAIRS),
    *("config.json", "params.json", "preprocessor_config.json"),
)
PATTERNS = ("chat_template*",)  # files that prompts depend on: token ids, templates, image geometry


def digests(folder: Path) -> dict[str, str]:
    """Return name -> BLAKE3 (lower hex) of each metadata file that the folder has. Raises ``OSError``."""
    if not folder.is_dir():
        return {}
    files = {folder / name for name in NAMES} | {path for pattern in PATTERNS for path in folder.glob(pattern)}
    return {path.name: blake3(path.read_bytes()).hexdigest() for path in sorted(files) if path.is_file()}


def hub_folder(cache: Path, model: str, revision: str) -> tuple[Path, str] | None:
    """Return (snapshot folder, commit) of a hub download, ``None`` while there is none.

    A hub cache holds ``models--ORG--NAME/refs/REVISION`` with a commit and ``snapshots/COMMIT``; a revision may be a
    commit itself.
    """
    home = cache / f"models--{model.replace('/', '--')}"
    reference = home / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    folder = home / "snapshots" / commit
    return (folder, commit) if commit and folder.is_dir() else None
