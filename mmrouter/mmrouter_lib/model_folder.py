"""Read the metadata files of a model folder."""

import json
from pathlib import Path
from typing import Any


class ModelFolderError(ValueError):
    """A model folder whose metadata cannot be used; the message names the file."""


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in ``folder/name``. Raises :class:`ModelFolderError` when there is none."""
    value = find_json(folder, name)
    if value is None:
        raise ModelFolderError(f"{folder / name}: no such file")
    return value


def find_json(folder: Path, name: str) -> dict[str, Any] | None:
    """Return the JSON object in ``folder/name``, ``None`` without that file.

    Raises :class:`ModelFolderError` for a file that is unreadable or no JSON object.
    """
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
    """Return the text of ``folder/name``, ``None`` without that file.

    Raises :class:`ModelFolderError` for a file that cannot be read as UTF-8.
    """
    path = folder / name
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFolderError(f"{path}: {error}") from error


def positive_int(file: str, values: dict[str, Any], key: str, default: int | None = None) -> int:
    """Return ``values[key]``, a whole number of at least 1. Raises :class:`ModelFolderError` for anything else."""
    return _int_from(1, file, key, default if values.get(key) is None else values[key])


def non_negative_int(file: str, values: dict[str, Any], key: str) -> int:
    """Return ``values[key]``, a whole number of at least 0. Raises :class:`ModelFolderError` for anything else."""
    return _int_from(0, file, key, values.get(key))


def _int_from(least: int, file: str, key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ModelFolderError(f"{file}: {key} must be a whole number of at least {least}, not {value!r}")
    return value


def image_processor(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the image processor's settings: processor_config.json comes before a file of their own."""
    nested = (find_json(folder, "processor_config.json") or {}).get("image_processor")
    if isinstance(nested, dict):
        return str(folder / "processor_config.json"), nested
    return str(folder / "preprocessor_config.json"), read_json(folder, "preprocessor_config.json")
