"""Two real vLLM engines in pods, on CPU, as the operator renders them: proved exact, and what is sent again is cached.

The model is the real Qwen2-VL but for its network, which is small and has random weights. Pods have the model and the
engine's packages from volumes of this machine, which pods of a node of our own alone can mount.
"""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from artefacts import Record, run_tool_or_skip
from cluster.access import Access
from conformance.engine_process import EAGER, FORKED, KEPT, ONE_PROCESS
from e2e.deploying import RESTRICTED, ROOT, deploy
from e2e.endpoints import pod_web, reached
from e2e.images import IMAGE, CannotMakeError, kept_by, mount_path, packages_of, write_vllm_image
from e2e.node import Node
from e2e.staged_deployments import Chain
from scenarios import SCENARIOS, Chat, Scenario, title

from hack.engines.shrink_model import shrink

REPOSITORY = "Qwen/Qwen2-VL-2B-Instruct"
FREE_BYTES = 8 << 30  # two engines of 3 GB, and everything else
START_SECONDS = 400  # they start side by side, on few CPUs
MODEL, PACKAGES = "model", "packages"
SOONER = {**ONE_PROCESS, **FORKED, **EAGER}
"""What has an engine be ready sooner on few CPUs."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = Path(os.environ.get("MMROUTER_MODELS") or ROOT.parent / "shared" / "models")
    source = models / REPOSITORY.replace("/", "--")
    if not (source / "tokenizer.json").is_file():
        pytest.skip(f"not run: no model folder {source.name} in MMROUTER_MODELS")
    out = tmp_path_factory.mktemp("models") / source.name
    shrink(source, out)
    return out


@pytest.fixture(scope="module")
def engines(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory, record: Record
) -> Iterator[Chain]:
    if os.environ.get("MMROUTER_KUBECONFIG"):
        pytest.skip("not run: pods of another cluster cannot mount an engine's packages from this machine")
    env = Path(run_tool_or_skip("engines.vllm_env"))
    if (free := psutil.virtual_memory().available) < FREE_BYTES:
        pytest.skip(f"not run: {free / 2**30:.1f} GB of memory free, two engines need {FREE_BYTES >> 30}")
    cluster = request.getfixturevalue("operated")
    assert isinstance(cluster, Node)
    archive = tmp_path_factory.mktemp("vllm") / "vllm.tar"
    kept = kept_by(env, {"VLLM_TARGET_DEVICE": "cpu", **KEPT})
    try:
        write_vllm_image(archive, Path(run_tool_or_skip("images.base_image"), "base.tar"), env, kept)
    except CannotMakeError as error:
        pytest.skip(f"not run: {error}")
    cluster.load(archive)
    archive.unlink()
    with cluster.namespace(**RESTRICTED) as namespace, ExitStack() as stack:
        for name, folder in ((MODEL, model), (PACKAGES, packages_of(env))):
            stack.enter_context(volume(cluster, namespace, name, folder))
        web = pod_web(cluster, namespace, IMAGE)
        began = time.monotonic()
        deployed = deploy(cluster, namespace, resource(mount_path(env), web.media), START_SECONDS)
        record("real vLLM: Ready and proved after apply, s", round(time.monotonic() - began, 1))
        yield Chain(deployed, stack.enter_context(reached(deployed)), web)


def resource(packages_at: str, media: dict[str, Any]) -> dict[str, Any]:
    """Return the example's resource with its model and its engines' packages from claims of those names."""
    body: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "demo-vllm.yaml").read_text())
    spec = body["spec"]
    spec["model"] = {"id": REPOSITORY, "volume": {"persistentVolumeClaim": {"claimName": MODEL}}}
    spec["engine"]["image"] = IMAGE
    spec["frontend"]["service"] = {"port": 80}
    spec["routing"] = {"media": media}
    (pool,) = spec["pools"]
    pod = pool["podTemplate"]["spec"]
    (container,) = pod["containers"]
    container["volumeMounts"] = [{"name": PACKAGES, "mountPath": packages_at, "readOnly": True}]
    container["env"] = [
        *(each for each in container["env"] if each["name"] not in SOONER),
        *({"name": name, "value": value} for name, value in SOONER.items()),
    ]
    # A volume that is read-only as a whole keeps the owner of its files.
    pod["volumes"] = [{"name": PACKAGES, "persistentVolumeClaim": {"claimName": PACKAGES, "readOnly": True}}]
    return body


@contextmanager
def volume(cluster: Access, namespace: str, name: str, folder: Path) -> Iterator[None]:
    """Give a namespace a claim for a folder of the node. Its volume, which is the cluster's, goes with the block."""
    access = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    shared = f"{namespace}-{name}"
    held = {
        "metadata": {"name": shared},
        "spec": {
            **access,
            "capacity": {"storage": "1Gi"},
            "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": {"namespace": namespace, "name": name},
            "hostPath": {"path": str(folder), "type": "Directory"},
        },
    }
    wanted = {**access, "volumeName": shared, "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"metadata": {"name": name}, "spec": wanted}
    cluster.request("POST", "/api/v1/persistentvolumes", held).raise_for_status()
    try:
        path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"
        cluster.request("POST", path, claim).raise_for_status()
        yield
    finally:
        cluster.request("DELETE", f"/api/v1/persistentvolumes/{shared}")


@pytest.fixture
def chat(engines: Chain) -> Iterator[Chat]:
    with engines.chat() as made:
        yield made


def test_real_engines_in_pods_are_proved_exact(engines: Chain) -> None:
    found = engines.condition("ExactRoutingVerified")
    assert found["status"] == "True", found


def test_the_gate_passes_on_real_engines_in_pods(engines: Chain) -> None:
    done = engines.reached.mmrouter("verify")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("scenario", SCENARIOS, ids=title)
def test_scenario_on_real_engines(scenario: Scenario, chat: Chat, engines: Chain) -> None:
    scenario(chat, engines.web)
