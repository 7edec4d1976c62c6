"""Make what a one-node cluster needs beside its control plane: kubelet, kube-proxy and CoreDNS, from their Go modules.

    python tests/tools/node_env.py            # makes it, or finds it ready; prints the folder with the commands
    python tests/tools/node_env.py --where    # prints the path only, makes nothing

The commands lie outside the checkout, in ``node`` of the cache (``vllm_env.py`` says where that is), and are built
under a lock, once: about 2 minutes on 2 cores, 0.25 GB. Kubernetes is of the version of ``kube/go.mod``, which is the
last that works with the containerd of Debian bookworm. What a node needs of the machine (root, containerd and so on) is
looked for first, so that the reason comes before a long build. Exit status as of ``vllm_env.py``.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from kube_env import build, find_go, go_env, recipe
from vllm_env import CannotMakeError, cache_dir, last_line, locked, main, note

COMMANDS = ("kubelet", "kube-proxy")
COREDNS = "1.15.0"
FREE_GB = 5  # 0.25 GB stay; the rest is Go's modules and build cache
PROGRAMS = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "busybox": "busybox-static",
    "etcd": "etcd-server",
    "openssl": "openssl",
}
"""Command -> the Debian package that has it."""
CNI_FOLDERS = ("/usr/lib/cni", "/opt/cni/bin")
CNI_PLUGINS = ("bridge", "host-local", "portmap")


def env_dir() -> Path:
    return cache_dir() / "node" / node_recipe()[:8]


def node_recipe() -> str:
    """Return a digest of everything that decides what the folder holds."""
    return recipe(*COMMANDS, COREDNS)


def cni_folder() -> Path | None:
    """Return the folder with the plugins that a pod's network takes."""
    folders = (Path(folder) for folder in CNI_FOLDERS)
    return next((folder for folder in folders if all((folder / name).is_file() for name in CNI_PLUGINS)), None)


def missing() -> list[str]:
    """Return what this machine lacks to be a node, each with the Debian package that has it."""
    lacks = [f"{name} (Debian: {package})" for name, package in PROGRAMS.items() if shutil.which(name) is None]
    if cni_folder() is None:
        lacks.append("the CNI plugins (Debian: containernetworking-plugins)")
    return lacks


def make(folder: Path) -> None:
    """Build the commands unless they are there. Raises :class:`CannotMakeError`."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise CannotMakeError("a node of a cluster needs root on Linux")
    if lacks := missing():
        raise CannotMakeError(f"a node of a cluster needs {', '.join(lacks)}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent / f"{folder.name}.lock"):
        stamp = folder / "mmrouter-recipe"
        if stamp.is_file() and stamp.read_text() == node_recipe():
            return
        go = find_go()
        free = shutil.disk_usage(folder.parent).free / 1e9
        if free < FREE_GB:
            raise CannotMakeError(
                f"{folder.parent} has {free:.1f} GB free, the build of a node's commands needs {FREE_GB}"
            )
        # A half-made folder is never mended: the stamp is written last, and without it everything is made anew.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        note(f"building kubelet, kube-proxy and CoreDNS into {folder} (once, up to 4 minutes)")
        for command in COMMANDS:
            build(go, command, folder)
        install_coredns(go, folder)
        stamp.write_text(node_recipe())


def install_coredns(go: str, folder: Path) -> None:
    env = {**go_env(), "GOFLAGS": "-trimpath -buildvcs=false", "GOBIN": str(folder)}
    command = [go, "install", "-ldflags", "-s -w", f"github.com/coredns/coredns@v{COREDNS}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=env)
    if done.returncode != 0:
        raise CannotMakeError(f"go install of coredns failed: {last_line(done.stderr)}")


if __name__ == "__main__":
    sys.exit(main("the commands of a cluster's node", env_dir(), make))
