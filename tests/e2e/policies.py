"""NetworkPolicies: enforced on a node of our own by kube-router's controller, and tried from inside pods."""

import json
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.access import Access
from cluster.controlplane import end
from e2e.deploying import Deployed
from e2e.node import NAME, Node
from waiting import wait_for

CHAINS = ("KUBE-ROUTER-INPUT", "KUBE-ROUTER-FORWARD", "KUBE-ROUTER-OUTPUT")
START_SECONDS = 60
CONNECT = """
import json, socket, sys
def connects(host, port):
    try:
        socket.create_connection((host, port), 3).close()
    except OSError:
        return False
    return True
print(json.dumps([connects(*each) for each in json.load(sys.stdin)]))
"""
"""Prints for each address and port whether a connection is made: plugins refuse, or drop without an answer."""
Target = tuple[str, int]


@contextmanager
def enforced(node: Node, program: Path) -> Iterator[None]:
    """Enforce the NetworkPolicies of every namespace until the block ends. ``program``: the controller that
    ``hack/cluster/go_programs.py`` builds. Raises ``TimeoutError`` with its log.
    """
    command = [program, f"--kubeconfig={node.kubeconfig}", f"--node={NAME}", f"--services={node.place.services}"]
    process = node.spawn("policies", command)

    def filters() -> bool:
        assert process.poll() is None, node.log_file("policies").read_text()[-3000:]
        return all(iptables(node, "-S", chain) for chain in CHAINS)

    try:
        wait_for(filters, START_SECONDS, "the controller has its chains")
        yield
    finally:
        end(process)
        for chain in CHAINS:  # nothing is filtered when the rules that lead to all others are gone
            iptables(node, "-F", chain)


def iptables(node: Node, *arguments: str) -> bool:
    argv = [*node.place.enter, "iptables", "-w", "5", *arguments]
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


def connects(pod: Deployed, container: str, targets: Iterable[Target]) -> dict[Target, bool]:
    """Return for each address and port whether the pod, ``pod.name``, connects to it."""
    asked = list(targets)
    done = pod.execute(pod.name, container, "python3", "-c", CONNECT, stdin=json.dumps(asked))
    assert done.returncode == 0, done.stderr
    return dict(zip(asked, json.loads(done.stdout), strict=True))


def enforces(cluster: Access, pod: Deployed, container: str, target: Target) -> bool:
    """Whether the cluster's network plugin enforces policies: a pod that connects to a target does no longer, in a
    namespace that lets nothing out.
    """
    assert connects(pod, container, [target])[target]
    place = f"/apis/networking.k8s.io/v1/namespaces/{pod.namespace}/networkpolicies"
    body = {"metadata": {"name": "nothing-out"}, "spec": {"podSelector": {}, "policyTypes": ["Egress"]}}
    cluster.request("POST", place, body).raise_for_status()
    try:
        wait_for(lambda: not connects(pod, container, [target])[target], 10, "nothing is let out")
    except TimeoutError:
        return False
    finally:
        cluster.request("DELETE", f"{place}/nothing-out").raise_for_status()
    wait_for(lambda: connects(pod, container, [target])[target], 10, "without the policy everything is let out")
    return True
