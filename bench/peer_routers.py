"""Install other routers, each into an environment of its own below the cache, and drive Dynamo as a peer process.

Folders are ``${MMROUTER_CACHE:-${XDG_CACHE_HOME:-~/.cache}/mmrouter}/peers/<name>-<version>``. The variable
``MMROUTER_BENCH_PEERS`` selects: ``install`` (default) installs missing peers, ``present`` uses installed ones only,
``none`` runs no peer.
"""

import os
import shutil
import subprocess
import sys
import venv
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import zmq

from bench.child_process import Child, ChildError
from bench.placing.workload import BLOCK_SIZE, BlockWorkload, Event, vllm_payload

MODE = "MMROUTER_BENCH_PEERS"
MODES = ("install", "present", "none")
INSTALL_SECONDS, SUBSCRIBE_SECONDS = 300, 20
SCRIPT = Path(__file__).with_name("dynamo_process.py")


class PeerMissingError(Exception):
    """A peer cannot be run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Peer:
    package: str
    version: str

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


_refused: dict[Peer, str] = {}
"""Failed installations of this run and their reasons; they are not tried again."""

DYNAMO = Peer("ai-dynamo-runtime", "1.6.1")
DYNAMO_FRONTEND = Peer("ai-dynamo", "1.4.2")
"""1.5 and 1.6 require releases of aisimulate that the package index does not have."""
SGLANG_ROUTER = Peer("sglang-router", "0.3.2")
SMG = Peer("smg", "1.13.0")


def folder(peer: Peer) -> Path:
    """Return the peer's environment, which may not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    cache = Path(os.environ.get("MMROUTER_CACHE") or Path(base) / "mmrouter")
    return cache / "peers" / f"{peer.package}-{peer.version}"


def ensure(peer: Peer) -> Path:
    """Return the ``bin`` folder of the peer's environment. Raises :class:`PeerMissingError`."""
    mode = os.environ.get(MODE, "install")
    if mode not in MODES:
        raise ValueError(f"{MODE} is one of {', '.join(MODES)}, not {mode!r}")
    home = folder(peer)
    done = home / "complete"
    if mode == "none":
        raise PeerMissingError(f"peers are switched off ({MODE}=none)")
    if not done.exists():
        if mode == "present":
            raise PeerMissingError(f"{peer} is not installed ({MODE}=present)")
        if peer in _refused:
            raise PeerMissingError(_refused[peer])
        try:
            _install(peer, home)
        except PeerMissingError as error:
            _refused[peer] = str(error)
            raise
        done.touch()
    return home / "bin"


def _install(peer: Peer, home: Path) -> None:
    sys.stderr.write(f"bench: installing {peer} into {home}\n")
    shutil.rmtree(home, ignore_errors=True)  # an installation that was interrupted
    venv.create(home, with_pip=True)
    pip = (str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--retries", "1")
    wanted = ("--quiet", "--only-binary", ":all:", f"{peer.package}=={peer.version}")
    command = [*pip, "--timeout", "20", "install", *wanted]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise PeerMissingError(f"{peer} could not be installed within {INSTALL_SECONDS} s") from error
    if done.returncode != 0:
        sys.stderr.write(done.stderr)
        raise PeerMissingError(f"pip cannot install {peer} here")


class Dynamo(Child):
    """The running service with one event socket per worker, as engines have them. Raises ``PeerMissingError`` where it
    cannot be installed.
    """

    def __init__(self, load: BlockWorkload) -> None:
        python = ensure(DYNAMO) / "python"
        # -P keeps this folder off sys.path. No log: writing it would cost the peer time.
        super().__init__(str(DYNAMO), [str(python), "-P", str(SCRIPT)], {"DYN_LOG": "off", "RUST_LOG": "off"})
        self._work, self._sent = load, [0] * load.workers
        self._context = zmq.Context()
        self._sockets = [self._context.socket(zmq.XPUB) for _ in self._sent]  # shows when the peer has subscribed

    def __exit__(self, *details: object) -> None:
        super().__exit__(*details)
        self._context.destroy(linger=0)

    def start(self) -> None:
        """Start the service with the workload's workers and probes. Raises :class:`ChildError`."""
        for socket in self._sockets:
            socket.setsockopt(zmq.SNDHWM, 0)  # no loss: the peer's answers are compared
            socket.bind("tcp://127.0.0.1:*")
        endpoints = [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in self._sockets]
        self.call("start", block_size=BLOCK_SIZE, endpoints=endpoints)
        for socket in self._sockets:
            if not socket.poll(SUBSCRIBE_SECONDS * 1000):
                raise ChildError(f"no subscription within {SUBSCRIBE_SECONDS} s")
            socket.recv()
        self.load(self._work.probes)

    def publish(self, batches: Iterable[Sequence[Event]]) -> None:
        """Publish batches, each of one worker, as vLLM frames them."""
        for batch in batches:
            worker = batch[0].worker
            self._sockets[worker].send_multipart([b"", self._sent[worker].to_bytes(8, "big"), vllm_payload(*batch)])
            self._sent[worker] += 1

    def load(self, prompts: Sequence["array[int]"]) -> None:
        """Hand over prompts; other methods refer to them by number."""
        path = self.folder / "prompts"
        path.write_bytes(b"".join(ids.tobytes() for ids in prompts))
        self.call("load", path=str(path), lengths=[len(ids) for ids in prompts])

    def settle(self) -> float:
        """Wait until every worker shows all blocks of its probe; return the CPU seconds used so far."""
        return float(self.call("settle", blocks=[len(ids) // BLOCK_SIZE for ids in self._work.probes])["cpu"])


@contextmanager
def fed_dynamo(load: BlockWorkload) -> Iterator[Dynamo]:
    """Start the service with the workload's workers and probes."""
    with Dynamo(load) as dynamo:
        dynamo.start()
        yield dynamo
