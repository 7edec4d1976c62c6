"""What every adapter's ``launch`` returns, and the ports of an engine pod (DESIGN.md 10)."""

import json
from dataclasses import dataclass

HTTP_PORT = 8000
EVENTS_PORT = 5557
REPLAY_PORT = 5657
"""Plus the data parallel rank each; both are on the pod's loopback."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The engine container: ``$(POD_IP)`` and ``$(POD_LOOPBACK)`` are expanded by whoever starts it."""

    command: list[str]
    args: list[str]
    env: dict[str, str]
    health_path: str


def flag(name: str, value: object) -> list[str]:
    """Return a flag and its value as arguments; a mapping becomes JSON."""
    return [name, json.dumps(value, separators=(",", ":")) if isinstance(value, dict) else str(value)]
