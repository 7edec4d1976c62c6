"""Router processes under test: ours as it is deployed, and Rust routers from the package index."""

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Self

import psutil

from bench.feed.fake_sidecars import Curve
from bench.peers.environment import Peer, ensure
from bench.placing.router_objects import resource
from bench.serving.load_client import request, split

START_SECONDS = 60.0
POLL_SECONDS = 0.1
MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-qwen2-vl"
FRONTEND_PORT = 8000
CONTROL_TOKEN = "bench-control-token"


class RouterFailedError(Exception):
    """A router did not start or answered wrongly; the message has its last words."""


class Process(AbstractContextManager["Process"]):
    """A server process with its log; terminated, then killed, at the end of the context."""

    def __init__(
        self, name: str, command: Sequence[str], host: str, port: int, environment: dict[str, str] | None = None
    ) -> None:
        self.name, self.host, self.port = name, host, port
        self._log = tempfile.NamedTemporaryFile(prefix="mmrouter-bench-", suffix=".log")  # noqa: SIM115 - closed in exit
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, env={**os.environ, **(environment or {})}
        )
        self._usage = psutil.Process(self._process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        family = [*self._usage.children(recursive=True), self._usage] if self._usage.is_running() else []
        for process in family:
            process.terminate()
        _, alive = psutil.wait_procs(family, timeout=5)
        for process in alive:
            process.kill()
        self._process.wait()
        self._log.close()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def cpu(self) -> float:
        """Return CPU seconds used so far, children included."""
        times = [process.cpu_times() for process in (self._usage, *self._usage.children(recursive=True))]
        return float(sum(t.user + t.system for t in times))

    def memory(self) -> float:
        """Return the resident memory, in MiB."""
        return float(self._usage.memory_info().rss / 2**20)

    def wait(self) -> None:
        """Wait until a chat request is answered with 200. Raises :class:`RouterFailedError`."""
        end = time.monotonic() + START_SECONDS
        answer = "nothing"
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise RouterFailedError(f"{self.name} ended with status {self._process.returncode}: {self._words()}")
            try:
                status = self._ask()
            except (OSError, ConnectionError) as error:
                answer = str(error)
            else:
                if status == 200:
                    return
                answer = f"status {status}"
            time.sleep(POLL_SECONDS)
        raise RouterFailedError(f"{self.name} still says {answer} after {START_SECONDS:g} s: {self._words()}")

    def _ask(self) -> int:
        with socket.create_connection((self.host, self.port), timeout=5) as connection:
            connection.sendall(request(self.host, self.port, stream=False, pause_ms=None))
            data = b""
            while (answer := split(data)) is None:
                piece = connection.recv(65536)
                if not piece:
                    raise ConnectionError("closed within an answer")
                data += piece
        return answer[0]

    def _words(self) -> str:
        return " ".join(Path(self._log.name).read_text(errors="replace").split())[-300:]


class Ours(Process):
    """``mmrouter router`` with a configuration folder as in a pod, policy, workers and collector as given."""

    def __init__(
        self,
        host: str,
        workers: Sequence[str],
        curve: Curve,
        *,
        policy: str,
        otlp: str = "",
        under: Sequence[str] = (),
        peers: Sequence[str] = (),
    ) -> None:
        """``under``: a command that runs it, as a tracer does. ``peers``: addresses of other routers."""
        self._config = Path(tempfile.mkdtemp(prefix="mmrouter-bench-"))
        configure(self._config, workers, curve, policy=policy, otlp=otlp, peers=peers)
        environment = {
            "MMROUTER_CONFIG": str(self._config),
            "MMROUTER_MODEL_DIR": str(MODEL),
            "POD_NAME": "bench-frontend",
            "POD_UID": f"bench-frontend-{host}",
            "POD_IP": host,
        }
        command = [*under, sys.executable, "-m", "mmrouter_router"]
        super().__init__("mmrouter", command, host, FRONTEND_PORT, environment)

    def __exit__(self, *details: object) -> None:
        super().__exit__(*details)
        shutil.rmtree(self._config)

    def wait(self) -> None:
        """Wait until every worker is verified and a request is answered."""
        super().wait()
        connection = http.client.HTTPConnection(self.host, 9090, timeout=5)
        connection.request("GET", "/readyz")
        status = connection.getresponse().status
        connection.close()
        if status != 200:
            raise RouterFailedError(f"{self.name} answers before it is ready ({status})")


def configure(
    folder: Path, workers: Sequence[str], curve: Curve, *, policy: str, otlp: str = "", peers: Sequence[str] = ()
) -> None:
    """Write the files that a router reads (docs/architecture.md, Wiring)."""
    secrets = folder / "secrets"
    secrets.mkdir(parents=True)
    (folder / "deployment.json").write_text(json.dumps(resource(replicas=len(workers), policy=policy, otlp=otlp)))
    members = [
        {"uid": f"uid-{n}", "name": f"worker-{n}", "ip": ip, "node": "local", "pool": "worker", "role": "worker"}
        for n, ip in enumerate(workers)
    ]
    frontends = [{"uid": f"bench-frontend-{ip}", "name": f"frontend-{ip}", "ip": ip} for ip in peers]
    (folder / "workers.json").write_text(json.dumps({"workers": members, "frontends": frontends}))
    (secrets / "identity.key").write_bytes(os.urandom(32))
    texts = {
        "engine.key": "bench-engine-key",
        "control.token": CONTROL_TOKEN,
        "router.curve.public": curve.router_public.decode(),
        "router.curve.secret": curve.router_secret.decode(),
        "sidecar.curve.public": curve.sidecar_public.decode(),
    }
    for name, text in texts.items():
        (secrets / name).write_text(text)


def rust(peer: Peer, workers: Sequence[str]) -> Process:
    """Start a Rust router with policy round robin. Raises ``PeerMissingError`` where it cannot be installed."""
    command = ensure(peer) / peer.package
    port = _free_port()
    options = [
        *("launch", "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *workers),
        *("--policy", "round_robin", "--log-level", "error", "--disable-health-check"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(_free_port())),
    ]
    return Process(str(peer), [str(command), *options], "127.0.0.1", port)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
