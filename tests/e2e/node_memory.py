"""Claims of a node's memory, provided as an administrator does: folders on its tmpfs, and `local` volumes of them."""

import copy
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from cluster.access import Access
from e2e.deploying import RESTRICTED, example, run_pod
from e2e.endpoints import manifest
from e2e.staged_deployments import PRIVILEGED

TMPFS = "/dev/shm"
HOSTNAME = "kubernetes.io/hostname"
SIZE = {"storage": "64Gi"}
POD = "administrator"
LIST = "import os, sys; print(*(f'{at}/{name}' for at, _, names in os.walk(sys.argv[1]) for name in names), sep='\\n')"
VOLUMES = "/api/v1/persistentvolumes"


@dataclass(frozen=True)
class NodeMemory:
    """A namespace that enforces `restricted`, for claims of a node's memory, and the administrator's view of it."""

    cluster: Access
    namespace: str
    own_namespace: str
    folder: str

    def shell(self, *command: str) -> str:
        """Run a command on the node's tmpfs as root and return its output. Raises ``AssertionError``."""
        done = self.cluster.kubectl("-n", self.own_namespace, "exec", POD, "--", *command)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def files(self, claim: str) -> list[str]:
        return self.shell("python3", "-c", LIST, f"{self.folder}/{claim}").split()

    def provide(self, claim: str, mode: str, storage_class: str) -> None:
        """Make the volume of a claim, which may not exist yet. Raises ``httpx.HTTPStatusError``."""
        self.shell("mkdir", "-p", f"{self.folder}/{claim}")
        node = self.cluster.read(f"/api/v1/namespaces/{self.own_namespace}/pods/{POD}")["spec"]["nodeName"]
        labels = self.cluster.read(f"/api/v1/nodes/{node}")["metadata"]["labels"]
        here = {"key": HOSTNAME, "operator": "In", "values": [labels[HOSTNAME]]}
        spec = {
            **{"capacity": SIZE, "accessModes": [mode], "storageClassName": storage_class},
            **{"persistentVolumeReclaimPolicy": "Retain", "local": {"path": f"{self.folder}/{claim}"}},
            "claimRef": {"namespace": self.namespace, "name": claim},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
        }
        body = {"metadata": {"name": f"{self.namespace}-{claim}"}, "spec": spec}
        self.cluster.request("POST", VOLUMES, body).raise_for_status()

    def claim(self, name: str, mode: str, storage_class: str) -> None:
        """Make a claim. Raises ``httpx.HTTPStatusError``."""
        spec = {"accessModes": [mode], "storageClassName": storage_class, "resources": {"requests": SIZE}}
        body = {"metadata": {"name": name}, "spec": spec}
        self.cluster.request("POST", self.claims, body).raise_for_status()

    @property
    def claims(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/persistentvolumeclaims"

    def remove(self) -> None:
        for volume in self.cluster.read(VOLUMES)["items"]:
            if volume["metadata"]["name"].startswith(f"{self.namespace}-"):
                self.cluster.request("DELETE", f"{VOLUMES}/{volume['metadata']['name']}")
        self.shell("rm", "-rf", self.folder)


@contextmanager
def node_memory(cluster: Access, node: str) -> Iterator[NodeMemory]:
    with ExitStack() as stack:
        own_namespace = stack.enter_context(cluster.namespace(**PRIVILEGED))
        run_pod(cluster, own_namespace, _administrator(example()["spec"]["engine"]["image"], node))
        namespace = stack.enter_context(cluster.namespace(**RESTRICTED))
        made = NodeMemory(cluster, namespace, own_namespace, f"{TMPFS}/{namespace}-{uuid.uuid4().hex}")
        stack.callback(made.remove)
        yield made


def _administrator(image: str, node: str) -> dict[str, Any]:
    pod = copy.deepcopy(manifest(image))
    mount = {"name": "memory", "mountPath": TMPFS}
    shell = {"name": "shell", "image": image, "command": ["sleep", "infinity"], "volumeMounts": [mount]}
    volume = {"name": "memory", "hostPath": {"path": TMPFS}}
    pod["metadata"]["name"] = POD
    pod["spec"] |= {"nodeName": node, "securityContext": {"runAsUser": 0}, "containers": [shell], "volumes": [volume]}
    return pod


def default_class(cluster: Access) -> str:
    """Return the storage class of claims that name none; empty without one, as then in claim and volume."""
    mark = "storageclass.kubernetes.io/is-default-class"
    classes: list[Mapping[str, Any]] = cluster.read("/apis/storage.k8s.io/v1/storageclasses")["items"]
    marked = (each["metadata"] for each in classes if each["metadata"].get("annotations", {}).get(mark) == "true")
    return next((str(each["name"]) for each in marked), "")
