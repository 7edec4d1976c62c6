"""What goes wrong with the files and variables that a process reads when it starts."""

from collections.abc import Iterator
from contextlib import contextmanager

from mmrouter_lib.feed_keys import FeedKeyError


class SettingsError(ValueError):
    """A file or variable that a process needs is missing or malformed; the message names it."""


@contextmanager
def reading_settings() -> Iterator[None]:
    """Raise :class:`SettingsError` in place of an ``OSError`` or ``FeedKeyError`` of the block or function."""
    try:
        yield
    except OSError as error:
        raise SettingsError(f"cannot read {error.filename}: {error.strerror}") from error
    except FeedKeyError as error:
        raise SettingsError(str(error)) from error
