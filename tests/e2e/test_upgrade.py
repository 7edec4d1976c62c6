"""`helm upgrade` of the operator to another version and back: its own pods are replaced, and no pod of a model is."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from artefacts import Record, go_programs
from chart.helm import CHART, NAMESPACE, RELEASE, Helm
from cluster.access import Access
from cluster.operators import holder
from cluster.resources import condition, delete, get, path
from e2e.deploying import Deployed, wait_or_dump
from e2e.load import load
from e2e.node import Node
from waiting import wait_for

IMAGE = "docker.io/mmrouter/mmrouter"
NOW = "0.1.0"
OTHER = "0.1.1"
SECONDS = 60
"""Until both pods of the operator are new and one of them leads."""


@pytest.fixture
def helm(operated: Access, tmp_path: Path) -> Iterator[Helm]:
    """Helm on a cluster whose release is ours to upgrade; after the test the release is what it was."""
    if not isinstance(operated, Node):
        pytest.skip("not run: the operator of an external cluster is not upgraded")
    made = Helm(go_programs("helm") / "helm", tmp_path, operated.kubeconfig)
    yield made
    upgrade(operated, made, CHART, NOW)


def other_version(helm: Helm, node: Node, folder: Path) -> Path:
    """Package the chart as another version, with an image of its own name."""
    done = helm.run("package", CHART, f"--version={OTHER}", f"--app-version={OTHER}", f"--destination={folder}")
    assert done.returncode == 0, done.stderr
    tagged = node.ctr("images", "tag", "--force", f"{IMAGE}:{NOW}", f"{IMAGE}:{OTHER}")
    assert tagged.returncode == 0, tagged.stderr
    return folder / f"mmrouter-{OTHER}.tgz"


def operators(cluster: Access) -> dict[str, dict[str, Any]]:
    found = {pod["metadata"]["name"]: pod for pod in cluster.pods(NAMESPACE)}
    return {name: pod for name, pod in found.items() if name.startswith("mmrouter-operator-")}


def upgrade(cluster: Access, helm: Helm, chart: Path, version: str, *options: str) -> float:
    """Upgrade the release and return the seconds until a pod of that version leads and none of another is left."""
    began = time.monotonic()
    where = (f"--namespace={NAMESPACE}", "--reset-values", *options)
    done = helm.run("upgrade", RELEASE, chart, *where)
    assert done.returncode == 0, done.stderr

    def replaced() -> bool:
        pods = operators(cluster)
        images = {pod["spec"]["containers"][0]["image"] for pod in pods.values()}
        return images == {f"{IMAGE.partition('/')[2]}:{version}"} and holder(cluster).partition("_")[0] in pods

    wait_or_dump(cluster, NAMESPACE, replaced, SECONDS, f"an operator of version {version} leads")
    return time.monotonic() - began


def repaired(deployed: Deployed, kind: str, name: str) -> None:
    """Delete a child and wait for it: the leader has then reconciled this deployment."""
    cluster, namespace = deployed.cluster, deployed.namespace
    uid = get(cluster, kind, namespace, name)["metadata"]["uid"]
    delete(cluster, kind, namespace, name)

    def there() -> bool:
        now = cluster.request("GET", path(kind, namespace, name))
        return now.is_success and bool(now.json()["metadata"]["uid"] != uid)

    wait_for(there, SECONDS, f"{kind} {name} is made anew", every=0.2)


def running(deployed: Deployed) -> dict[str, Any]:
    """Return what a restart would change: pods and restarts of containers, and the templates that pods are made of."""
    here = f"/apis/apps/v1/namespaces/{deployed.namespace}"
    made, sets, revisions = (
        {item["metadata"]["name"]: item for item in deployed.cluster.read(f"{here}/{plural}")["items"]}
        for plural in ("deployments", "replicasets", "controllerrevisions")
    )
    return {
        "pods": deployed.containers(),
        "templates": [{name: item["spec"]["template"] for name, item in each.items()} for each in (made, sets)],
        "stored": {name: item["metadata"]["uid"] for name, item in revisions.items()},
        "generations": {name: item["metadata"]["generation"] for name, item in made.items()},
    }


def test_another_version_of_the_operator_restarts_no_pod_of_a_model(
    helm: Helm, deployed: Deployed, tmp_path: Path, record: Record
) -> None:
    cluster = deployed.cluster
    assert isinstance(cluster, Node)
    chart = other_version(helm, cluster, tmp_path)
    before, first = running(deployed), set(operators(cluster))
    with load(deployed) as traffic:
        traffic.go_on()
        seconds = [upgrade(cluster, helm, chart, OTHER, "--set=log.level=debug")]
        assert first.isdisjoint(operators(cluster))
        # What it would render now is another template: its routers and sidecars have the image of its own version.
        configuration = get(cluster, "ConfigMap", NAMESPACE, "mmrouter-operator-config")["data"]["operator.yaml"]
        assert f"{IMAGE.partition('/')[2]}:{OTHER}" in configuration
        assert f":{OTHER}" not in json.dumps(before["templates"])
        repaired(deployed, "PodDisruptionBudget", f"{deployed.name}-worker")
        assert running(deployed) == before

        # And from that chart, as from the one before, to this.
        seconds.append(upgrade(cluster, helm, CHART, NOW))
        repaired(deployed, "PodDisruptionBudget", f"{deployed.name}-worker")
        assert running(deployed) == before
        traffic.go_on()
    summary = f"{len(traffic.sent)} requests, {len(traffic.failed)} failed; {seconds[0]:.1f} s and {seconds[1]:.1f} s"
    record("operator upgraded and back under load", summary)
    assert not traffic.failed, traffic
    traffic.assert_exact()
    for type in ("Ready", "ExactRoutingVerified"):
        assert condition(cluster, type, deployed.namespace, deployed.name)["status"] == "True"
