"""Operators and definitions of the previous minor version with this one's, and a change of the stored API version."""

import base64
import copy
import json
import os
import re
import subprocess
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from artefacts import Record, run_tool_or_skip
from cluster.conftest import CRDS, ROOT
from cluster.controlplane import ETCD_PORT, ControlPlane, control_plane
from cluster.deployments import MERGE, Deployed, named
from cluster.hollow_kubelet import hollow
from cluster.load import describe, load
from cluster.operators import BRIEF, operator
from cluster.resources import apply, condition, is_done, marked
from cluster.runner import LocalRunner
from local.rig import samples
from waiting import wait_for

from mmrouter_lib.api.crd import NAME, definition

SECONDS = 90
ROLLOUT_SECONDS = 150
DEFINITION = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{NAME}"
PAGE = ROOT / "docs" / "upgrades.md"


@pytest.fixture(scope="module")
def previous() -> Path:
    """The folder with the packages and the definition of the previous version."""
    return Path(run_tool_or_skip("previous_version"))


def spec_of(plane: ControlPlane) -> dict[str, Any]:
    spec: dict[str, Any] = plane.read(DEFINITION)["spec"]
    return spec


def pods_of(deployed: Deployed, name: str) -> dict[str, Any]:
    """Return what decides over a deployment's pods: templates, and generations that count their changes."""
    made = deployed.children(name)
    return {
        f"{kind}/{child}": (body["metadata"]["uid"], body["metadata"].get("generation"), body["spec"]["template"])
        for (kind, child), body in made.items()
        if kind == "deployments"
    }


def assert_works(deployed: Deployed, known: dict[str, dict[str, Any]], new: str, about: str) -> None:
    """A deployment is made; the known ones are repaired, and none of their pods is replaced."""
    deployed.apply(named(new))
    deployed.settled(new)
    for name, before in known.items():
        budget = f"{name}-worker"
        uid = deployed.child("poddisruptionbudgets", budget)["metadata"]["uid"]
        deployed.delete("poddisruptionbudgets", budget)

        def repaired(budget: str = budget, uid: str = uid) -> bool:
            found = deployed.get("poddisruptionbudgets", budget)
            return found is not None and found["metadata"]["uid"] != uid

        wait_for(repaired, SECONDS, f"{about}: {budget} is made anew")
        deployed.await_condition(name, "SpecValid", "True")
        assert pods_of(deployed, name) == before, about
    known[new] = pods_of(deployed, new)
    assert {f"deployments/{new}-{part}" for part in ("frontend", "worker")} <= known[new].keys()


def test_operators_and_definitions_of_two_versions_work_in_every_combination(
    kube_bin: Path, tmp_path: Path, previous: Path
) -> None:
    crds = {"previous": previous / "crds", "new": CRDS}
    variables = {"previous": {"PYTHONPATH": str(previous)}, "new": dict[str, str]()}
    steps = (
        ("previous", "previous"),  # definition, operator
        ("new", "previous"),
        ("new", "new"),
        ("new", "previous"),
        ("previous", "previous"),
        ("previous", "new"),
        ("new", "new"),
    )
    with control_plane(tmp_path, kube_bin, crds["previous"]) as plane, plane.namespace() as namespace:
        deployed, known = Deployed(plane, namespace), dict[str, dict[str, Any]]()
        hashes = set()
        for number, (served, version) in enumerate(steps):
            about = f"definition {served}, operator {version}"
            plane.apply_crds(crds[served])
            hashes.add(json.dumps(spec_of(plane), sort_keys=True))
            with operator(plane, f"operator-{number}", options=BRIEF, env=variables[version]) as replica:
                assert_works(deployed, known, f"made-{number}", about)
                assert replica.process.poll() is None
                assert "Traceback" not in replica.log()
            # Operators of the previous version grant frontends one right more.
            verbs = deployed.child("roles", f"made-{number}-frontend")["rules"][0]["verbs"]
            assert ("get" in verbs) == (version == "previous")
        assert len(hashes) == 2, "both definitions were served"


OLD_IMAGE, NEW_IMAGE = "mmrouter/mmrouter:previous", "mmrouter/mmrouter:new"
ROLES = "worker", "frontend"


def images(plane: ControlPlane, namespace: str) -> dict[str, set[str]]:
    """Return role -> the images of the routers and sidecars in its pods."""
    found: dict[str, set[str]] = {role: set() for role in ROLES}
    for role, names in found.items():
        for pod in plane.pods(namespace, deployment="demo", role=role):
            containers = [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]
            names |= {each["image"] for each in containers if each["name"] in ("router", "sidecar")}
    return found


@pytest.mark.long_form
@pytest.mark.parametrize("first", ROLES)
def test_operator_definition_and_pods_are_upgraded_and_back_under_load(
    kube_bin: Path, tmp_path: Path, previous: Path, first: str, record: Record
) -> None:
    """The operator before the pods, both times. ``first``: the pods that are replaced before the others."""
    (folder := tmp_path / "plane").mkdir()
    order = sorted(ROLES, key=lambda role: role != first)
    wanted, marks = {role: {OLD_IMAGE} for role in ROLES}, dict.fromkeys(ROLES, 1)
    with ExitStack() as stack:
        plane = stack.enter_context(control_plane(folder, kube_bin, previous / "crds"))
        runner = LocalRunner(plane, ROOT / "examples", {OLD_IMAGE: previous})
        stack.enter_context(hollow(plane, runner)).node("local")
        namespace, operators = stack.enter_context(plane.namespace()), stack.enter_context(ExitStack())

        def operate(image: str) -> None:
            """Replace definition and operator by those of a version."""
            operators.close()
            plane.apply_crds(previous / "crds" if image == OLD_IMAGE else CRDS)
            (config := tmp_path / "operator.yaml").write_text(f"image: {image}\n")
            env = {"PYTHONPATH": str(previous)} if image == OLD_IMAGE else {}
            operators.enter_context(operator(plane, options=[*BRIEF, f"--config={config}"], env=env))

        def roll_out() -> None:
            """Change pods, and wait until they have the ``wanted`` images and routing is proved."""
            body = marked(engine=f"{marks['worker']}", frontend=f"{marks['frontend']}")
            generation = apply(plane, namespace, body)["metadata"]["generation"]
            done = lambda: is_done(plane, namespace, "demo", generation) and images(plane, namespace) == wanted  # noqa: E731
            wait_for(done, ROLLOUT_SECONDS, f"pods of {wanted}", known=partial(describe, plane, namespace))
            assert condition(plane, "ExactRoutingVerified", namespace)["status"] == "True"
            for pod in plane.pods(namespace, deployment="demo", role="frontend"):
                # Routers of the previous version lack this metric.
                is_new = any(samples(pod["status"]["podIP"], "mmrouter_build_info"))
                assert is_new == (wanted["frontend"] == {NEW_IMAGE})

        operate(OLD_IMAGE)
        roll_out()
        with load(plane, namespace, "demo") as seen:
            for image in (NEW_IMAGE, OLD_IMAGE):
                operate(image)
                for role in order:
                    wanted[role], marks[role] = {image}, marks[role] + 1
                    roll_out()
            answered = seen.answered
            wait_for(lambda: seen.answered > answered + 5, SECONDS, "the last pods answer")
    record(f"operator and pods of two versions, {first} first", f"{seen.answered} answers, {len(seen.failures)} failed")
    assert seen.failures == []


COMMANDS = re.compile(r"^ *```bash\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
OLD, NEW = "v1alpha1", "v1beta1"


def run_documented(plane: ControlPlane, folder: Path, block: str) -> None:
    """Run a block of the page as an administrator, in a folder whose ``crds`` is what is to be applied."""
    env = {"PATH": f"{plane.bin}:{os.environ['PATH']}", "KUBECONFIG": str(plane.kubeconfig), "HOME": str(folder)}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block], env=env, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def stored_versions(plane: ControlPlane) -> dict[str, str]:
    """Return name -> API version of every resource as etcd holds it."""
    prefix = b"/registry/mmrouter.io/mmrouterdeployments/"
    span = {"key": prefix, "range_end": prefix[:-1] + b"0"}
    body = {name: base64.b64encode(key).decode() for name, key in span.items()}
    answer = httpx.post(f"http://{plane.address}:{ETCD_PORT}/v3/kv/range", json=body, trust_env=False)
    rows = [json.loads(base64.b64decode(row["value"])) for row in answer.raise_for_status().json().get("kvs", [])]
    return {row["metadata"]["name"]: row["apiVersion"].partition("/")[2] for row in rows}


def both_versions(folder: Path) -> None:
    """Write the definition of a release that serves both versions and stores the new one."""
    body = copy.deepcopy(definition())
    (version,) = body["spec"]["versions"]
    body["spec"]["versions"] = [{**version, "storage": False}, {**version, "name": NEW}]
    body["spec"]["conversion"] = {"strategy": "None"}
    (folder / "crds").mkdir()
    (folder / "crds" / "definition.yaml").write_text(yaml.safe_dump(body))


def test_the_stored_version_changes_without_a_webhook_while_the_operator_runs(kube_bin: Path, tmp_path: Path) -> None:
    apply, rewrite, declare = COMMANDS.findall(PAGE.read_text())
    home = tmp_path / "home"
    home.mkdir()
    both_versions(home)
    (folder := tmp_path / "plane").mkdir()
    with control_plane(folder, kube_bin, CRDS) as plane, plane.namespace() as namespace, operator(plane):
        deployed = Deployed(plane, namespace)
        known = {name: (deployed.made(name), pods_of(deployed, name))[1] for name in ("one", "two")}
        before = {name: deployed.resource(name)["spec"] for name in known}
        assert stored_versions(plane) == dict.fromkeys(known, OLD)

        run_documented(plane, home, apply)
        wait_for(lambda: NEW in plane.read(DEFINITION)["status"]["storedVersions"], SECONDS, f"{NEW} is stored")
        new = f"/apis/mmrouter.io/{NEW}/namespaces/{namespace}/mmrouterdeployments"
        wait_for(lambda: plane.request("GET", new).is_success, SECONDS, f"{NEW} is served")
        deployed.made("three")
        assert stored_versions(plane)["three"] == NEW
        assert OLD in stored_versions(plane).values(), "what was not written since is as it was"
        # A version that etcd may hold cannot leave the definition.
        only = [version for version in spec_of(plane)["versions"] if version["name"] == NEW]
        assert plane.request("PATCH", DEFINITION, {"spec": {"versions": only}}, MERGE).status_code == 422

        run_documented(plane, home, rewrite)
        assert stored_versions(plane) == dict.fromkeys((*known, "three"), NEW)
        run_documented(plane, home, declare)
        assert plane.read(DEFINITION)["status"]["storedVersions"] == [NEW]

        assert {item["metadata"]["name"]: item["spec"] for item in plane.read(new)["items"]}.items() >= before.items()
        assert_works(deployed, known, "four", "after the change")
        # A change that a client makes in the new version reaches the operator, which reads the old one.
        frontend = {"spec": {"frontend": {"replicas": 3}}}
        plane.request("PATCH", f"{new}/one", frontend, MERGE).raise_for_status()
        replicas = lambda: deployed.child("deployments", "one-frontend")["spec"]["replicas"]  # noqa: E731
        wait_for(lambda: replicas() == 3, SECONDS, "the operator acts on it")
        deployed.await_condition("one", "SpecValid", "True")
        # The old version may go now; a client of the new one reads and applies every object.
        plane.request("PATCH", DEFINITION, {"spec": {"versions": only}}, MERGE).raise_for_status()
        assert {item["metadata"]["name"] for item in plane.read(new)["items"]} == {*known, "three"}
