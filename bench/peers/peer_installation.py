"""Installs other routers, each into an environment of its own below the cache.

Folders are ``${MMROUTER_CACHE:-${XDG_CACHE_HOME:-~/.cache}/mmrouter}/peers/<name>-<version>``. The variable
``MMROUTER_BENCH_PEERS`` selects: ``install`` (default) installs missing peers, ``present`` uses installed ones only,
``none`` runs no peer.
"""

import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

MODE = "MMROUTER_BENCH_PEERS"
MODES = ("install", "present", "none")
INSTALL_SECONDS = 300


class PeerMissingError(Exception):
    """A peer cannot be run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A package and the version that is compared with."""

    package: str
    version: str

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


_refused: dict[Peer, str] = {}
"""Failed installations of this run and their reasons; they are not tried again."""

DYNAMO = Peer("ai-dynamo-runtime", "1.6.1")
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
