"""Make what a one-node cluster needs beside its control plane: kubelet, kube-proxy and CoreDNS, from their Go modules.

    python hack/node_env.py            # makes it, or finds it ready; prints the folder with the commands
    python hack/node_env.py --where    # prints the path only, makes nothing

The commands lie outside the checkout, in ``node`` of the cache (``vllm_env.py`` says where that is), and are built
under a lock, once: about 2 minutes on 2 cores, 0.25 GB. Kubernetes is of the version of ``kube/go.mod``, which is the
last that works with the containerd of Debian bookworm. What a node needs of the machine (root, and ``machine.py``) is
looked for first, so that the reason comes before a long build. Exit status as of ``vllm_env.py``.
"""

import os
import shutil
import sys
from pathlib import Path

from kube_env import build, find_go, install, recipe
from machine import missing
from vllm_env import CannotMakeError, cache_dir, locked, main, note

COMMANDS = ("kubelet", "kube-proxy")
COREDNS = "1.15.0"
FREE_GB = 5  # 0.25 GB stay; the rest is Go's modules and build cache


def env_dir() -> Path:
    return cache_dir() / "node" / node_recipe()[:8]


def node_recipe() -> str:
    """Return a digest of everything that decides what the folder holds."""
    return recipe(*COMMANDS, COREDNS)


def make(folder: Path) -> None:
    """Build the commands unless they are there. Raises :class:`CannotMakeError`, :class:`FailedError`."""
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
        install(go, f"github.com/coredns/coredns@v{COREDNS}", "-s -w", folder)
        stamp.write_text(node_recipe())


if __name__ == "__main__":
    sys.exit(main("the commands of a cluster's node", env_dir(), make))
