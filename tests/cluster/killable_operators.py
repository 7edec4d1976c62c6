"""Operators that are killed in the middle of a reconcile, and what is left of them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster.controlplane import ControlPlane
from cluster.operators import ACCOUNT, NAMESPACE, install
from cluster.resources import Object, bare, children

NEVER = 10**6
"""More calls than any reconcile makes."""


class Zygote:
    """Starts operators that kill themselves; see ``zygote.py``. One at a time, each for one namespace."""

    def __init__(self, plane: ControlPlane) -> None:
        install(plane)
        self._plane = plane
        self._kubeconfig = plane.kubeconfig_for(NAMESPACE, ACCOUNT)
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=plane.log_file("zygote").open("ab"),
            text=True,
            start_new_session=True,
        )
        plane.guard.began(self._process.pid)

    def run(self, namespace: str, calls: int = NEVER) -> tuple[int, int]:
        """Run an operator until its call number ``calls`` was answered, or until it has reconciled to the end.

        Returns its exit status (0 for the latter) and the number of its calls.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        arguments = [
            *(
                f"--kubeconfig={self._kubeconfig}",
                f"--namespace={namespace}",
                "--identity=mortal",
                "--bind=127.0.0.1:0",
            ),
            *(f"--lease-namespace={NAMESPACE}", "--lease-duration=2", "--renew-deadline=1.5", "--retry-period=0.3"),
            "--log-format=text",
        ]
        self._process.stdin.write(json.dumps({"arguments": arguments, "calls": calls}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return answer["status"], answer["calls"]

    def log(self) -> str:
        """Return what its operators have logged."""
        return self._plane.log_file("zygote").read_text()

    def close(self) -> None:
        """End it; it must not run an operator."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def alike(plane: ControlPlane, namespace: str) -> Object:
    """Return the children of a namespace without what differs between two equal deployments."""
    live = children(plane, namespace)
    found = {f"{kind} {name}": bare(child) for (kind, name), child in live.items() if kind != "Secret"}
    text = json.dumps(found, sort_keys=True)
    # Fingerprints of keys that are made anew for every deployment, and what is made of these.
    for annotation in _of_templates(found):
        text = text.replace(json.dumps(annotation), '"annotation"')
    made: Object = json.loads(text.replace(namespace, "namespace"))
    return made


def unlike(one: Object, other: Object) -> list[str]:
    """Return the names of the children that are not the same."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _of_templates(found: Any) -> Iterator[str]:
    """Return the annotations of all pod templates in it, also of those that are kept as renderings."""
    for name, value in found.items() if isinstance(found, dict) else enumerate(found):
        if name == "template":
            yield from (value.get("metadata", {}).get("annotations") or {}).values()
        if isinstance(value, dict | list):
            yield from _of_templates(value)
