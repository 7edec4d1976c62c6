"""Engine pods go where their accelerator is, and while there is none the resource says what it waits for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cluster.access import Access
from cluster.resources import apply, condition
from e2e.deploying import Deployed, deploy, example, make_model
from waiting import wait_for

from mmrouter_operator.model.accelerators import ACCELERATORS

POOLS = {"gpu": "nvidia", "xe": "intel-xe", "i915": "intel-i915", "host": "cpu"}
SHARED = {"gpu": 64, "xe": 96, "i915": 128, "host": 160}
"""Pool -> its shared memory, MiB: of any two another, and none that a node has not."""
SIZE = "import os; told = os.statvfs('/dev/shm'); print(told.f_frsize * told.f_blocks)"
RACK = "example.com/rack"
MERGE = "application/merge-patch+json"
SECONDS = 60
Patch = dict[str, str | None]


def label(pool: str) -> str:
    return ACCELERATORS[POOLS[pool]].node_labels[0][0]  # type: ignore[index]


def device(pool: str) -> str:
    found = ACCELERATORS[POOLS[pool]].resource  # type: ignore[index]
    assert found is not None
    return found


DEVICES = [device(pool) for pool in POOLS if pool != "host"]
LABELS = [key for row in ACCELERATORS.values() for key, _ in row.node_labels] + [RACK]


@contextmanager
def without_devices(cluster: Access) -> Iterator[str]:
    """Give a node that takes pods, in a cluster without devices; what was there is there again afterwards."""
    items = cluster.read("/api/v1/nodes")["items"]
    try:
        for item in items:
            equip(cluster, item["metadata"]["name"], dict.fromkeys(LABELS), dict.fromkeys(DEVICES))
        yield next(item["metadata"]["name"] for item in items if not item["spec"].get("taints"))
    finally:
        for item in items:
            had, offered = item["metadata"]["labels"], item["status"]["capacity"]
            labels, devices = {key: had.get(key) for key in LABELS}, {key: offered.get(key) for key in DEVICES}
            equip(cluster, item["metadata"]["name"], labels, devices)


def equip(cluster: Access, name: str, labels: Patch, devices: Patch) -> None:
    """Label a node as discovery would, and offer devices as a device plugin would; ``None`` takes away."""
    path = f"/api/v1/nodes/{name}"
    cluster.request("PATCH", path, {"metadata": {"labels": labels}}, MERGE).raise_for_status()
    status = {"status": {"capacity": devices, "allocatable": devices}}
    cluster.request("PATCH", f"{path}/status", status, MERGE).raise_for_status()


def body() -> dict[str, Any]:
    """One engine on each kind; that of the pool i915 must stand in a certain rack, too."""
    made = example()
    made["metadata"]["name"] = "mixed"
    made["spec"]["frontend"]["replicas"] = 1
    made["spec"]["pools"] = [
        {
            **{"name": name, "role": "worker", "replicas": 1, "accelerator": {"kind": kind}},
            "sharedMemory": {"size": f"{SHARED[name]}Mi"},
        }
        for name, kind in POOLS.items()
    ]
    made["spec"]["pools"][2]["nodeSelector"] = {RACK: "7"}
    return made


def where(mixed: Deployed) -> dict[str, str]:
    """Return pool -> the node of its pod, empty where the scheduler said that there is none."""
    found = {}
    for pod in mixed.pods("worker"):
        conditions = {each["type"]: each for each in pod["status"].get("conditions") or []}
        scheduled = conditions.get("PodScheduled", {})
        if pod["spec"].get("nodeName") or scheduled.get("reason") == "Unschedulable":
            found[pod["metadata"]["labels"]["mmrouter.io/pool"]] = pod["spec"].get("nodeName", "")
    return found


def test_each_pool_waits_for_a_node_of_its_kind_the_condition_says_so_and_once_there_it_has_what_it_asked_for(
    operated: Access,
) -> None:
    with without_devices(operated) as bare_node, operated.namespace() as namespace:
        make_model(operated, namespace)
        mixed = Deployed(operated, namespace, "mixed")

        def placed(*pools: str) -> None:
            """Wait until exactly these pools have a node and the condition tells of the others, and of no more."""
            expected = {name: bare_node if name in pools else "" for name in POOLS}
            wait_for(lambda: where(mixed) == expected, SECONDS, f"only {pools} have a node", every=0.2)
            others = [name for name in POOLS if name not in pools]

            def message_matches() -> bool:
                degraded = condition(operated, "Degraded", namespace, "mixed")
                message = degraded.get("message", "") if degraded.get("reason") == "Unschedulable" else ""
                return [name for name in POOLS if f"pod mixed-{name}-" in message] == others and all(
                    label(name) in message or device(name) in message for name in others
                )

            wait_for(message_matches, SECONDS, f"the condition tells of {others}", every=0.2)

        apply(operated, namespace, body())
        placed("host")
        assert condition(operated, "WorkersReady", namespace, "mixed")["status"] == "False"
        # A label without a device, then the device: as where discovery runs and the device plugin does not yet.
        equip(operated, bare_node, {label("gpu"): "true"}, {})
        placed("host")
        equip(operated, bare_node, {}, {device("gpu"): "4"})
        placed("host", "gpu")
        equip(operated, bare_node, {label("xe"): "true"}, {device("xe"): "1", device("i915"): "1"})
        placed("host", "gpu", "xe")
        equip(operated, bare_node, {RACK: "7"}, {})
        deploy(operated, namespace, body())  # waits until it is Ready
        for pod in mixed.pods("worker"):
            pool = pod["metadata"]["labels"]["mmrouter.io/pool"]
            assert pod["spec"]["nodeName"] == bare_node
            (engine,) = pod["spec"]["containers"]
            assert engine["resources"].get("limits", {}) == ({} if pool == "host" else {device(pool): "1"})
            for container in ("engine", "sidecar"):
                result = mixed.execute(pod["metadata"]["name"], container, "python3", "-c", SIZE)
                assert (result.stdout.strip(), result.stderr) == (str(SHARED[pool] * 2**20), "")
