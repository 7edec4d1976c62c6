"""Helm as a command, and what it renders."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "mmrouter"
RELEASE = "mmrouter"
NAMESPACE = "mmrouter-system"
Object = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """The objects of a release, hooks among them."""

    objects: tuple[Object, ...]

    def all(self, kind: str) -> list[Object]:
        return [obj for obj in self.objects if obj["kind"] == kind]

    def one(self, kind: str, name: str = "") -> Object:
        """Return the only object of a kind, or of a kind and a name."""
        found = [obj for obj in self.all(kind) if not name or obj["metadata"]["name"] == name]
        assert len(found) == 1, f"{len(found)} objects {kind} {name}"
        return found[0]

    @cached_property
    def pods(self) -> dict[str, Object]:
        """Name -> spec of every pod."""
        templates = {obj["metadata"]["name"]: obj["spec"]["template"]["spec"] for obj in self.all("Deployment")}
        return templates | {obj["metadata"]["name"]: obj["spec"] for obj in self.all("Pod")}

    @property
    def operator(self) -> Object:
        """The operator's container."""
        container: Object = self.pods["mmrouter-operator"]["containers"][0]
        return container


@dataclass
class Helm:
    """The command; ``home`` is where it keeps what it keeps, ``kubeconfig`` the cluster it is for."""

    command: Path
    home: Path
    kubeconfig: Path | None = None
    _known: dict[str, Rendered] = field(default_factory=dict)

    def at(self, kubeconfig: Path) -> "Helm":
        """Return helm for a cluster."""
        return Helm(self.command, self.home, kubeconfig, self._known)

    def run(self, *arguments: str | Path, values: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
        """Run helm; the caller looks at ``returncode``."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HELM_", "KUBE"))}
        # No cluster: a test that names none reaches none.
        env = {**kept, "HOME": str(self.home), "KUBECONFIG": str(self.kubeconfig or os.devnull)}
        given: Sequence[str] = () if values is None else ("--values", "-")
        return subprocess.run(
            [self.command, *arguments, *given],
            input=None if values is None else json.dumps(values),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=env,
        )

    def template(self, values: Mapping[str, Any] | None = None, *options: str) -> subprocess.CompletedProcess[str]:
        """Render the chart; the caller looks at ``returncode``."""
        return self.run("template", RELEASE, CHART, f"--namespace={NAMESPACE}", *options, values=values or {})

    def render(self, values: Mapping[str, Any] | None = None, *options: str) -> Rendered:
        """Return what the chart renders, for reading only: a question is answered once. Raises ``AssertionError``."""
        key = json.dumps([values or {}, options], sort_keys=True)
        if key not in self._known:
            done = self.template(values, *options)
            assert done.returncode == 0, done.stderr
            self._known[key] = Rendered(tuple(obj for obj in yaml.load_all(done.stdout, yaml.CSafeLoader) if obj))
        return self._known[key]
