"""The installed release: what `helm test` says of it."""

from pathlib import Path

from artefacts import go_programs
from chart.helm import NAMESPACE, RELEASE, Helm
from cluster.access import Access
from waiting import wait_for

TEST = "mmrouter-operator-test"
"""The pod of `helm test`."""


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
