"""Router processes under test: mmrouter as it is deployed, Rust routers from the package index, and their rig."""

import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx

from bench.child_process import Child, Process
from bench.feed.fake_sidecars import FRONTEND, Curve, FakeSidecars, address
from bench.peer_routers import SGLANG_ROUTER, SMG, Peer, PeerMissingError, ensure
from bench.placing.workload import resource
from bench.serving.load_generator import KEY, chat_body

START_SECONDS = 60.0
POLL_SECONDS = 0.1
MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-qwen2-vl"
ENGINE_PORT = FRONTEND_PORT = 8000
HEALTH_PORT, CONTROL_PORT = 9090, 8001
CONTROL_TOKEN = "bench-control-token"
HEADERS = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
CLIENT = httpx.Client(timeout=5, trust_env=False, headers={"connection": "close"})


class RouterFailedError(Exception):
    """A router did not start or answered wrongly; the message has the end of its log."""


class Server(Process):
    """A process that answers chat requests."""

    def __init__(
        self, name: str, command: Sequence[str], host: str, port: int, environment: dict[str, str] | None = None
    ) -> None:
        super().__init__(name, command, environment)
        self.address: dict[str, str | int] = {"host": host, "port": port}
        """Arguments of the load generator."""
        self.url = f"http://{host}:{port}"

    def wait(self) -> None:
        """Wait until a chat request is answered with 200. Raises :class:`RouterFailedError`."""
        end = time.monotonic() + START_SECONDS
        answer = "nothing"
        while time.monotonic() < end:
            if (status := self.process.poll()) is not None:
                raise RouterFailedError(f"{self.name} ended with status {status}: {self.end_of_log()}")
            try:
                body = chat_body(stream=False)
                status = CLIENT.post(f"{self.url}/v1/chat/completions", content=body, headers=HEADERS).status_code
            except httpx.HTTPError as error:
                answer = str(error)
            else:
                if status == 200:
                    return
                answer = f"status {status}"
            time.sleep(POLL_SECONDS)
        raise RouterFailedError(f"{self.name} still answers {answer} after {START_SECONDS:g} s: {self.end_of_log()}")


class Ours(Server):
    """``mmrouter router`` with a configuration folder as in a pod."""

    def __init__(
        self,
        host: str,
        workers: Sequence[str],
        curve: Curve,
        *,
        policy: str,
        mode: str = "frontend",
        under: Sequence[str] = (),
        peers: Sequence[str] = (),
        api_keys: Sequence[str] = (),
        collector: str = "",
        traced_share: str = "",
    ) -> None:
        """``mode``: ``frontend.mode``. ``under``: a command that runs the router, such as a tracer. ``workers``,
        ``peers``: addresses of engines and of other routers. ``api_keys``: of one tenant each. ``collector``: URL to
        which a share of the requests' spans goes.
        """
        self._config = Path(tempfile.mkdtemp(prefix="mmrouter-bench-"))
        members = [
            {"uid": f"uid-{n}", "name": f"worker-{n}", "ip": ip, "node": "local", "pool": "worker", "role": "worker"}
            for n, ip in enumerate(workers)
        ]
        frontends = [{"uid": f"bench-frontend-{ip}", "name": f"frontend-{ip}", "ip": ip} for ip in peers]
        (self._config / "workers.json").write_text(json.dumps({"workers": members, "frontends": frontends}))
        keys = {"identity.key": os.urandom(32), "engine.key": b"bench-engine-key"}
        keys["control.token"] = CONTROL_TOKEN.encode()
        wanted = resource(replicas=len(workers), policy=policy, mode=mode, collector=collector)
        curve.write_config(self._config, wanted, keys)
        for key in api_keys:
            (self._config / "api-keys").mkdir(exist_ok=True)
            (self._config / "api-keys" / key).write_text(key)
        environment = {
            "MMROUTER_CONFIG": str(self._config),
            "MMROUTER_MODEL_DIR": str(MODEL),
            "POD_NAME": "bench-frontend",
            "POD_UID": f"bench-frontend-{host}",
            "POD_IP": host,
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": traced_share,
        }
        self.host = host
        command = [*under, sys.executable, "-m", "mmrouter_router"]
        super().__init__("mmrouter", command, host, FRONTEND_PORT, environment)

    def __exit__(self, *details: object) -> None:
        super().__exit__(*details)
        shutil.rmtree(self._config)

    def wait(self) -> None:
        super().wait()
        if not self.ready():
            raise RouterFailedError(f"{self.name} answers before it is ready")

    def ready(self) -> bool:
        try:
            return CLIENT.get(f"http://{self.host}:{HEALTH_PORT}/readyz").status_code == 200
        except httpx.HTTPError:
            return False

    def held_blocks(self) -> dict[str, int]:
        """Return the number of blocks that the index holds of each verified worker, by its uid."""
        headers = {"authorization": f"Bearer {CONTROL_TOKEN}"}
        workers = CLIENT.get(f"http://{self.host}:{CONTROL_PORT}/control/state", headers=headers).json()["workers"]
        return {row["uid"]: sum(row["held"].values()) for row in workers if row["standing"] == "verified"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class CpuCost:
    """CPU seconds of a process and the tokens or requests that it served."""

    cpu: float = 0.0
    count: int = 0

    @property
    def us(self) -> float:
        """CPU microseconds per token or request."""
        return self.cpu / self.count * 1e6

    @contextmanager
    def of(self, count: int, *processes: Process) -> Iterator[None]:
        """Add what processes use during the block, in which they serve so many tokens or requests."""
        before = sum(process.cpu() for process in processes)
        yield
        self.cpu += sum(process.cpu() for process in processes) - before
        self.count += count


class ServingRig(ExitStack):
    """One process that serves engines, their sidecars' end of the feed, and routers before them; all end together."""

    def __init__(self, engines: int = 1) -> None:
        super().__init__()
        self._hosts = [address(number) for number in range(engines)]
        self.curve = Curve.fresh()
        self.missing: list[str] = []
        """Why peers could not be started."""

    def __enter__(self) -> Self:
        super().__enter__()
        command = [sys.executable, "-m", "bench.serving.minimal_engine", str(ENGINE_PORT), *self._hosts]
        self.engine = self.start(Server("engine", command, address(0), ENGINE_PORT))
        self.enter_context(FakeSidecars(len(self._hosts), self.curve))
        return self

    def ours(
        self,
        host: str = FRONTEND,
        *,
        policy: str,
        mode: str = "frontend",
        under: Sequence[str] = (),
        peers: Sequence[str] = (),
        api_keys: Sequence[str] = (),
        traced_share: str = "",
    ) -> Ours:
        """Return an mmrouter process in front of the engine; not waited for. The engine takes its spans, too."""
        return Ours(
            host,
            self._hosts,
            self.curve,
            policy=policy,
            mode=mode,
            under=under,
            peers=peers,
            api_keys=api_keys,
            collector=f"http://{self._hosts[0]}:{ENGINE_PORT}" if traced_share else "",
            traced_share=traced_share,
        )

    def start(self, process: Server) -> Server:
        """Wait until a process answers; it ends with the rig."""
        self.enter_context(process).wait()
        return process

    def rust_routers(self) -> list[Peer]:
        """Return the Rust routers that are installed here; :attr:`missing` has the reasons for the others."""
        installed = []
        for peer in (SGLANG_ROUTER, SMG):
            try:
                ensure(peer)
                installed.append(peer)
            except PeerMissingError as error:
                self.missing.append(str(error))
        return installed

    def rust_router(self, peer: Peer, routing: Sequence[str] = ("--policy", "round_robin")) -> Server:
        """Return a Rust router in front of the engines; not waited for. Raises ``PeerMissingError`` where it cannot be
        installed.

        ``routing``: its options for the choice of engines.
        """
        command, port = ensure(peer) / peer.package, free_port()
        options = [
            *("launch", "--host", "127.0.0.1", "--port", str(port)),
            *("--worker-urls", *(f"http://{engine}:{ENGINE_PORT}" for engine in self._hosts)),
            *(*routing, "--log-level", "error", "--disable-health-check"),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
        ]
        return Server(str(peer), [str(command), *options], "127.0.0.1", port)

    def started_rust_routers(self) -> dict[str, Server]:
        return {str(peer): self.start(self.rust_router(peer)) for peer in self.rust_routers()}

    def load_generator(self) -> Child:
        return self.enter_context(Child.module("bench.serving.load_generator"))
