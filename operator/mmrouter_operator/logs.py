"""Logs as one JSON object per line, with the key of the object that a line is about."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

_FIELDS = ("namespace", "object", "kind", "child", "reason")


class JsonFormatter(logging.Formatter):
    """Time, level, logger, message, and the fields above where a record has them."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: record.__dict__[name] for name in _FIELDS if record.__dict__.get(name)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """The same for people at a terminal: the fields stand behind the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class's name
        """Return the message with its fields."""
        fields = [f"{name}={record.__dict__[name]}" for name in _FIELDS if record.__dict__.get(name)]
        return " ".join([super().formatMessage(record), *fields])


def configure(level: str, *, plain: bool = False) -> None:
    """Log to standard error; ``plain`` is for people at a terminal."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter() if plain else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Of every watch that reconnects and every handler that ran, in words of its own.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
