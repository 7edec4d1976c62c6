"""An existing cluster, by its kubeconfig: the same tests, except those that need a node of this machine."""

import base64
import json
import secrets
import ssl
import tempfile
from pathlib import Path
from typing import Any

import httpx
from cluster.access import Access


class Existing(Access):
    """A cluster by its kubeconfig, the current context.

    ``folder``: for kubectl's cache and, while the client is made, its keys. ``bin``: the folder with kubectl.
    Raises ``AssertionError`` for a kubeconfig that kubectl does not read.
    """

    def __init__(self, folder: Path, bin: Path, kubeconfig: Path) -> None:
        super().__init__(folder, bin, kubeconfig, prefix=f"mmrouter-test-{secrets.token_hex(3)}")
        shown = self.kubectl("config", "view", "--raw", "--minify", "--flatten", "--output=json")
        assert shown.returncode == 0, shown.stderr
        config = json.loads(shown.stdout)
        cluster, user = config["clusters"][0]["cluster"], config["users"][0].get("user") or {}
        self.http = httpx.Client(
            base_url=cluster["server"],
            verify=_context(cluster, user, folder),
            headers={"authorization": f"Bearer {user['token']}"} if "token" in user else {},
            timeout=30,
            trust_env=False,
        )

    def close(self) -> None:
        """End the client; the cluster stays as it is."""
        self.http.close()


def _context(cluster: dict[str, Any], user: dict[str, Any], folder: Path) -> ssl.SSLContext:
    authority = _decoded(cluster.get("certificate-authority-data", ""))
    context = ssl.create_default_context(cadata=authority or None)
    if "client-certificate-data" in user:
        # The standard library reads a client's key from a file only.
        with tempfile.NamedTemporaryFile("w", dir=folder) as file:
            file.write(_decoded(user["client-certificate-data"]) + "\n" + _decoded(user["client-key-data"]))
            file.flush()
            context.load_cert_chain(file.name)
    return context


def _decoded(text: str) -> str:
    return base64.b64decode(text).decode()
