"""Who asked the API server for what: its audit log, typed."""

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}
WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One request at one stage. ``began`` and ``ended``: seconds since the epoch, of the request and of the stage."""

    verb: str
    group: str
    resource: str
    subresource: str
    namespace: str
    name: str
    user: str
    agent: str
    code: int
    stage: str
    """``ResponseComplete``; a watch also has ``ResponseStarted``."""
    began: float
    ended: float
    uri: str

    @property
    def writes(self) -> bool:
        """Whether the request was one that changes objects."""
        return self.verb in WRITES

    def __str__(self) -> str:
        what = "/".join(filter(None, (self.group, self.resource, self.namespace, self.name, self.subresource)))
        return f"{self.verb} {what} -> {self.code} ({self.user}, {self.agent})"


class AuditLog:
    """A growing log file; each line is read once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rows: list[AuditRow] = []

    def rows(self, since: float = 0.0) -> list[AuditRow]:
        """Return the answered requests that began at ``since`` (seconds since the epoch) or later."""
        with self._path.open("rb") as log:
            log.seek(self._offset)
            whole, newline, _ = log.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        self._rows += (_row(json.loads(line)) for line in whole.splitlines())
        return [row for row in self._rows if row.began >= since]


def _row(event: dict[str, Any]) -> AuditRow:
    reference = event.get("objectRef") or {}
    return AuditRow(
        verb=event["verb"],
        group=reference.get("apiGroup", ""),
        resource=reference.get("resource", ""),
        subresource=reference.get("subresource", ""),
        namespace=reference.get("namespace", ""),
        name=reference.get("name", ""),
        user=event["user"].get("username", ""),
        agent=event.get("userAgent", ""),
        code=(event.get("responseStatus") or {}).get("code", 0),
        stage=event["stage"],
        began=_seconds(event["requestReceivedTimestamp"]),
        ended=_seconds(event["stageTimestamp"]),
        uri=event["requestURI"],
    )


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
