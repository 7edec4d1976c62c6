"""A real one-node Kubernetes: the control plane and, in a network namespace, containerd, kubelet, kube-proxy, CoreDNS.

Nothing is shared with another Kubernetes of the machine: sockets, folders, mounts, control groups and addresses are its
own, and all of it goes with the process that started it, however that ends.
"""

import asyncio
import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from cluster.access import make_certificate, make_keys
from cluster.controlplane import ControlPlane, Place, end
from e2e.network import Network, make_group, network
from waiting import wait_for

from mmrouter_cli.local.process import Guard

NAME = "node0"
PAUSE = "localhost/mmrouter-pause:1"
# Folders whose names kubelet, containerd and the CNI plugins have built in, and the memory in which pods share files.
PRIVATE = ("/var/lib/kubelet", "/var/lib/cni", "/run/containerd", "/var/log/containers", "/dev/shm")
MOUNTS = 'for folder; do mount -t tmpfs tmpfs "$folder" || exit; done; exec sleep infinity'


@dataclass(frozen=True)
class Programs:
    """Where commands are: Kubernetes' control plane, the node's (``hack/cluster/go_programs.py``), CNI plugins."""

    kube: Path
    node: Path
    cni: Path


class Node(ControlPlane):
    """A control plane with a node; :func:`node` makes and ends it."""

    USERS: Mapping[str, tuple[str, str]] = {
        **ControlPlane.USERS,
        "kubelet": (f"system:node:{NAME}", "system:nodes"),
        "proxy": ("system:kube-proxy", ""),
        "dns": ("dns", "system:masters"),
    }

    def __init__(self, folder: Path, programs: Programs, network: Network, guard: Guard) -> None:
        self.programs, self.network = programs, network
        self.runtime = folder / "containerd"
        self.socket = self.runtime / "containerd.sock"
        super().__init__(folder, programs.kube, Place(network.node, network.services, network.enter), guard)
        # They stay, empty: with a folder that is removed, the mounts on it go from every namespace, of other nodes too.
        for path in PRIVATE:
            Path(path).mkdir(exist_ok=True)
        # A mount namespace without processes is gone: this one sleeps in it.
        unshare = ["unshare", "--mount", "--propagation=slave", "sh", "-c", MOUNTS, "sh", *PRIVATE]
        self._mounts = self.spawn("mounts", unshare)
        comm = Path(f"/proc/{self._mounts.pid}/comm")
        wait_for(lambda: comm.read_text().strip() == "sleep", 10, "the node has its mounts")

    def close(self) -> None:
        """End everything but the pods, which the block of :func:`node` ends."""
        super().close()
        end(self._mounts, signal.SIGKILL)

    # -- containers --------------------------------------------------------------------------------------------------

    def load(self, archive: Path) -> None:
        done = self.ctr("images", "import", archive)
        assert done.returncode == 0, done.stderr

    def ctr(self, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
        """Run containerd's own command in Kubernetes' namespace; the caller looks at ``returncode``."""
        argv = ["ctr", f"--address={self.socket}", "--namespace=k8s.io", *map(str, arguments)]
        return subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)

    # -- components --------------------------------------------------------------------------------------------------

    def make_keys(self) -> None:
        pki = self.folder / "pki"
        make_keys(pki, self.address, [self.network.first_service])
        make_certificate(pki, "kubelet", f"/CN={NAME}", [f"DNS:{NAME}", f"IP:{self.address}"])
        make_certificate(pki, "kubelet-client", "/O=system:masters/CN=apiserver")

    def write_files(self) -> None:
        super().write_files()
        for path in (self.runtime / "net.d", self.folder / "kubelet"):
            path.mkdir(parents=True)
        (self.runtime / "config.toml").write_text(
            CONTAINERD.format(folder=self.runtime, pause=PAUSE, cni=self.programs.cni)
        )
        (self.runtime / "net.d" / "10-pods.conflist").write_text(json.dumps(self._pod_network()))
        (self.folder / "kubelet.yaml").write_text(yaml.safe_dump(self._kubelet()))
        (self.folder / "proxy.yaml").write_text(yaml.safe_dump(self._proxy()))
        (self.folder / "Corefile").write_text(
            f".:53 {{\n bind {self.address}\n errors\n cache 1\n kubernetes cluster.local in-addr.arpa {{\n"
            f"  kubeconfig {self.folder / 'dns.kubeconfig'} test\n  pods insecure\n  ttl 1\n }}\n}}\n"
        )

    def commands(self) -> dict[str, list[str]]:
        among = ("nsenter", f"--mount=/proc/{self._mounts.pid}/ns/mnt")
        kubelet = [
            *(*among, str(self.programs.node / "kubelet"), f"--config={self.folder / 'kubelet.yaml'}"),
            *(f"--kubeconfig={self.folder / 'kubelet.kubeconfig'}", f"--root-dir={self.folder / 'kubelet'}"),
            *(f"--hostname-override={NAME}", f"--node-ip={self.address}", "--v=2"),
        ]
        return {
            **super().commands(),
            "containerd": [*among, "containerd", f"--config={self.runtime / 'config.toml'}"],
            "kubelet": kubelet,
            "proxy": [str(self.programs.node / "kube-proxy"), f"--config={self.folder / 'proxy.yaml'}"],
            "dns": [str(self.programs.node / "coredns"), f"-conf={self.folder / 'Corefile'}"],
        }

    def is_up(self, name: str) -> bool:
        match name:
            case "containerd":
                return self.ctr("version").returncode == 0
            case "kubelet":
                return self.ready()
        return super().is_up(name)

    def ready(self) -> bool:
        answer = self.request("GET", f"/api/v1/nodes/{NAME}")
        if not answer.is_success:
            return False
        body = answer.json()
        states = {each["type"]: each["status"] for each in body["status"].get("conditions") or []}
        return states.get("Ready") == "True" and not body["spec"].get("taints")

    def apiserver_options(self) -> list[str]:
        pki = self.folder / "pki"
        return [
            f"--kubelet-client-certificate={pki / 'kubelet-client.crt'}",
            f"--kubelet-client-key={pki / 'kubelet-client.key'}",
            f"--kubelet-certificate-authority={self.ca}",
            *("--kubelet-preferred-address-types=InternalIP", "--enable-admission-plugins=NodeRestriction"),
        ]

    def controller_options(self) -> list[str]:
        return []

    # -- configuration -----------------------------------------------------------------------------------------------

    def _pod_network(self) -> dict[str, Any]:
        addresses = {
            "type": "host-local",
            "dataDir": str(self.runtime / "addresses"),
            "ranges": [[{"subnet": self.network.pods}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        }
        bridge = {"type": "bridge", "bridge": "pods0", "isGateway": True, "ipMasq": True, "hairpinMode": True}
        ports = {"type": "portmap", "capabilities": {"portMappings": True}}
        return {"cniVersion": "0.4.0", "name": "pods", "plugins": [{**bridge, "ipam": addresses}, ports]}

    def _kubelet(self) -> dict[str, Any]:
        pki = self.folder / "pki"
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": self.address,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(self.ca)},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(pki / "kubelet.crt"),
            "tlsPrivateKeyFile": str(pki / "kubelet.key"),
            "containerRuntimeEndpoint": f"unix://{self.socket}",
            "clusterDomain": "cluster.local",
            "clusterDNS": [self.address],
            "resolvConf": "",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.network.name}",
            "enforceNodeAllocatable": [],
            "failCgroupV1": False,
            "failSwapOn": False,
            # What a root without every capability may not set is a warning then.
            "oomScoreAdj": 0,
            "featureGates": {"KubeletInUserNamespace": True},
            # The machine's disk may be as full as it likes.
            "evictionHard": {
                "memory.available": "100Mi",
                **dict.fromkeys(("nodefs.available", "nodefs.inodesFree", "imagefs.available"), "1%"),
            },
            # A kubelet deletes the logs of pods that it does not know: those of another node, were the folder shared.
            "podLogsDir": str(self.folder / "pods"),
            "imageGCHighThresholdPercent": 100,
            # Volumes are looked at once a minute by default, for which a test would have to wait.
            "volumeStatsAggPeriod": "5s",
            "serializeImagePulls": False,
            "registryPullQPS": 0,
            "eventRecordQPS": 0,
            "kubeAPIQPS": 500,
            "kubeAPIBurst": 1000,
        }

    def _proxy(self) -> dict[str, Any]:
        return {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": str(self.folder / "proxy.kubeconfig")},
            "mode": "iptables",
            "iptables": {"minSyncPeriod": "0s", "syncPeriod": "30s"},
            "clusterCIDR": self.network.pods,
            "hostnameOverride": NAME,
            # Settings of the whole machine stay as they are.
            "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
            "bindAddress": self.address,
            "nodePortAddresses": ["primary"],
            "healthzBindAddress": "127.0.0.1:10256",
            "metricsBindAddress": "127.0.0.1:10249",
        }


CONTAINERD = """\
version = 2
root = "{folder}/root"
state = "{folder}/state"
[grpc]
  address = "{folder}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  disable_apparmor = true
  # A root without CAP_SYS_RESOURCE may not make a process less likely to be killed.
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni}"
    conf_dir = "{folder}/net.d"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
"""


@contextmanager
def reaper(name: str) -> Iterator[None]:
    """Have what a node leaves behind removed, at the block's end or this process's (``network.py``)."""
    script = Path(__file__).with_name("network.py")
    process = subprocess.Popen([sys.executable, str(script), name], stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    try:
        yield
    finally:
        process.stdin.close()
        process.wait()


@contextmanager
def node(folder: Path, programs: Programs, pause: Path) -> Iterator[Node]:
    """Run a cluster of one node until the block ends; the block begins when the node is Ready. ``folder``: where it
    keeps everything; made, and left for those who look for the logs. ``pause``: the archive of an image :data:`PAUSE`
    that sleeps, for the container that holds a pod's namespaces. Raises :class:`cluster.controlplane.StartError`.
    """
    guard = Guard(uuid.uuid4().hex)
    try:
        with network() as net, reaper(net.name):
            make_group(net.name)
            folder.mkdir(parents=True, exist_ok=True)
            plane = Node(folder, programs, net, guard)
            try:
                plane.start("etcd", "containerd", "apiserver")
                plane.load(pause)
                plane.start("controller-manager", "scheduler", "proxy", "dns", "kubelet")
                yield plane
            finally:
                plane.close()
    finally:
        asyncio.run(guard.close())
