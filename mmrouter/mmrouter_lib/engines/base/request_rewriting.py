"""Rewrite chat requests for an engine: remove fields that clients may not set, and replace images."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class ImageRewrite:
    """The new content of ``messages[message].content[part]``: bytes as a ``data:`` URI, identity as text."""

    message: int
    part: int
    url: str
    uuid: str


@dataclass(slots=True)
class Rewritten:
    """The body for the engine, and the names of the fields that were removed (a bounded set, fit for a label)."""

    body: dict[str, Any]
    removed: tuple[str, ...]


Removed: TypeAlias = dict[str, None]
"""Names of removed fields, in order."""
PartRewriter: TypeAlias = Callable[[dict[str, Any], ImageRewrite | None, Removed], dict[str, Any]]
"""Returns a content part for the engine, with the image that belongs there; adds what it removes."""


def rewrite_messages(
    body: Mapping[str, Any],
    images: Sequence[ImageRewrite],
    refused: Iterable[str],
    rewrite_part: PartRewriter,
    *,
    model: str,
    cache_salt: str | None,
) -> tuple[dict[str, Any], Removed]:
    """Return a new body, which shares unchanged values with ``body``, and the names of removed fields.

    Raises ``ValueError`` when an image names a part that does not exist.
    """
    new = dict(body)
    removed: Removed = dict.fromkeys(name for name in refused if new.pop(name, None) is not None)
    new["model"] = model
    if cache_salt is not None:
        new["cache_salt"] = cache_salt
    by_place = {(image.message, image.part): image for image in images}

    def rewritten(number: int, message: Any) -> Any:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            return message
        parts = []
        for place, part in enumerate(content):
            image = by_place.pop((number, place), None)
            if isinstance(part, dict):
                part = rewrite_part(part, image, removed)  # noqa: PLW2901
            elif image is not None:
                raise ValueError(f"messages[{number}].content[{place}] is not an object")
            parts.append(part)
        return {**message, "content": parts}

    messages = new.get("messages")
    if isinstance(messages, list):
        new["messages"] = [rewritten(number, message) for number, message in enumerate(messages)]
    if by_place:
        message, part = next(iter(by_place))
        raise ValueError(f"messages[{message}].content[{part}] does not exist")
    return new, removed


def without(value: dict[str, Any], names: Sequence[str], prefix: str, removed: Removed) -> dict[str, Any]:
    """Return ``value`` without some fields; ``prefix`` stands before their names in ``removed``."""
    present = [name for name in names if name in value]
    if not present:
        return value
    removed.update((prefix + name, None) for name in present)
    return {name: item for name, item in value.items() if name not in present}


def error_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the error object of an answer's decoded body: nested under ``error``, or the body itself."""
    error = body.get("error")
    return error if isinstance(error, Mapping) else body
