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


def configure(level: str, *, plain: bool = False) -> None:
    """Log to standard error; ``plain`` is for people at a terminal."""
    handler = logging.StreamHandler(sys.stderr)
    text = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    handler.setFormatter(logging.Formatter(text) if plain else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Of every watch that reconnects and every handler that ran, in words of its own.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
