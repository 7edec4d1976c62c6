"""A real control plane: etcd, kube-apiserver, kube-controller-manager, kube-scheduler. No kubelet.

It has an address of its own, by default on loopback, so that several stand side by side on the ports everybody knows,
and it is gone with the process that started it, however that ends.
"""

import asyncio
import json
import os
import signal
import ssl
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import yaml
from cluster.access import POLICY, Access, AuditLog, AuditRow, make_keys
from waiting import wait_for

from mmrouter_cli.local.loopback_network import take_block
from mmrouter_cli.local.process import MARK, Guard

API_PORT = 6443
ETCD_PORT = 2379
START_SECONDS = 180.0
RESTARTS = 2  # of a component that ends before it serves, as a kubelet would: an API server gives up on a slow etcd
STOP_SECONDS = 15.0
HANG_SECONDS = 180.0  # of a request: an API server on a busy machine has taken 30
TOKEN_SECONDS = 86_400
APPLY = "application/apply-patch+yaml"
SPARING = {"GOGC": "400"}
"""Has Go's programs look for garbage when their memory has grown fivefold, not twofold: a fifth less to compute for the
API server, which keeps little here."""


@dataclass(frozen=True)
class Place:
    address: str
    services: str = "10.96.0.0/16"
    """The range of the Services' addresses."""
    enter: tuple[str, ...] = ()
    """What the command line of everything begins with that runs there."""
    apiserver: tuple[str, ...] = ()
    """Further options of the API server."""


class StartError(Exception):
    """A component did not come up; the text has the end of its log."""


class ControlPlane(Access):
    """A control plane; :func:`control_plane` makes and ends it. ``folder`` holds its keys, logs and data; ``bin`` is
    where ``hack/cluster/go_programs.py`` put the commands.
    """

    USERS: Mapping[str, tuple[str, str]] = {
        "admin": ("admin", "system:masters"),
        "controller-manager": ("system:kube-controller-manager", ""),
        "scheduler": ("system:kube-scheduler", ""),
    }

    def __init__(self, folder: Path, bin: Path, place: Place, guard: Guard) -> None:
        super().__init__(folder, bin, folder / "admin.kubeconfig")
        self.place, self.address = place, place.address
        self.url = f"https://{self.address}:{API_PORT}"
        self.ca = folder / "pki" / "ca.crt"
        self.guard = guard
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._tokens = {name: uuid.uuid4().hex for name in self.USERS}
        self._audit = AuditLog(folder / "audit.log")
        self.make_keys()
        self.write_files()
        self.http = self.client(self._tokens["admin"])

    # -- components --------------------------------------------------------------------------------------------------

    def start(self, *names: str) -> None:
        """Start components (the keys of :meth:`commands`) and wait until they serve. Raises :class:`StartError`."""
        commands, env = self.commands(), {**os.environ, **SPARING}
        for name in names:
            self._running[name] = self.spawn(name, commands[name], env)
        for name in names:
            self._wait_until_up(name)

    def stop(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        end(self._running.pop(name), number)

    def restart_apiserver(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.stop("apiserver", number)
        self.start("apiserver")

    def close(self) -> None:
        """End everything. The API server goes before etcd: one that has lost its etcd hangs in its shutdown."""
        self.http.close()
        for name in reversed(list(self._running)):
            self.stop(name)

    def spawn(
        self, name: str, argv: Sequence[str | Path], env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process that does not outlive the control plane; its output goes to ``log/NAME.log``. ``env``: its
        whole environment, by default this process's. The caller ends it, with :func:`end`.
        """
        with self.log_file(name).open("ab") as log:
            process = subprocess.Popen(
                [*self.place.enter, *argv],
                cwd=self.folder,
                env={**(os.environ if env is None else env), MARK: self.guard.mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.guard.send(f"+{process.pid}")
        return process

    def log_file(self, name: str) -> Path:
        return self.folder / "log" / f"{name}.log"

    # -- access ------------------------------------------------------------------------------------------------------

    def client(self, token: str) -> httpx.Client:
        return httpx.Client(**self._client_options(token))

    def async_client(self, transport: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncClient:
        return httpx.AsyncClient(**self._client_options(self._tokens["admin"]), transport=transport)

    def _client_options(self, token: str) -> dict[str, Any]:
        context = ssl.create_default_context(cafile=str(self.ca))
        headers = {"authorization": f"Bearer {token}", "user-agent": "mmrouter-tests"}
        return {
            "base_url": self.url,
            "verify": context,
            "headers": headers,
            "timeout": HANG_SECONDS,
            "trust_env": False,
        }

    def token(self, namespace: str, serviceaccount: str) -> str:
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{serviceaccount}/token"
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": TOKEN_SECONDS},
        }
        return str(self.request("POST", path, body).raise_for_status().json()["status"]["token"])

    def kubeconfig_for(self, namespace: str, serviceaccount: str, server: str = "") -> Path:
        """Write a kubeconfig with a token of a ServiceAccount. ``server``: another URL than the API server's own.
        Raises ``httpx.HTTPStatusError`` when there is no such ServiceAccount.
        """
        path = self.folder / f"{namespace}.{serviceaccount}.{next(self.numbers)}.kubeconfig"
        self._write_kubeconfig(path, self.token(namespace, serviceaccount), server or self.url)
        return path

    def audit(self, since: float = 0.0) -> list[AuditRow]:
        return self._audit.rows(since)

    def apply_crds(self, folder: Path) -> None:
        """Apply every CRD of a folder server-side and wait until they are established. Raises ``AssertionError``."""
        done = self.kubectl("apply", "--server-side", "--output=name", "-f", folder)
        assert done.returncode == 0, done.stderr
        for name in done.stdout.split():
            wait_for(partial(self._established, name.rpartition("/")[2]), START_SECONDS, f"{name} is established")

    def _established(self, crd: str) -> bool:
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd}"
        status = self.request("GET", path).json().get("status") or {}  # empty for a moment
        return ("Established", "True") in {(c["type"], c["status"]) for c in status.get("conditions") or []}

    # -- making ------------------------------------------------------------------------------------------------------

    def make_keys(self) -> None:
        make_keys(self.folder / "pki", self.address)

    def write_files(self) -> None:
        (self.folder / "log").mkdir()
        (self.folder / "audit-policy.json").write_text(json.dumps(POLICY))
        rows = [f'{self._tokens[name]},{user},{name},"{group}"' for name, (user, group) in self.USERS.items()]
        tokens = self.folder / "tokens.csv"
        tokens.touch(mode=0o600)
        tokens.write_text("\n".join(rows) + "\n")
        for name in self.USERS:
            self._write_kubeconfig(self.folder / f"{name}.kubeconfig", self._tokens[name], self.url)
        scheduler = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "clientConnection": {"kubeconfig": str(self.folder / "scheduler.kubeconfig"), "qps": 1000, "burst": 2000},
            "leaderElection": {"leaderElect": False},
            "podInitialBackoffSeconds": 1,
            "podMaxBackoffSeconds": 1,
        }
        (self.folder / "scheduler.json").write_text(json.dumps(scheduler))

    def _write_kubeconfig(self, path: Path, token: str, server: str) -> None:
        cluster = {"server": server, "certificate-authority": str(self.ca)}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "current-context": "test",
        }
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(content))

    def commands(self) -> dict[str, list[str]]:
        pki, etcd = self.folder / "pki", f"http://{self.address}:{ETCD_PORT}"
        peer = f"http://{self.address}:{ETCD_PORT + 1}"
        return {
            "etcd": [
                *("etcd", f"--data-dir={self.folder / 'etcd'}", "--unsafe-no-fsync"),
                *(f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}"),
                *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"),
                f"--initial-cluster=default={peer}",
            ],
            "apiserver": [
                *(str(self.bin / "kube-apiserver"), f"--etcd-servers={etcd}"),
                *(f"--bind-address={self.address}", f"--advertise-address={self.address}"),
                f"--secure-port={API_PORT}",
                *(f"--tls-cert-file={pki / 'apiserver.crt'}", f"--tls-private-key-file={pki / 'apiserver.key'}"),
                *(f"--client-ca-file={self.ca}", f"--token-auth-file={self.folder / 'tokens.csv'}"),
                f"--service-account-key-file={pki / 'sa.pub'}",
                f"--service-account-signing-key-file={pki / 'sa.key'}",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-cluster-ip-range={self.place.services}",
                *("--authorization-mode=Node,RBAC", "--allow-privileged=true"),
                *(f"--audit-policy-file={self.folder / 'audit-policy.json'}", "--audit-log-mode=blocking"),
                f"--audit-log-path={self.folder / 'audit.log'}",
                *self.apiserver_options(),
                *self.place.apiserver,
            ],
            "controller-manager": [
                str(self.bin / "kube-controller-manager"),
                f"--kubeconfig={self.folder / 'controller-manager.kubeconfig'}",
                *(f"--root-ca-file={self.ca}", f"--service-account-private-key-file={pki / 'sa.key'}"),
                *("--use-service-account-credentials", "--leader-elect=false", "--secure-port=0"),
                *("--kube-api-qps=1000", "--kube-api-burst=2000", "--concurrent-gc-syncs=20"),
                *("--endpointslice-updates-batch-period=0s", "--endpoint-updates-batch-period=0s"),
                *self.controller_options(),
            ],
            "scheduler": [
                *(str(self.bin / "kube-scheduler"), f"--config={self.folder / 'scheduler.json'}", "--secure-port=0")
            ],
        }

    def apiserver_options(self) -> list[str]:
        """Return what depends on whether there are real nodes."""
        return ["--endpoint-reconciler-type=none"]  # loopback may be no endpoint

    def controller_options(self) -> list[str]:
        """Return what depends on whether there are real nodes."""
        return ["--node-monitor-grace-period=24h"]  # hollow nodes send no heartbeats

    def _wait_until_up(self, name: str) -> None:
        deadline, restarts = time.monotonic() + START_SECONDS, 0
        while not self.is_up(name):
            ended = self._running[name].poll() is not None
            if (ended and restarts == RESTARTS) or time.monotonic() > deadline:
                raise StartError(f"{name} did not come up:\n{self.log_file(name).read_text()[-3000:]}")
            if ended:
                restarts += 1
                self._running[name] = self.spawn(name, self.commands()[name], {**os.environ, **SPARING})
            time.sleep(0.05)

    def is_up(self, name: str) -> bool:
        """Whether a component serves. One without a health endpoint counts as up."""
        try:
            match name:
                case "etcd":
                    return httpx.get(f"http://{self.address}:{ETCD_PORT}/health", trust_env=False).status_code == 200
                case "apiserver":
                    return self.http.get("/readyz").status_code == 200
                case "controller-manager":  # what every pod needs first
                    return self.http.get("/api/v1/namespaces/default/serviceaccounts/default").status_code == 200
        except httpx.TransportError:
            return False
        return True


def end(process: subprocess.Popen[bytes], number: signal.Signals = signal.SIGTERM) -> None:
    """End a process: ask, wait, then kill it and its group."""
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGCONT)  # a stopped one hears nothing
        os.kill(process.pid, number)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def control_plane(
    folder: Path, bin: Path, crds: Path | None, *, apiserver: tuple[str, ...] = ()
) -> Iterator[ControlPlane]:
    """Run a control plane until the block ends. ``crds``: a folder of CRDs to serve from the beginning; ``apiserver``:
    further options of the API server. Raises :class:`StartError`.
    """
    block = take_block({API_PORT, ETCD_PORT, ETCD_PORT + 1})
    guard = Guard(uuid.uuid4().hex)
    try:
        plane = ControlPlane(folder, bin, Place(block.service, apiserver=apiserver), guard)
        try:
            plane.start("etcd", "apiserver")
            # Before the controllers: the garbage collector looks for new kinds only every 30 seconds.
            if crds is not None:
                plane.apply_crds(crds)
            plane.start("controller-manager", "scheduler")
            yield plane
        finally:
            plane.close()
    finally:
        asyncio.run(guard.close())
        block.close()
