"""What a run says of itself: the folder of a failed test has everything, and every pod's way to Ready is told."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import yaml
from cluster.access import Access
from cluster.resources import get
from e2e.deploying import ROOT, Deployed
from e2e.reach import reached
from e2e.report import write_namespace

from mmrouter_operator.ref import RESOURCE

FAILING = """\
from cluster.controlplane import wait_for

POD = {{
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {{"name": "loser"}},
    "spec": {{
        "terminationGracePeriodSeconds": 0,
        "containers": [{{
            "name": "only",
            "image": "{image}",
            "command": ["sh", "-c", "echo run; test -e /tmp/x && exec sleep 1000; touch /tmp/x; exit 1"],
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
            return [state for state in states if state["restartCount"] and state["ready"]]

        wait_for(restarted, 60, "its container ran twice", every=0.1)
        wait_for(lambda: False, 0, "pigs fly")
"""


def test_a_test_that_fails_leaves_a_folder_with_what_was_there_and_its_place_is_printed(
    operated: Access, deployed: Deployed, tmp_path: Path
) -> None:
    image = deployed.pods("frontend")[0]["spec"]["containers"][0]["image"]
    file, dumps = tmp_path / "test_failing.py", tmp_path / "dumps"
    file.write_text(FAILING.format(image=image))
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "tests"),
        "MMROUTER_KUBECONFIG": str(operated.kubeconfig),
        "MMROUTER_DUMP_DIR": str(dumps),
    }
    options = ("-p", "e2e.conftest", f"--config-file={ROOT / 'pyproject.toml'}", f"--rootdir={tmp_path}")
    command = [sys.executable, "-m", "pytest", "-q", *options, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "not within 0 s: pigs fly" in done.stdout
    (folder,) = dumps.iterdir()
    assert folder.name == "test_failing.py_test_a_condition_that_never_comes"
    assert str(folder) in done.stdout.partition("what is known of failures")[2]
    assert re.search(r"loser: Ready after \d+ s", done.stdout.partition("what each pod waited for")[2])
    own, system = sorted(folder.iterdir(), key=lambda path: path.name == "mmrouter-system")
    assert system.name == "mmrouter-system"
    assert list((system / "logs").glob("mmrouter-operator-*.log"))
    assert (own / "logs" / "loser.only.log").read_text() == "run\n"
    assert (own / "logs" / "loser.only.previous.log").read_text() == "run\n", "of the run before"
    assert "Pod/loser: Container started" in (own / "events.txt").read_text()
    assert "a node took it" in (own / "boot.txt").read_text()


def test_of_a_deployment_everything_is_written_but_its_secrets(deployed: Deployed, tmp_path: Path) -> None:
    with reached(deployed) as where:
        client = where.client()
        raw = client.chat.completions.with_raw_response.create(
            model=deployed.name, messages=[{"role": "user", "content": "hello"}], max_tokens=1
        )
        asked = raw.headers["x-mmrouter-request-id"]
    write_namespace(deployed.cluster, deployed.namespace, tmp_path)

    resource = get(deployed.cluster, RESOURCE, deployed.namespace, deployed.name)
    assert resource is not None
    for item in resource["status"]["conditions"]:
        assert f"{deployed.name}: {item['type']} is {item['status']}" in (tmp_path / "conditions.txt").read_text()
    (written,) = yaml.safe_load_all((tmp_path / "resources.yaml").read_text())
    assert written["spec"] == resource["spec"]
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
