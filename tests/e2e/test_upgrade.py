"""`helm upgrade` to another version and back replaces the operator's pods only; those of models follow when changed."""

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from artefacts import Record, go_programs, run_tool_or_skip
from chart.helm import CHART, NAMESPACE, RELEASE, Helm
from cluster.access import Access
from cluster.operators import holder
from cluster.resources import MARK, apply, condition, delete, get, is_done, path
from e2e.deploying import READY_SECONDS, Deployed, deployment, example, wait_or_dump
from e2e.load import load
from e2e.node import Node
from waiting import wait_for

from hack.images.previous_image import VERSION as PREVIOUS

IMAGE = "docker.io/mmrouter/mmrouter"
NOW = "0.1.0"
OTHER = "0.1.1"
ROLES = "frontend", "worker"
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
    """Upgrade or install the release and return the seconds until a pod of that version leads and no other is left."""
    began = time.monotonic()
    where = (f"--namespace={NAMESPACE}", "--reset-values", *options)
    done = helm.run("upgrade", "--install", RELEASE, chart, *where)
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


def marked(marks: dict[str, int]) -> dict[str, Any]:
    """Return the example with a mark in the pods of each role; another mark replaces them."""
    made = example()
    for role, part in (("frontend", made["spec"]["frontend"]), ("worker", made["spec"]["pools"][0])):
        part["podTemplate"] = {"metadata": {"annotations": {MARK: str(marks[role])}}}
    return made


def versions(deployed: Deployed) -> dict[str, set[str]]:
    """Return role -> the versions of the routers and sidecars in its pods, those that end among them."""
    return {
        role: {
            each["image"].partition(":")[2]
            for pod in deployed.cluster.pods(deployed.namespace, deployment=deployed.name, role=role)
            for each in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"])
            if each["name"] in ("router", "sidecar")
        }
        for role in ROLES
    }


@pytest.mark.long_form
@pytest.mark.parametrize("first", ROLES)
def test_the_previous_version_is_upgraded_and_back_operator_first_under_load(
    helm: Helm, operated: Access, first: str, record: Record
) -> None:
    """``first``: the pods that follow before the others, both times."""
    assert isinstance(operated, Node)
    previous = Path(run_tool_or_skip("images.previous_image"))
    operated.load(previous / "mmrouter.tar")
    assert helm.run("uninstall", RELEASE, f"--namespace={NAMESPACE}", "--wait").returncode == 0
    upgrade(operated, helm, previous / "chart", PREVIOUS)
    wanted, marks = {role: {PREVIOUS} for role in ROLES}, dict.fromkeys(ROLES, 1)
    with deployment(operated, marked(marks)) as deployed:
        assert versions(deployed) == wanted

        def rolled_out(generation: int) -> bool:
            return versions(deployed) == wanted and is_done(operated, deployed.namespace, deployed.name, generation)

        with load(deployed) as traffic:
            for version, chart in ((NOW, CHART), (PREVIOUS, previous / "chart")):
                traffic.go_on()
                upgrade(operated, helm, chart, version)
                assert versions(deployed) == wanted
                for role in sorted(ROLES, key=lambda role: role != first):
                    wanted[role], marks[role] = {version}, marks[role] + 1
                    applied = apply(operated, deployed.namespace, marked(marks))["metadata"]["generation"]
                    done = partial(rolled_out, applied)
                    wait_or_dump(operated, deployed.namespace, done, READY_SECONDS, f"{role}s of {version}")
                    traffic.go_on()
        summary = f"{len(traffic.sent)} requests, {len(traffic.failed)} failed"
        record(f"previous version upgraded and back, {first}s first", summary)
        assert not traffic.failed, traffic
        traffic.assert_exact()
        for type in ("Ready", "ExactRoutingVerified"):
            assert condition(operated, type, deployed.namespace, deployed.name)["status"] == "True"
