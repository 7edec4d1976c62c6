"""Process entry: ``mmrouter operator``. Logs are one JSON object per line, with the object that a line is about."""

import argparse
import asyncio
import json
import logging
import os
import secrets
import socket
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mmrouter_operator.cluster import connection as connect
from mmrouter_operator.cluster.lease import LeaseTiming
from mmrouter_operator.model.config import ConfigError, load_config
from mmrouter_operator.runtime.operator import Operator, Options

USAGE = 2
_FIELDS = ("namespace", "object", "kind", "child", "reason")
"""Fields of a record that name the object that it is about."""


def main(arguments: list[str] | None = None) -> int:
    given = parser().parse_args(sys.argv[2:] if arguments is None else arguments)
    configure_logs(given.log_level, plain=given.log_format == "text")
    try:
        host, _, port = given.bind.rpartition(":")
        options = Options(
            identity=given.identity or f"{os.environ.get('POD_NAME') or socket.gethostname()}_{secrets.token_hex(4)}",
            config=load_config(given.config),
            kubeconfig=given.kubeconfig,
            namespaces=tuple(name for item in given.namespace for name in item.split(",") if name),
            lease_namespace=given.lease_namespace or connect.own_namespace(),
            lease_name=given.lease_name,
            timing=LeaseTiming(given.lease_duration, given.renew_deadline, given.retry_period),
            host=host.strip("[]"),
            port=int(port),
        )
        return asyncio.run(_run(options))
    except (ConfigError, OSError, ValueError, connect.ConnectError) as error:
        sys.stderr.write(f"mmrouter operator: {error}\n")
        return USAGE


async def _run(options: Options) -> int:
    return await Operator(options, await connect.load(options.kubeconfig)).run()


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; environment variables are its defaults."""
    made = argparse.ArgumentParser(
        prog="mmrouter operator",
        description="Run the operator. Every option can also be given as MMROUTER_OPERATOR_<OPTION>.",
    )

    def option(name: str, help: str, *, default: str | None = None, **more: object) -> None:
        variable = "MMROUTER_OPERATOR_" + name.upper().replace("-", "_")
        value: object = os.environ.get(variable) or default
        if more.get("action") == "append":
            value = [os.environ[variable]] if os.environ.get(variable) else []
        made.add_argument(f"--{name}", help=help, default=value, **more)  # type: ignore[arg-type]

    option("config", "YAML file with site settings", type=Path)
    option("kubeconfig", "kubeconfig file; default: the pod's service account, else the usual places", type=Path)
    option("namespace", "namespace to watch; repeatable; default: all", action="append")
    option("lease-namespace", "namespace of the lease; default: the operator's own")
    option("lease-name", "name of the lease", default="mmrouter-operator")
    option("identity", "name of this replica in the lease; default: pod name and a random part")
    option("lease-duration", "seconds until another replica may take over", default="15", type=float)
    option("renew-deadline", "seconds after a renewal in which this replica writes", default="10", type=float)
    option("retry-period", "seconds between renewals", default="2", type=float)
    option("bind", "ADDRESS:PORT of /metrics, /healthz and /readyz; port 0: none", default="0.0.0.0:9090")
    option("log-level", "debug, info, warning or error", default="info", choices=["debug", "info", "warning", "error"])
    option("log-format", "json or text", default="json", choices=["json", "text"])
    return made


class JsonFormatter(logging.Formatter):
    """Time, level, logger, message, and the fields above where a record has them."""

    def format(self, record: logging.LogRecord) -> str:
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
        fields = [f"{name}={record.__dict__[name]}" for name in _FIELDS if record.__dict__.get(name)]
        return " ".join([super().formatMessage(record), *fields])


def configure_logs(level: str, *, plain: bool = False) -> None:
    """Log to standard error; ``plain`` is for people at a terminal."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter() if plain else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # kopf logs every watch that reconnects and every handler that ran.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
