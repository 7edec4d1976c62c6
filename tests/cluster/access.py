"""Access to a cluster for tests, as an administrator: kubectl, the API, the keys and the audit log."""

import itertools
import json
import os
import secrets
import select
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

SERVING_SECONDS = 20.0


class Access:
    """Access to a cluster. ``folder``: where kubectl keeps what it keeps. ``bin``: the folder with kubectl. ``http``:
    the administrator's client, set by the creator.
    """

    http: httpx.Client

    def __init__(self, folder: Path, bin: Path, kubeconfig: Path, prefix: str = "test") -> None:
        self.folder, self.bin, self.kubeconfig = folder, bin, kubeconfig
        self.numbers = itertools.count(1)
        self.namespaces: list[str] = []
        self.leaving: Callable[[str, BaseException | None], None] = lambda namespace, error: None
        """Told of a namespace and of what went wrong in its block, before it is deleted."""
        self._prefix = prefix

    def kubectl(self, *arguments: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        argv = [self.bin / "kubectl", f"--kubeconfig={self.kubeconfig}", *arguments]
        env = {**os.environ, "HOME": str(self.folder)}  # kubectl keeps a cache of discovery there
        return subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=600, check=False, env=env)

    def request(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json", **params: str
    ) -> httpx.Response:
        """Ask the API server as the administrator; cheaper than kubectl. The caller looks at the status."""
        content = None if body is None else json.dumps(body)
        return self.http.request(method, path, content=content, headers={"content-type": content_type}, params=params)

    def read(self, path: str, **params: str) -> Any:
        """Return what the API server has at a path. Raises ``httpx.HTTPStatusError``."""
        return self.request("GET", path, **params).raise_for_status().json()

    def pods(self, namespace: str, **labels: str) -> list[dict[str, Any]]:
        """Return the pods of a namespace with these labels of ours (``role="worker"``)."""
        selector = ",".join(f"mmrouter.io/{name}={value}" for name, value in labels.items())
        found: list[dict[str, Any]] = self.read(f"/api/v1/namespaces/{namespace}/pods", labelSelector=selector)["items"]
        return found

    @contextmanager
    def serving(self, *arguments: str) -> Iterator[str]:
        """Run a command of kubectl that serves until the block ends; gives its first line, which kubectl writes as a
        whole. Raises ``AssertionError`` where none comes in time or ever.
        """
        command = [str(self.bin / "kubectl"), f"--kubeconfig={self.kubeconfig}", *arguments]
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
            try:
                assert process.stdout is not None
                ready, _, _ = select.select([process.stdout], [], [], SERVING_SECONDS)
                line = process.stdout.readline() if ready else ""
                if not line:
                    process.kill()
                    process.wait()
                    errors.seek(0)
                    raise AssertionError(f"kubectl {' '.join(arguments)} does not serve: {errors.read().strip()}")
                yield line
            finally:
                process.terminate()
                process.communicate()

    @contextmanager
    def namespace(self, **labels: str) -> Iterator[str]:
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

    @property
    def writes(self) -> bool:
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
        **{name: reference.get(name, "") for name in ("resource", "subresource", "namespace", "name")},
        user=event["user"].get("username", ""),
        agent=event.get("userAgent", ""),
        code=(event.get("responseStatus") or {}).get("code", 0),
        stage=event["stage"],
        began=datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp(),
        ended=datetime.fromisoformat(event["stageTimestamp"]).timestamp(),
    )


DAYS = "30"
CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def make_keys(folder: Path, address: str, also: Sequence[str] = ()) -> None:
    """Write ``ca.crt``, ``apiserver.{crt,key}`` and ``sa.{key,pub}``. Raises ``CalledProcessError``. ``also``: further
    addresses of the API server.
    """
    folder.mkdir(mode=0o700)
    _openssl(
        folder,
        *("req", "-x509", *CURVE, "-keyout", "ca.key", "-out", "ca.crt", "-days", DAYS, "-subj", "/CN=test"),
        *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
    )
    addresses = ["127.0.0.1", address, *also]
    names = ["DNS:localhost", "DNS:kubernetes.default.svc", *(f"IP:{each}" for each in addresses)]
    make_certificate(folder, "apiserver", "/CN=kube-apiserver", names)
    _openssl(folder, "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "sa.key")
    _openssl(folder, "ec", "-in", "sa.key", "-pubout", "-out", "sa.pub")


def make_certificate(folder: Path, name: str, subject: str, names: Sequence[str] = ()) -> None:
    """Write ``NAME.{crt,key}``, signed by the authority of :func:`make_keys`. Raises ``CalledProcessError``. ``names``:
    of a server (``DNS:localhost``); without any it is a client's certificate.
    """
    usage = f"serverAuth\nsubjectAltName={','.join(names)}" if names else "clientAuth"
    (folder / f"{name}.ext").write_text(f"keyUsage=digitalSignature\nextendedKeyUsage={usage}\n")
    _openssl(folder, "req", "-new", *CURVE, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", subject)
    _openssl(
        folder,
        *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial"),
        *("-days", DAYS, "-out", f"{name}.crt", "-extfile", f"{name}.ext"),
    )


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@contextmanager
def existing(folder: Path, bin: Path, kubeconfig: Path) -> Iterator[Access]:
    """Reach a cluster by its kubeconfig, the current context, until the block ends. ``folder``: for kubectl's cache.
    ``bin``: the folder with kubectl. Raises ``AssertionError`` for a kubeconfig that kubectl does not read.
    """
    made = Access(folder, bin, kubeconfig, prefix=f"mmrouter-test-{secrets.token_hex(3)}")
    with made.serving("proxy", "--port=0") as line:
        url = f"http://{line.split()[-1]}"
        with httpx.Client(base_url=url, timeout=30, trust_env=False) as made.http:
            yield made
