"""Reports of a run: the folder of a failed test is complete, and every pod's way to Ready is recorded."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import yaml
from cluster.access import Access
from cluster.resources import get
from e2e.deploying import ROOT, Deployed, run_pod
from e2e.endpoints import reached
from e2e.node import Programs
from e2e.report import OPERATOR, Boots, Dumps, Place, waited, write_namespace
from waiting import wait_for

from mmrouter_operator.model.kinds import RESOURCE

FAILING = """\
from waiting import wait_for

POD = {{
    "metadata": {{"name": "loser"}},
    "spec": {{
        "terminationGracePeriodSeconds": 0,
        "containers": [{{
            "name": "only",
            "image": "{image}",
            "command": ["sh", "-c", "echo run; test -e /tmp/x && exec sleep 1000; : >/tmp/x; exit 1"],
            "volumeMounts": [{{"name": "tmp", "mountPath": "/tmp"}}],
        }}],
        "volumes": [{{"name": "tmp", "emptyDir": {{}}}}],
    }},
}}


def test_a_condition_that_never_comes(cluster):
    with cluster.namespace() as namespace:
        path = f"/api/v1/namespaces/{{namespace}}"
        wait_for(lambda: cluster.request("GET", f"{{path}}/serviceaccounts/default").is_success, 10, "an account")
        cluster.request("POST", f"{{path}}/pods", POD).raise_for_status()

        def restarted():
            states = cluster.request("GET", f"{{path}}/pods/loser").json()["status"].get("containerStatuses") or []
            # The kubelet has the log of a run before once its status has its end.
            return [state for state in states if state["ready"] and state["lastState"].get("terminated")]

        wait_for(restarted, 60, "its container ran twice", every=0.1)
        wait_for(lambda: False, 0, "pigs fly")
"""


NOT_STARTING = """\
from pathlib import Path
import pytest
from e2e.node import Programs

@pytest.fixture(scope="session")
def programs():
    return Programs(*map(Path, {programs}))

def test_that_needs_a_node(bare):
    pass
"""
KUBELET = """\
#!/bin/sh
echo this kubelet does not like its machine
exit 1
"""


def failed(folder: Path, text: str, **env: str) -> tuple["subprocess.CompletedProcess[str]", Path]:
    """Run a test that fails, with the fixtures of this folder; return what was said, and where the folders are."""
    file, dumps = folder / "test_failing.py", folder / "dumps"
    file.write_text(text)
    whole = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "MMROUTER_DUMP_DIR": str(dumps), **env}
    options = ("-pconftest", "-pe2e.conftest", f"--config-file={ROOT / 'pyproject.toml'}", f"--rootdir={folder}")
    command = [sys.executable, "-m", "pytest", "-q", *options, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=whole, cwd=folder)
    assert done.returncode == 1, done.stdout + done.stderr
    return done, dumps


def test_a_test_that_fails_leaves_a_folder_with_what_was_there_and_its_place_is_printed(
    operated: Access, deployed: Deployed, tmp_path: Path
) -> None:
    image = deployed.pods("frontend")[0]["spec"]["containers"][0]["image"]
    done, dumps = failed(tmp_path, FAILING.format(image=image), MMROUTER_KUBECONFIG=str(operated.kubeconfig))
    assert "not within 0 s: pigs fly" in done.stdout
    (folder,) = dumps.iterdir()
    assert folder.name == "test_failing.py_test_a_condition_that_never_comes"
    assert str(folder) in done.stdout.partition("what is known of failures")[2]
    booted = done.stdout.partition("what each pod waited for")[2]
    assert re.search(r"loser: Ready after \d+ s", booted)
    assert re.search(r"^mmrouter-system mmrouter-operator-\S+: Ready after \d+ s", booted, re.MULTILINE)
    assert "pigs fly" in (folder / "call.txt").read_text()
    own, system = sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: path.name == OPERATOR)
    assert system.name == OPERATOR
    assert list((system / "logs").glob("mmrouter-operator-*.log"))
    assert (own / "logs" / "loser.only.log").read_text() == "run\n"
    assert (own / "logs" / "loser.only.previous.log").read_text() == "run\n", "of the run before"
    assert "Pod/loser: Container started" in (own / "events.txt").read_text()
    assert "a node took it" in (own / "boot.txt").read_text()


def test_of_a_node_that_does_not_start_the_logs_are_kept(programs: Programs, tmp_path: Path) -> None:
    node_bin = tmp_path / "bin"
    node_bin.mkdir()
    for program in programs.node.iterdir():
        (node_bin / program.name).symlink_to(program)
    (node_bin / "kubelet").unlink()
    (node_bin / "kubelet").write_text(KUBELET)
    (node_bin / "kubelet").chmod(0o755)
    places = [str(programs.kube), str(node_bin), str(programs.cni)]
    done, dumps = failed(tmp_path, NOT_STARTING.format(programs=places))
    assert "kubelet did not come up" in done.stdout
    (folder,) = dumps.iterdir()
    assert str(folder) in done.stdout.partition("what is known of failures")[2]
    starts = (folder / "node" / "kubelet.log").read_text().splitlines()  # it is started again after it ended
    assert set(starts) == {"this kubelet does not like its machine"}
    assert {"apiserver.log", "containerd.log", "etcd.log"} <= {path.name for path in (folder / "node").iterdir()}


def test_a_second_cluster_has_a_folder_of_its_own_beside_the_first_ones(deployed: Deployed, tmp_path: Path) -> None:
    logs = tmp_path / "log"
    logs.mkdir()
    (logs / "kubelet.log").write_text("it said so")
    dumps = Dumps(tmp_path / "dumps")
    dumps.places["tour"] = Place((logs, tmp_path / "never made"), deployed.cluster, (deployed.namespace,))
    folder = dumps.write("test_x.py::test_y")
    assert folder == dumps.folders["test_x.py::test_y"]
    assert [path.name for path in folder.iterdir()] == ["tour"]
    assert (folder / "tour" / "node" / "kubelet.log").read_text() == "it said so"
    assert f"{deployed.name}: Ready is True" in (folder / "tour" / deployed.namespace / "summary.txt").read_text()


def test_a_replaced_pod_is_reported_with_its_boot_time(deployed: Deployed) -> None:
    boots = Boots(deployed.cluster)
    with deployed.cluster.namespace() as namespace:
        container = deployed.pods("frontend")[0]["spec"]["containers"][0]
        only = {"name": "only", "image": container["image"], "command": ["sleep", "1000"]}
        metadata = {"name": "replaced", "labels": {"app.kubernetes.io/part-of": "mmrouter"}}
        pod = {"metadata": metadata, "spec": {"terminationGracePeriodSeconds": 0, "containers": [only]}}
        run_pod(deployed.cluster, namespace, pod)

        def history() -> str:
            return dict(waited(deployed.cluster, namespace, boots.of(namespace))).get("replaced", "")

        wait_for(lambda: history().startswith("Ready after"), 30, "the pod is Ready", every=0.1)
        deployed.cluster.request("DELETE", f"/api/v1/namespaces/{namespace}/pods/replaced").raise_for_status()
        wait_for(lambda: history().endswith("gone since"), 30, "the pod is gone", every=0.1)
        assert re.match(r"Ready after \d+ s.*only ran \d+.*; gone since$", history())
    boots.end()


def test_of_a_deployment_everything_is_written_but_its_secrets(deployed: Deployed, tmp_path: Path) -> None:
    with reached(deployed) as where:
        client = where.client()
        raw = client.chat.completions.with_raw_response.create(
            model=deployed.name, messages=[{"role": "user", "content": "hello"}], max_tokens=1
        )
        asked = raw.headers["x-mmrouter-request-id"]
    write_namespace(deployed.cluster, deployed.namespace, tmp_path)

    resource = get(deployed.cluster, RESOURCE, deployed.namespace, deployed.name)
    for item in resource["status"]["conditions"]:
        assert f"{deployed.name}: {item['type']} is {item['status']}" in (tmp_path / "summary.txt").read_text()
    written = yaml.safe_load((tmp_path / "objects.yaml").read_text())["items"]
    assert [item["spec"] for item in written if item["kind"] == RESOURCE] == [resource["spec"]]
    pods = {pod["metadata"]["name"]: pod for pod in [*deployed.pods("frontend"), *deployed.pods("worker")]}
    boot = (tmp_path / "boot.txt").read_text()
    expected = set()
    for name, pod in pods.items():
        assert f"{name}: Ready after" in boot
        containers = [*(pod["spec"].get("initContainers") or []), *pod["spec"]["containers"]]
        expected |= {f"{name}.{container['name']}.log" for container in containers}
    assert expected == {path.name for path in (tmp_path / "logs").iterdir() if "previous" not in path.name}
    assert all((tmp_path / "logs" / name).stat().st_size for name in expected)
    kept = [json.loads(path.read_text()) for path in (tmp_path / "decisions").iterdir()]
    assert len(kept) == len(deployed.pods("frontend"))
    assert asked in {trace["request_id"] for traces in kept for trace in traces}
    for path in (tmp_path / "state").iterdir():
        assert len(json.loads(path.read_text())["workers"]) == len(deployed.pods("worker"))
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or deployed.token() not in path.read_text(), path
