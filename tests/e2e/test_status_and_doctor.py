"""What `helm test`, `mmrouter doctor` and `mmrouter status` say of a cluster, with the rights of a kubectl user."""

import os
import subprocess
from pathlib import Path
from typing import Any

from artefacts import go_programs
from chart.helm import NAMESPACE, RELEASE, Helm
from cluster.access import Access
from cluster.operators import diagnosed, views
from cluster.resources import apply
from cluster.resources import status as resource_status
from e2e.deploying import READY_SECONDS, RESTRICTED, Deployed, example, make_model
from waiting import wait_for

from mmrouter_cli.status.pod_boot import waits_for

MEASURED_SECONDS = 150
CHECKS = (
    *("definition", "operator", "APIs", "spec", "conditions", "references", "nodes", "Pod Security", "pods"),
    *("shared memory", "frontends", "events", "exactness"),
)
NEVER = {"name": "engine", "imagePullPolicy": "Never"}


def env(cluster: Access) -> dict[str, str]:
    """The environment of a process that knows kubectl and stands in no pod."""
    kept = {name: value for name, value in os.environ.items() if name != "KUBERNETES_SERVICE_HOST"}
    return {**kept, "PATH": f"{cluster.bin}:{kept['PATH']}"}


def measured(deployed: Deployed) -> bool:
    """Whether the kubelets know how full the engines' volumes are, which they look at about once a minute."""
    for pod in deployed.pods("worker"):
        rows = deployed.cluster.read(f"/api/v1/nodes/{pod['spec']['nodeName']}/proxy/stats/summary")["pods"]
        (row,) = [row for row in rows if row["podRef"]["uid"] == pod["metadata"]["uid"]]
        if not any(volume["name"] == "shm" for volume in row.get("volume") or []):
            return False
    return True


def test_doctor_finds_no_problem_in_a_proved_deployment_and_tells_what_it_looked_at(deployed: Deployed) -> None:
    wait_for(lambda: measured(deployed), MEASURED_SECONDS, "the kubelet has measured the volumes", every=1)
    report = diagnosed(deployed.cluster, deployed.name, "-n", deployed.namespace, env=env(deployed.cluster))
    assert report.problems == []
    assert report.status == 0
    fine = {check: " ".join(report.seen(check, "ok")) for check in CHECKS}
    assert all(fine.values()), [item for item in report.findings if item["level"] != "ok"]
    engines = sorted(pod["metadata"]["name"] for pod in deployed.pods("worker"))
    for frontend in deployed.pods("frontend"):
        assert frontend["metadata"]["name"] in fine["frontends"]
    assert f"{len(engines)} engines known" in fine["frontends"]
    for engine in engines:
        assert f"{engine} at " in fine["events"], "its sequence number"
    assert f"proved: {', '.join(engines)}" in fine["exactness"]
    # What the kubelet says of the pods' own /dev/shm.
    assert "of /dev/shm is in use" in fine["shared memory"]
    assert "the slowest, " in fine["pods"]
    # The ports that it had forwarded to the frontends are closed again.
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert f"port-forward --namespace={deployed.namespace}" not in listed


BROKEN: tuple[tuple[dict[str, Any], dict[str, tuple[str, str]]], ...] = (
    # pool, what is wrong with it, and check -> what doctor says of it and what to do
    (
        {"name": "nowhere", "accelerator": {"kind": "amd"}},
        {"nodes": ("no node has the labels", "device plugin"), "pods": ("has no node", "See nodes")},
    ),
    (
        {"name": "absent", "image": "mmrouter/absent:0.0.0", "podTemplate": {"spec": {"containers": [NEVER]}}},
        {"pods": ("container engine waits, ErrImageNeverPull", "Correct the image")},
    ),
)
WAITS = {"worker": "", "nowhere": "no node fits it", "absent": "engine: ErrImageNeverPull"}
EXACT = {"worker": "True", "nowhere": "Unknown (no node fits it)", "absent": "Unknown (ErrImageNeverPull)"}


def test_doctor_and_status_name_what_is_broken_beside_what_works(operated: Access) -> None:
    body = example()
    (pool,) = body["spec"]["pools"]
    body["spec"]["frontend"]["replicas"] = 1
    body["spec"]["pools"] = [{**pool, "replicas": 1, **change} for change in ({}, *(change for change, _ in BROKEN))]
    with operated.namespace(**RESTRICTED) as namespace:
        make_model(operated, namespace)
        apply(operated, namespace, body)
        broken = Deployed(operated, namespace, body["metadata"]["name"])

        def settled() -> bool:
            pools = resource_status(operated, namespace, broken.name).get("pools") or []
            proved = {pool["name"] for pool in pools if pool["verified"] == 1}
            waits = {pod["metadata"]["labels"]["mmrouter.io/pool"]: waits_for(pod) for pod in broken.pods("worker")}
            return proved == {"worker"} and waits == WAITS

        wait_for(settled, READY_SECONDS, "one engine is proved and two cannot run", every=0.2)
        report = diagnosed(operated, broken.name, "-n", namespace, env=env(operated))
        assert report.status == 1
        problems = report.problems
        for change, checks in BROKEN:
            for check, (seen, do) in checks.items():
                about = [item for item in problems if item["check"] == check and seen in item["seen"]]
                assert [item for item in about if change["name"] in item["seen"] and do in item["do"]], problems
        assert all(item["do"] for item in report.findings if item["level"] != "ok")
        (proved,) = report.seen("exactness", "ok")
        assert proved.startswith(f"proved: {broken.name}-worker-")
        assert {item["check"] for item in problems} == {"conditions", "nodes", "pods"}, "nothing else is wrong"

        (view,) = views(operated, broken.name, "-n", namespace, env=env(operated))
        exact = {worker["pool"]: worker["exact"] for worker in view["workers"]}
        assert exact == EXACT


def test_status_shows_every_engine_proved(deployed: Deployed) -> None:
    (view,) = views(deployed.cluster, deployed.name, "-n", deployed.namespace, env=env(deployed.cluster))
    assert view["phase"] == "Ready"
    assert {worker["exact"] for worker in view["workers"]} == {"True"}
    where = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in deployed.pods("worker")}
    assert {worker["name"]: worker["where"] for worker in view["workers"]} == where


TEST = "mmrouter-operator-test"


def test_helm_test_passes_and_leaves_no_pod_that_runs(operated: Access, tmp_path: Path) -> None:
    done = Helm(go_programs("helm") / "helm", tmp_path, operated.kubeconfig).run(
        "test", RELEASE, f"--namespace={NAMESPACE}", "--logs"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    suite = dict(line.split(":", 1) for line in done.stdout.splitlines() if line.startswith(("TEST SUITE", "Phase")))
    assert {name: text.strip() for name, text in suite.items()} == {"TEST SUITE": TEST, "Phase": "Succeeded"}

    def gone() -> bool:
        answer = operated.request("GET", f"/api/v1/namespaces/{NAMESPACE}/pods/{TEST}")
        return answer.status_code == 404 or answer.raise_for_status().json()["status"]["phase"] == "Succeeded"

    wait_for(gone, 20, "the pod of the test is gone", every=0.1)
