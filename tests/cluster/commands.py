"""The command line tool as a user runs it against the control plane."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.controlplane import ControlPlane

SECONDS = 60


@dataclass(frozen=True)
class Told:
    """What `mmrouter doctor --json` said."""

    status: int
    subjects: Mapping[str, list[dict[str, str]]]

    def seen(self, check: str, level: str = "problem") -> list[str]:
        """What was seen by a check, of every subject."""
        findings = (item for items in self.subjects.values() for item in items)
        return [item["seen"] for item in findings if (item["check"], item["level"]) == (check, level)]

    @property
    def problems(self) -> list[str]:
        """Every problem, with its check."""
        return [
            f"{i['check']}: {i['seen']}" for items in self.subjects.values() for i in items if i["level"] == "problem"
        ]


def mmrouter(plane: ControlPlane, *arguments: str, kubeconfig: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command with a kubeconfig, by default the administrator's; the caller looks at ``returncode``."""
    argv = [sys.executable, "-m", "mmrouter_cli", *arguments, f"--kubeconfig={kubeconfig or plane.kubeconfig}"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS, check=False)


def diagnosed(plane: ControlPlane, *arguments: str, kubeconfig: Path | None = None) -> Told:
    """Run `mmrouter doctor` and return what it said."""
    done = mmrouter(plane, "doctor", *arguments, "--json", kubeconfig=kubeconfig)
    assert done.returncode in (0, 1), done.stderr
    told = json.loads(done.stdout)
    assert told["passed"] == (done.returncode == 0)
    return Told(done.returncode, {one["subject"]: one["findings"] for one in told["subjects"]})


def views(plane: ControlPlane, *arguments: str) -> list[dict[str, Any]]:
    """Run `mmrouter status` and return the views."""
    done = mmrouter(plane, "status", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found
