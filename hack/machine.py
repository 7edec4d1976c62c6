"""What a machine needs to be the node of a cluster, by its Debian packages. Standard library only."""

import shutil
from pathlib import Path

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
