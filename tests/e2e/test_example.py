"""``examples/mmrouter.yaml`` as it stands, in real pods.

Flags of the operator's chart name what this machine lacks: an engine image for its accelerator, and a mirror of the
model hub, which runs in a pod. The node offers devices as a device plugin does.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from artefacts import ROOT, go_programs
from chart.helm import CHART, NAMESPACE, RELEASE, Helm
from cluster.access import Access
from cluster.resources import condition
from e2e.deploying import MODEL, RESTRICTED, Deployed, deploy, make_model, run_pod
from e2e.endpoints import manifest, reached
from e2e.report import dump
from e2e.test_placement import device, equip, label, without_devices
from waiting import wait_for

EXAMPLE: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "mmrouter.yaml").read_text())
HUB, PORT, FOLDER = "hub", 8080, "/model"
SECONDS = 300


def hub(cluster: Access, namespace: str, image: str) -> str:
    """Run a hub with the tiny model under the example's name; return its URL."""
    make_model(cluster, namespace)
    pod = copy.deepcopy(manifest(image))
    pod["metadata"]["name"] = HUB
    pod["spec"]["volumes"] = [{"name": "files", "configMap": {"name": MODEL.name}}]
    container = pod["spec"]["containers"][0]
    container["volumeMounts"] = [{"name": "files", "mountPath": FOLDER, "readOnly": True}]
    program = (ROOT / "tests" / "hub_server.py").read_text()
    container["command"] = ["python3", "-c", program, FOLDER, EXAMPLE["spec"]["model"]["id"], str(PORT)]
    return f"http://{run_pod(cluster, namespace, pod)}:{PORT}"


@pytest.fixture(scope="module")
def applied(operated: Access, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployed, str]]:
    """The example, and the namespace of its hub."""
    helm = Helm(go_programs("helm") / "helm", tmp_path_factory.mktemp("helm"), operated.kubeconfig)
    found = operated.read(f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/mmrouter-operator")
    image = found["spec"]["template"]["spec"]["containers"][0]["image"]
    with operated.namespace() as elsewhere, operated.namespace(**RESTRICTED) as namespace:
        config = {
            "hubEndpoint": hub(operated, elsewhere, image),
            "engineImages": {"vllm/nvidia": image.replace("mmrouter/mmrouter", "mmrouter/sim")},
        }

        def settle(*command: str | Path, values: dict[str, Any] | None = None) -> None:
            done = helm.run(*command, f"--namespace={NAMESPACE}", values=values)
            assert done.returncode == 0, done.stderr
            rolled = operated.kubectl(
                "-n", NAMESPACE, "rollout", "status", "deploy/mmrouter-operator", f"--timeout={SECONDS}s"
            )
            assert rolled.returncode == 0, dump(operated, NAMESPACE)

        with without_devices(operated) as node:
            equip(operated, node, {label("gpu"): "true"}, {device("gpu"): "2"})
            settle("upgrade", RELEASE, CHART, "--reuse-values", values={"operatorConfig": config})
            try:
                yield deploy(operated, namespace, EXAMPLE, SECONDS), elsewhere
            finally:
                settle("rollback", RELEASE)


def test_the_shortest_example_is_ready_and_routes_exactly(applied: tuple[Deployed, str]) -> None:
    made, _ = applied
    for type in ("Ready", "ExactRoutingVerified", "PodSecurityRestricted"):
        assert condition(made.cluster, type, made.namespace, made.name)["status"] == "True", type
    workers = made.pods("worker")
    assert len(workers) == EXAMPLE["spec"]["pools"][0]["replicas"]
    for pod in workers:
        (engine,) = pod["spec"]["containers"]
        assert engine["resources"]["limits"][device("gpu")] == "1"
    with reached(made) as where, where.chat(made.name) as chat:
        picture = chat.image("example")

        def is_a_whole_hit() -> bool:
            seen = chat.decided(picture, "What is to be seen in this picture of the harbour?")
            assert seen["exactness"] == "exact"
            return seen["overlap"] == seen["blocks"] > 0

        wait_for(is_a_whole_hit, 60, "a repeat is a whole hit, once the events of the first request have arrived")
        done = where.mmrouter("verify")
        assert done.returncode == 0, done.stdout + done.stderr


def test_engines_and_frontends_downloaded_the_model_from_the_hub(applied: tuple[Deployed, str]) -> None:
    made, elsewhere = applied
    asked = made.cluster.kubectl("-n", elsewhere, "logs", HUB).stdout.splitlines()
    model = EXAMPLE["spec"]["model"]["id"]
    readers = len(made.pods("worker")) + len(made.pods("frontend"))
    assert sum(line.startswith(f"GET /{model}/resolve/") and line.endswith("/config.json") for line in asked) >= readers
    assert not any("safetensors" in line for line in asked)
