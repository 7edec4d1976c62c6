"""Typed reads of JSON fields: the value, or a :class:`RequestError` that names the field."""

from typing import Any

from mmrouter_router.core.errors import RequestError

Object = dict[str, Any]


def model_of(body: Object, served_model: str) -> str:
    """Return the model's name. Raises 400 where it is missing, 404 where it is another than ``served_model``."""
    model = text(body, "model", "model")
    if model is None:
        raise RequestError.missing("model")
    if model != served_model:
        raise RequestError.unknown_model(model)
    return model


def text(holder: Object, name: str, path: str) -> str | None:
    """Return a string, ``None`` where the field is absent or null."""
    value = holder.get(name)
    if value is not None and not isinstance(value, str):
        raise RequestError.wrong_type(path, "a string", value)
    return value


def required_text(holder: Object, name: str, path: str) -> str:
    """Return a string that must be there."""
    value = text(holder, name, path)
    if value is None:
        raise RequestError.missing(path)
    return value


def flag(body: Object, name: str, *, default: bool = False, nullable: bool = False) -> bool:
    """Return a boolean of the body. Words and numbers are refused: engines read some of them as true."""
    value = body.get(name, default)
    if value is None and nullable:
        return default
    if not isinstance(value, bool):
        raise RequestError.wrong_type(name, "a boolean", value)
    return value


def max_tokens(body: Object, *names: str) -> int | None:
    """Return the first of several spellings of a token limit that is set; each one that is set must be an integer."""
    found: int | None = None
    for name in names:
        value = body.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise RequestError.wrong_type(name, "an integer", value)
        found = value if found is None else found
    return found


def mapping(holder: Object, name: str, path: str) -> Object | None:
    """Return an object, ``None`` where the field is absent or null."""
    value = holder.get(name)
    if value is not None and not isinstance(value, dict):
        raise RequestError.wrong_type(path, "an object", value)
    return value


def required_mapping(holder: Object, name: str, path: str) -> Object:
    """Return an object that must be there."""
    value = mapping(holder, name, path)
    if value is None:
        raise RequestError.missing(path)
    return value


def objects(holder: Object, name: str, path: str) -> list[Object] | None:
    """Return an array of objects, ``None`` where the field is absent or null."""
    value = holder.get(name)
    if value is None:
        return None
    if not isinstance(value, list):
        raise RequestError.wrong_type(path, "an array", value)
    for number, item in enumerate(value):
        if not isinstance(item, dict):
            raise RequestError.wrong_type(f"{path}[{number}]", "an object", item)
    return value


def media_url(holder: Object, name: str, path: str) -> tuple[Object, str, str, str]:
    """Return (holder, key, URL, its field) of media in either spelling: an object with ``url``, or the URL itself."""
    if isinstance(holder.get(name), dict):
        holder, name, path = holder[name], "url", f"{path}.url"
    value = holder.get(name)
    if value is None:
        raise RequestError.missing(path)
    if not isinstance(value, str):
        raise RequestError.wrong_type(path, "a URL string", value)
    return holder, name, value, path


def count_media(count: int, limit: int, param: str) -> None:
    """Raise 400 for more than ``limit`` images and other media; ``param`` is the one too many."""
    if count > limit:
        message = f"The request holds more than {limit} images."
        raise RequestError.invalid(message, param=param, code="too_many_images")


def unsupported(path: str, why: str) -> RequestError:
    """400: a way to name media that is not served."""
    return RequestError.invalid(f"'{path}' is not supported: {why}.", param=path, code="unsupported_content_part")
