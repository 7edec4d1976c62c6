"""The gateway's file: aliases of models and weighted splits, read again when it changes.

A file that cannot be used leaves the last good one in place.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

log = logging.getLogger("mmrouter.gateway")

CHECK_SECONDS: Final = 1.0
MAX_BYTES: Final = 1 << 20  # as much as a ConfigMap holds
MAX_NAMES: Final = 1024
MAX_TARGETS: Final = 32


class ConfigError(ValueError):
    """The file cannot be used; the message names the field."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Target(_Strict):
    """A deployment that gets a share of an alias' conversations."""

    deployment: Annotated[str, Field(min_length=1, max_length=63)]
    weight: Annotated[int, Field(ge=0, le=1_000_000)] = 1
    """Share of the conversations, relative to the other targets'; 0: none."""
    model: Annotated[str, Field(max_length=256)] = ""
    """Name of the model at the deployment, such as a LoRA adapter's; empty: its served name."""


class _Alias(_Strict):
    to: Annotated[list[Target], Field(min_length=1, max_length=MAX_TARGETS)]

    @field_validator("to")
    @classmethod
    def _shares(cls, targets: list[Target]) -> list[Target]:
        if not any(target.weight for target in targets):
            raise ValueError("at least one weight must be above 0")
        names = [target.deployment for target in targets]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"the deployment {twice} stands in it twice")
        return targets


class _File(_Strict):
    models: Annotated[dict[Annotated[str, Field(min_length=1, max_length=256)], _Alias], Field(max_length=MAX_NAMES)]


Aliases = Mapping[str, list[Target]]
Stamp = tuple[int, int, int]


def parse(raw: bytes) -> Aliases:
    """Return name -> targets of a YAML or JSON text, none of an empty one. Raises :class:`ConfigError`."""
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"it is larger than {MAX_BYTES} bytes")
    try:
        content: Any = yaml.safe_load(raw)
        if content is None:
            return {}
        file = _File.model_validate_json(json.dumps(content))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"{_path(first['loc'])}: {first['msg'].removeprefix('Value error, ')}") from error
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"it cannot be read: {error}") from error
    return {name: alias.to for name, alias in file.models.items()}


def load(path: Path) -> Aliases:
    """Return the aliases of a file. Raises :class:`ConfigError`."""
    try:
        with path.open("rb") as file:
            return parse(file.read(MAX_BYTES + 1))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


async def follow(
    path: Path, update: Callable[[Aliases], None], refused: Callable[[bool], None], last: Stamp | None
) -> None:
    """Call ``update`` after every change of the file, and ``refused`` with whether the present file cannot be used.

    ``last``: the stamp of the file before the aliases in use were read.
    """
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        now = stamp(path)
        if now == last:
            continue
        last = now
        try:
            aliases = await asyncio.to_thread(load, path)
        except ConfigError as error:
            log.error("the last good configuration stays in use: %s", error)
            refused(True)
            continue
        refused(False)
        log.info("%s: %d aliases are in use", path, len(aliases))
        update(aliases)


def stamp(path: Path) -> Stamp | None:
    """Return what differs after a change of a file; ``None`` without one.

    A mounted ConfigMap changes by a link, and its file has another inode then.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


def _path(place: tuple[int | str, ...]) -> str:
    path = ""
    for step in place:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path or "the file"
