"""The registry of model families: ``model_type`` -> how a folder is loaded, and the engines that it is proved on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from mmrouter_lib.families.base.family import Family, ProcessorLimits
from mmrouter_lib.model_folder import read_json


class _Entry(NamedTuple):
    load: Callable[[Path, dict[str, Any], ProcessorLimits | None], Family | None]
    proved_on: tuple[str, ...]


_entries: dict[str, _Entry] = {}


def register(
    model_type: str,
    load: Callable[[Path, dict[str, Any], ProcessorLimits | None], Family | None],
    *,
    proved_on: tuple[str, ...],
) -> None:
    """Add a family under the ``model_type`` of its config.json.

    ``load`` gets the folder, its config.json and the resource's processor options, and returns ``None`` for a folder
    with a part that is not modelled. ``proved_on``: engine types whose prompts are proved to equal the family's, block
    by block (docs/conformance.md).
    """
    if model_type in _entries:
        raise ValueError(f"model family {model_type} is registered twice")
    _entries[model_type] = _Entry(load, proved_on)


def load_family(model_dir: Path, processor: ProcessorLimits | None) -> Family | None:
    """Return the family of a model folder, ``None`` for a ``model_type`` or vision tower that is not modelled.

    ``processor`` holds the resource's processor options, which override the folder's. Raises
    :class:`~mmrouter_lib.model_folder.ModelFolderError` for a folder whose config.json cannot be read, or of a
    registered family with a geometry that cannot be used.
    """
    config = read_json(model_dir, "config.json")
    entry = _entries.get(str(config.get("model_type")))
    return None if entry is None else entry.load(model_dir, config, processor)


def is_proved(model_type: str, engine_type: str) -> bool:
    """Whether the engine's prompts are proved to equal the family's, block by block (docs/conformance.md)."""
    entry = _entries.get(model_type)
    return entry is not None and engine_type in entry.proved_on
