"""Access to a cluster for tests, as an administrator: kubectl and the API."""

import itertools
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx


class Access:
    """Access to a cluster.

    ``folder``: where kubectl keeps what it keeps. ``bin``: the folder with kubectl. ``http``: the administrator's
    client, set by the creator.
    """

    http: httpx.Client

    def __init__(self, folder: Path, bin: Path, kubeconfig: Path, prefix: str = "test") -> None:
        self.folder, self.bin, self.kubeconfig = folder, bin, kubeconfig
        self.numbers = itertools.count(1)
        self.namespaces: list[str] = []
        """Those that are in use now."""
        self.leaving: Callable[[str, BaseException | None], None] = lambda namespace, error: None
        """Told of a namespace and of what went wrong in its block, before it is deleted."""
        self._prefix = prefix

    def kubectl(self, *arguments: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run kubectl as the administrator; the caller looks at ``returncode``."""
        argv = [self.bin / "kubectl", f"--kubeconfig={self.kubeconfig}", *arguments]
        env = {**os.environ, "HOME": str(self.folder)}  # kubectl keeps a cache of discovery there
        return subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=60, check=False, env=env)

    def request(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json", **params: str
    ) -> httpx.Response:
        """Ask the API server as the administrator; cheaper than kubectl. The caller looks at the status."""
        content = None if body is None else json.dumps(body)
        return self.http.request(method, path, content=content, headers={"content-type": content_type}, params=params)

    @contextmanager
    def namespace(self, **labels: str) -> Iterator[str]:
        """Make a namespace with a fresh name; it is deleted in the background after the block."""
        name = f"{self._prefix}-{next(self.numbers)}"
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
        self.request("POST", "/api/v1/namespaces", body).raise_for_status()
        self.namespaces.append(name)
        wrong: BaseException | None = None
        try:
            yield name
        except BaseException as error:
            wrong = error
            raise
        finally:
            self.namespaces.remove(name)
            try:
                self.leaving(name, wrong)
            finally:
                with suppress(httpx.TransportError):  # a test may have left the API server ended
                    self.request("DELETE", f"/api/v1/namespaces/{name}")
