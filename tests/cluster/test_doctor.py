"""`mmrouter doctor` on the real API server: each trouble is made, seen and gone again; and it writes nothing."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.controlplane import ControlPlane
from cluster.hollow_kubelet import Hollow
from cluster.operators import BRIEF, Replica, diagnosed, holder, mmrouter, operator
from cluster.resources import apply, condition, make_account, resource
from waiting import wait_for

from mmrouter_cli.status.control_api import Unread, open_frontends

SECONDS = 30
MERGE = "application/merge-patch+json"


@pytest.fixture(scope="module")
def operating(crd: ControlPlane, kubelet: Hollow) -> Iterator[Replica]:
    with operator(crd) as replica:
        yield replica


@pytest.fixture
def plane(operating: Replica) -> ControlPlane:
    return operating.plane


# The first two need the Lease for themselves; the operator of the others starts after them.


def test_an_operator_that_ended_is_a_problem(crd: ControlPlane) -> None:
    with operator(crd, "short-lived") as replica:
        assert diagnosed(crd, "-n", "default").seen("operator") == []
        replica.stop()
        wait_for(lambda: holder(crd) == "", SECONDS, "the lease is released")
        assert "has no holder" in diagnosed(crd, "-n", "default").seen("operator")[0]


def test_a_paused_operator_is_seen_by_its_lease(crd: ControlPlane) -> None:
    with operator(crd, "asleep", options=BRIEF) as replica:
        replica.pause()
        # Its Lease lasts 6 s, and 5 more are granted to clocks.
        wait_for(lambda: diagnosed(crd, "-n", "default").seen("operator"), SECONDS, "the old Lease is seen", every=1)


def pool(kind: str = "nvidia", replicas: int = 1, **fields: Any) -> dict[str, Any]:
    return {"name": "worker", "role": "worker", "replicas": replicas, "accelerator": {"kind": kind}, **fields}


@contextmanager
def spare(plane: ControlPlane, kubelet: Hollow, labels: Mapping[str, str] | None = None) -> Iterator[None]:
    """A node with two devices that no other test's pods ask for, until the block ends."""
    kubelet.node("spare", labels, {"habana.ai/gaudi": "2"})
    try:
        yield
    finally:
        plane.request("DELETE", "/api/v1/nodes/spare")


def settled(plane: ControlPlane, namespace: str, **spec: Any) -> None:
    apply(plane, namespace, resource(**spec))
    wait_for(lambda: condition(plane, "Ready", namespace), SECONDS, "the deployment is judged")


def test_a_deployment_whose_pods_run_has_no_problem(plane: ControlPlane, namespace: str) -> None:
    settled(plane, namespace, pools=[pool()])

    def running() -> int:
        return sum(pod["status"].get("phase") == "Running" for pod in plane.pods(namespace))

    wait_for(lambda: running() == 2, SECONDS, "both pods run")
    report = diagnosed(plane, "demo", "-n", namespace)
    assert report.problems == []
    assert report.seen("definition", "ok")
    assert report.seen("operator", "ok")[0].startswith("operator leads by the Lease mmrouter-system/mmrouter-operator")
    assert any("node-" in seen for seen in report.seen("nodes", "ok"))
    # Hollow pods do not answer, which is a warning and no problem.
    assert "cannot be queried" in report.seen("frontends", "warning")[0]


def test_doctors_own_advice_for_an_unlabelled_node_and_a_taint_gets_the_pod_a_node(
    plane: ControlPlane, kubelet: Hollow, namespace: str
) -> None:
    with spare(plane, kubelet):
        taints = [{"key": "team", "value": "vision", "effect": "NoSchedule"}]
        plane.request("PATCH", "/api/v1/nodes/spare", {"spec": {"taints": taints}}, MERGE).raise_for_status()
        wanted = pool("gaudi", image="registry.example/vllm-gaudi:1")
        settled(plane, namespace, pools=[wanted])
        advice = diagnosed(plane, "demo", "-n", namespace).advice("nodes")
        command = advice[0].partition("kubectl ")[2]
        assert command == "label node spare intel.feature.node.kubernetes.io/gaudi=true"
        assert plane.kubectl(*command.split()).returncode == 0
        advice = diagnosed(plane, "demo", "-n", namespace).advice("nodes")
        toleration = yaml.safe_load(advice[0].partition(": ")[2])
        apply(plane, namespace, resource(pools=[{**wanted, "tolerations": [toleration]}]))
        seen = "pool worker: 1 of 1 pods have a node, on spare"
        wait_for(lambda: seen in diagnosed(plane, "demo", "-n", namespace).seen("nodes", "ok"), SECONDS, seen, every=1)


def test_devices_that_others_hold_are_not_free(plane: ControlPlane, kubelet: Hollow, namespace: str) -> None:
    with spare(plane, kubelet, {"intel.feature.node.kubernetes.io/gaudi": "true"}):
        settled(plane, namespace, pools=[pool("gaudi", replicas=3, image="registry.example/vllm-gaudi:1")])

        def findings() -> list[str]:
            return [seen for seen in diagnosed(plane, "demo", "-n", namespace).seen("nodes") if "2 of 3 pods" in seen]

        seen = wait_for(findings, SECONDS, "two of three have a node", every=1)[0]
        assert "a pod requests 1 habana.ai/gaudi, free is spare: 0 habana.ai/gaudi" in seen


def test_a_secret_that_is_named_and_not_there_is_a_problem_until_it_is(plane: ControlPlane, namespace: str) -> None:
    settled(plane, namespace, frontend={"replicas": 1, "apiKeys": {"secret": {"name": "tenants"}}}, pools=[pool()])
    missing = "spec.frontend.apiKeys.secret.name: Secret tenants does not exist"
    assert missing in diagnosed(plane, "demo", "-n", namespace).seen("references")
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "tenants"}}
    plane.request("POST", f"/api/v1/namespaces/{namespace}/secrets", secret).raise_for_status()
    assert diagnosed(plane, "demo", "-n", namespace).seen("references") == []


def test_doctor_and_the_servers_admission_agree_on_a_namespace_that_refuses_pods(plane: ControlPlane) -> None:
    with plane.namespace(**{"pod-security.kubernetes.io/enforce": "restricted"}) as name:
        model = {"id": "org/model"}
        routing = {"transfer": "none"}  # else the frontends share the node's memory, too
        settled(plane, name, model=model, routing=routing, pools=[pool(sharedMemory={"scope": "node"})])
        (seen,) = diagnosed(plane, "demo", "-n", name).seen("Pod Security")
        assert "enforces restricted, and pods are not within it: pool worker: volume shared" in seen
        assert {pod["metadata"]["labels"]["mmrouter.io/role"] for pod in plane.pods(name)} <= {"frontend"}


def test_apis_that_the_spec_needs_and_the_cluster_lacks_are_problems(plane: ControlPlane, namespace: str) -> None:
    scaled = pool(autoscaling={"maxReplicas": 3})
    settled(plane, namespace, pools=[scaled], observability={"podMonitor": "Enabled"})
    report = diagnosed(plane, "demo", "-n", namespace)
    assert len(report.seen("APIs")) == 2


def test_rights_for_one_namespace_are_reported_and_nothing_is_written(plane: ControlPlane, namespace: str) -> None:
    settled(plane, namespace, pools=[pool("amd")])
    kubeconfig = reader(plane, namespace)
    report = diagnosed(plane, "demo", "-n", namespace, kubeconfig=kubeconfig)
    assert "nodes cannot be read" in report.seen("nodes", "warning")[0]
    assert "cannot be read" in report.seen("definition", "warning")[0]
    assert report.seen("pods")
    mine = [row for row in plane.audit() if row.user == f"system:serviceaccount:{namespace}:reader"]
    assert len(mine) > 5
    assert not any(row.writes for row in mine)


def reader(plane: ControlPlane, namespace: str) -> Path:
    """A kubeconfig with which deployments and pods of the namespace can be read, and nothing else."""
    reads = {"verbs": ["get", "list"]}
    deployments = {"apiGroups": ["mmrouter.io"], "resources": ["mmrouterdeployments"], **reads}
    make_account(plane, namespace, "reader", deployments, {"apiGroups": [""], "resources": ["pods"], **reads})
    return plane.kubeconfig_for(namespace, "reader")


def test_where_no_port_can_be_forwarded_kubectls_own_words_are_shown(
    plane: ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(plane, namespace, pools=[pool()])
    monkeypatch.setenv("PATH", str(plane.bin), prepend=":")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    # An address as pods have it, and no kubelet behind it.
    metadata = {"name": "absent", "namespace": namespace}
    frontend = {"metadata": metadata, "status": {"phase": "Running", "podIP": "10.0.0.9"}}

    async def way() -> str | Unread:
        async with open_frontends([frontend], plane.kubeconfig) as frontends:
            return frontends[0].url

    found = asyncio.run(way())
    assert isinstance(found, Unread)
    assert 'pods "absent" not found' in found.why


@pytest.mark.parametrize("command", ["doctor", "status"])
def test_a_deployment_that_is_not_there_ends_with_status_2(crd: ControlPlane, command: str) -> None:
    done = mmrouter(crd, command, "absent", "-n", "default")
    assert done.returncode == 2
    assert "there is no MMRouterDeployment absent in namespace default" in done.stderr


@pytest.mark.parametrize("command", ["doctor", "status"])
def test_a_server_that_is_away_ends_with_status_2(crd: ControlPlane, tmp_path: Path, command: str) -> None:
    config = tmp_path / "config"
    config.write_text(crd.kubeconfig.read_text().replace(":6443", ":6444"))
    done = mmrouter(crd, command, kubeconfig=config)
    assert done.returncode == 2
    assert "the cluster cannot be read" in done.stderr
