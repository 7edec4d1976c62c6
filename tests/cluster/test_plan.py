"""Plans that the real controllers carry out: what `mmrouter plan` foretells, and a set of pools that switches."""

import json
from pathlib import Path
from typing import Any

import yaml
from cluster.controlplane import ControlPlane
from cluster.deployments import Deployed
from cluster.hollow_kubelet import Hollow
from cluster.operators import BRIEF, mmrouter, operator
from cluster.resources import deployment
from waiting import wait_for

SECONDS = 90.0


def pair(block: int, prefill: int = 2, decode: int = 1) -> dict[str, Any]:
    def pool(role: str, replicas: int) -> dict[str, Any]:
        return {"name": role, "role": role, "replicas": replicas, "accelerator": {"kind": "cpu"}, "blockSize": block}

    return deployment(
        "pd",
        {
            "model": {"id": "org/model"},
            "engine": {"type": "vllm"},
            "frontend": {"replicas": 1},
            "verification": {"timeoutSeconds": 1},  # hollow pods are never proved
            "pools": [pool("prefill", prefill), pool("decode", decode)],
        },
    )


def foretold(plane: ControlPlane, folder: Path, namespace: str, resource: dict[str, Any]) -> dict[str, Any]:
    file = folder / "resource.yaml"
    file.write_text(yaml.safe_dump({**resource, "metadata": {**resource["metadata"], "namespace": namespace}}))
    done = mmrouter(plane, "plan", str(file), "--against", "cluster", "--json")
    assert done.returncode == 0, done.stderr
    shown: dict[str, Any] = json.loads(done.stdout)
    return shown


def generations(deployed: Deployed) -> dict[str, dict[str, tuple[int, int]]]:
    """Pods and ready pods of each pool by the digits that end its Deployments' names."""
    found: dict[str, dict[str, tuple[int, int]]] = {"prefill": {}, "decode": {}}
    for (kind, name), item in deployed.children("pd").items():
        for pool, sides in found.items():
            if kind == "deployments" and name.startswith(f"pd-{pool}-"):
                status = item["status"]
                sides[name[-8:]] = (status.get("replicas", 0), status.get("availableReplicas", 0))
    return found


def test_a_set_switches_as_foretold_and_a_pair_always_serves_although_the_operator_dies_in_the_middle(
    crd: ControlPlane, kubelet: Hollow, namespace: str, tmp_path: Path
) -> None:
    deployed = Deployed(crd, namespace)
    new = foretold(crd, tmp_path, namespace, pair(128))
    assert {step["action"] for steps in new["rounds"] for step in steps} == {"create"}
    with operator(crd, options=BRIEF) as replica:
        deployed.apply(pair(128))
        wait_for(lambda: _ready(deployed), SECONDS, "the first revision is ready")
        assert foretold(crd, tmp_path, namespace, pair(128))["rounds"] == []
        (old,) = generations(deployed)["decode"]
        shown = foretold(crd, tmp_path, namespace, pair(64))
        actions = [step["action"] for steps in shown["rounds"] for step in steps if step["kind"] == "Deployment"]
        assert {"create", "switch", "delete", "restart"} == set(actions) - {"hold"}
        deployed.apply(pair(64))
        wait_for(lambda: _begun(deployed, old), SECONDS, "both revisions stand")
        replica.kill()
    with operator(crd, "successor"):
        wait_for(lambda: _switched(deployed, old), SECONDS, "the second revision is alone")
        assert foretold(crd, tmp_path, namespace, pair(64))["rounds"] == []
        resource = deployed.resource("pd")
        assert [pool["ready"] for pool in resource["status"]["pools"]] == [2, 1]


def test_a_renamed_pool_serves_until_its_successor_does(crd: ControlPlane, kubelet: Hollow, namespace: str) -> None:
    def named(pool: str) -> dict[str, Any]:
        resource = pair(64)
        resource["metadata"]["name"] = "mv"
        accelerator = {"kind": "cpu"}
        resource["spec"]["pools"] = [{"name": pool, "role": "worker", "replicas": 1, "accelerator": accelerator}]
        return resource

    def ready() -> dict[str, int]:
        found = deployed.children("mv").items()
        return {
            name: item["status"].get("availableReplicas", 0) for (kind, name), item in found if kind == "deployments"
        }

    def moved() -> bool:
        now = ready()
        assert now.get("mv-a", 0) + now.get("mv-b", 0) >= 1, now
        return "mv-a" not in now and now["mv-b"] == 1

    deployed = Deployed(crd, namespace)
    with operator(crd):
        deployed.apply(named("a"))
        wait_for(lambda: ready().get("mv-a") == 1, SECONDS, "the first name serves")
        deployed.apply(named("b"))
        wait_for(moved, SECONDS, "the second name serves alone")


def _ready(deployed: Deployed) -> bool:
    found = deployed.condition("pd", "Ready")
    return found is not None and found["status"] == "True"


def _begun(deployed: Deployed, old: str) -> bool:
    """Whether a second revision stands beside the old one; the switch is in order so far."""
    assert not _switched(deployed, old), "too late to be in the middle"
    return {name for sides in generations(deployed).values() for name in sides} > {old}


def _switched(deployed: Deployed, old: str) -> bool:
    seen = generations(deployed)
    for pool, (floor, most) in {"prefill": (2, 3), "decode": (1, 2)}.items():
        assert sum(ready for _, ready in seen[pool].values()) >= floor, seen
        assert sum(pods for pods, _ in seen[pool].values()) <= most, seen
    pairs = seen["prefill"].keys() & seen["decode"].keys()
    assert any(seen["prefill"][name][1] and seen["decode"][name][1] for name in pairs), seen
    return old not in pairs and _ready(deployed)
