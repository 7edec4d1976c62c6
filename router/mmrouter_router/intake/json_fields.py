"""Typed access to the fields of a JSON object: returns the value or raises a RequestError that names the field."""

from typing import Any, TypeVar

from mmrouter_router.core.errors import RequestError

Object = dict[str, Any]
T = TypeVar("T")


def _optional(holder: Object, name: str, path: str, kind: type[T], expected: str) -> T | None:
    value = holder.get(name)
    if value is not None and not isinstance(value, kind):
        raise RequestError.wrong_type(path or name, expected, value)
    return value


def _required(holder: Object, name: str, path: str, kind: type[T], expected: str) -> T:
    value = _optional(holder, name, path, kind, expected)
    if value is None:
        raise RequestError.missing(path or name)
    return value


def text(holder: Object, name: str, path: str = "") -> str | None:
    """Return a string, ``None`` where the field is absent or null. ``path``: the field's name in errors."""
    return _optional(holder, name, path, str, "a string")


def required_text(holder: Object, name: str, path: str = "") -> str:
    """Return a string. Raises 400 where it is missing."""
    return _required(holder, name, path, str, "a string")


def mapping(holder: Object, name: str, path: str = "") -> Object | None:
    """Return an object, ``None`` where the field is absent or null."""
    return _optional(holder, name, path, dict, "an object")


def required_mapping(holder: Object, name: str, path: str = "") -> Object:
    """Return an object. Raises 400 where it is missing."""
    return _required(holder, name, path, dict, "an object")


def objects(holder: Object, name: str, path: str = "") -> list[Object] | None:
    """Return an array of objects, ``None`` where the field is absent or null."""
    value: list[Object] | None = _optional(holder, name, path, list, "an array")
    for number, item in enumerate(value or ()):
        if not isinstance(item, dict):
            raise RequestError.wrong_type(f"{path or name}[{number}]", "an object", item)
    return value


def flag(body: Object, name: str, *, default: bool = False, nullable: bool = False) -> bool:
    """Return a boolean. Strings and numbers are refused, because engines read some of them as true."""
    value = body.get(name, default)
    if value is None and nullable:
        return default
    if not isinstance(value, bool):
        raise RequestError.wrong_type(name, "a boolean", value)
    return value


def model_of(body: Object, served_model: str) -> str:
    """Return the model's name. Raises 400 where it is missing, 404 where it is not ``served_model``."""
    model = required_text(body, "model")
    if model != served_model:
        raise RequestError.unknown_model(model)
    return model


def max_tokens(body: Object, *names: str) -> int | None:
    """Return the first field that is set of several spellings of a token limit; checks that all are integers."""
    limit: int | None = None
    for name in names:
        value = body.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise RequestError.wrong_type(name, "an integer", value)
        limit = value if limit is None else limit
    return limit


def media_url(holder: Object, name: str, path: str) -> tuple[Object, str, str, str]:
    """Return (holder, key, URL, field) of media in either spelling: an object with ``url``, or the URL itself."""
    if isinstance(holder.get(name), dict):
        holder, name, path = holder[name], "url", f"{path}.url"
    return holder, name, _required(holder, name, path, str, "a URL string"), path


def count_media(count: int, limit: int, param: str) -> None:
    """Raise 400 for more than ``limit`` images and other media; ``param``: the first one beyond."""
    if count > limit:
        message = f"The request holds more than {limit} images."
        raise RequestError.invalid(message, param=param, code="too_many_images")


def unsupported(path: str, why: str) -> RequestError:
    """Return a 400 for a way to reference media that is not served."""
    return RequestError.invalid(f"'{path}' is not supported: {why}.", param=path, code="unsupported_content_part")
