"""The chart on a real API server: install, upgrade, uninstall, what stays, and the commands of docs/install.md."""

import copy
import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart.helm import CHART, MINIMAL, NAMESPACE, RELEASE, Helm
from cluster.controlplane import ControlPlane
from cluster.resources import RBAC, apply, binding, get, resource
from doc_commands import CHART_PAGE, ROOT, commands
from waiting import wait_for

from mmrouter_lib.api.crd import HASH_ANNOTATION, NAME, definition
from mmrouter_operator.model.kinds import RESOURCE

CRD = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{NAME}"
HERE = f"--namespace={NAMESPACE}"
OLDER = "0.0.9"


@pytest.fixture
def empty(admin: Helm, server: ControlPlane) -> Iterator[ControlPlane]:
    """The control plane without release and CRD, before the test and after it."""
    metadata = {"name": NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}
    server.request("POST", "/api/v1/namespaces", {"metadata": metadata})
    forget_definition(server)
    yield server
    admin.run("uninstall", RELEASE, HERE)
    forget_definition(server)


def forget_definition(plane: ControlPlane) -> None:
    """Delete the CRD, and with it every resource."""
    plane.request("DELETE", CRD)
    wait_for(lambda: plane.request("GET", CRD).status_code == 404, 30, "the CRD is gone")


def install(admin: Helm, *options: str | Path, values: dict[str, Any] | None = None) -> str:
    """Install or upgrade the chart and return what helm printed. Raises ``AssertionError``."""
    chart, *more = options or (CHART,)
    return admin.output("upgrade", "--install", RELEASE, chart, HERE, *more, values=values or {})


def served(plane: ControlPlane) -> bool:
    return bool(plane.request("GET", "/apis/mmrouter.io/v1alpha1/mmrouterdeployments").is_success)


def older(admin: Helm, folder: Path) -> Path:
    """Package a version before this one: another number, and a CRD of another hash."""
    copied = folder / "mmrouter"
    subprocess.run(["cp", "-rL", CHART, copied], check=True)
    (file,) = (copied / "files" / "crds").glob("*")
    now = definition()["metadata"]["annotations"][HASH_ANNOTATION]
    file.write_text(file.read_text().replace(now, "f" * len(now)))
    admin.output("package", copied, f"--version={OLDER}", f"--app-version={OLDER}", f"--destination={folder}")
    return folder / f"mmrouter-{OLDER}.tgz"


def test_upgrade_and_uninstall_keep_the_definition_and_every_resource(
    admin: Helm, empty: ControlPlane, tmp_path: Path
) -> None:
    install(admin, older(admin, tmp_path))
    wait_for(partial(served, empty), 30, "the API is served")
    before = empty.read(CRD)["metadata"]
    assert set(before["annotations"][HASH_ANNOTATION]) == {"f"}
    with empty.namespace() as space:
        mine = apply(empty, space, resource("mine"))

        notes = install(admin, values={"deployments": {"theirs": {"namespace": space, "spec": MINIMAL}}})
        assert "`helm uninstall` removes no model: the CRD, every MMRouterDeployment and its pods stay." in notes
        after = empty.read(CRD)["metadata"]
        assert after["uid"] == before["uid"]
        assert after["annotations"][HASH_ANNOTATION] == definition()["metadata"]["annotations"][HASH_ANNOTATION]
        assert get(empty, RESOURCE, space, "mine") == mine
        theirs = get(empty, RESOURCE, space, "theirs")

        # Leaving the values ends no model either.
        install(admin)
        assert get(empty, RESOURCE, space, "theirs") == theirs

        printed = admin.output("uninstall", RELEASE, HERE)
        assert "kept due to the resource policy" in printed
        assert NAME in printed
        assert empty.read(CRD)["metadata"]["uid"] == before["uid"]
        assert get(empty, RESOURCE, space, "mine") == mine
        assert get(empty, RESOURCE, space, "theirs") == theirs
        gone = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/mmrouter-operator"
        assert empty.request("GET", gone).status_code == 404
        assert empty.request("GET", "/apis/rbac.authorization.k8s.io/v1/clusterroles/mmrouter-operator").is_error

        # The same release takes what stayed.
        install(admin, values={"deployments": {"theirs": {"namespace": space, "spec": MINIMAL}}})
        found = get(empty, RESOURCE, space, "theirs")
        assert (found["metadata"]["uid"], found["spec"]) == (theirs["metadata"]["uid"], theirs["spec"])


def test_another_release_takes_the_definition_only_when_told_to(admin: Helm, empty: ControlPlane) -> None:
    install(admin)
    admin.run("uninstall", RELEASE, HERE)
    other = ("upgrade", "--install", "other", CHART, HERE)
    assert "invalid ownership metadata" in admin.refusal(*other)
    try:
        admin.output(*other, "--take-ownership")
    finally:
        admin.run("uninstall", "other", HERE)


def test_a_first_install_cannot_hold_a_deployment_and_leaves_nothing(admin: Helm, empty: ControlPlane) -> None:
    error = admin.refusal("install", RELEASE, CHART, HERE, values={"deployments": {"a": {"spec": MINIMAL}}})
    assert 'no matches for kind "MMRouterDeployment"' in error
    assert "ensure CRDs are installed first" in error
    assert empty.request("GET", CRD).status_code == 404


def test_the_commands_of_the_notes_work_as_they_stand(admin: Helm, empty: ControlPlane) -> None:
    notes = install(admin).partition("NOTES:\n")[2]
    wait_for(partial(served, empty), 30, "the API is served")
    first, _, rest = notes.partition("\nkubectl ")[2].partition("\nkubectl ")
    commands = [f"kubectl {first}", f"kubectl {rest.partition(chr(10))[0]}".removesuffix(" --watch")]
    env = {**os.environ, "KUBECONFIG": str(empty.kubeconfig), "PATH": f"{empty.bin}:{os.environ['PATH']}"}
    printed = ""
    for command in commands:
        done = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, env=env, check=False)
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    assert printed.splitlines()[1].split()[:2] == ["qwen-vl", "vllm"]
    assert get(empty, RESOURCE, "default", "qwen-vl")


def test_admission_takes_the_pods_in_a_restricted_namespace(admin: Helm, empty: ControlPlane) -> None:
    made = admin.render()
    install(admin)
    pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
    default = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default"
    wait_for(lambda: empty.request("GET", default).is_success, 30, "the namespace has its ServiceAccount")
    template = copy.deepcopy(made.one("Deployment")["spec"]["template"])
    template["metadata"]["name"] = "operator"
    for pod in ({"apiVersion": "v1", "kind": "Pod", **template}, made.one("Pod")):
        answer = empty.request("POST", pods, pod, dryRun="All", fieldValidation="Strict")
        assert answer.status_code == 201, answer.text
    # The namespace does enforce the level.
    open_pod = copy.deepcopy(made.one("Pod"))
    del open_pod["spec"]["securityContext"]
    refused = empty.request("POST", pods, open_pod, dryRun="All")
    assert refused.status_code == 403
    assert 'violates PodSecurity "restricted' in refused.json()["message"]


def test_a_team_installs_what_an_administrator_gave_the_rights_for(admin: Helm, empty: ControlPlane) -> None:
    with empty.namespace() as space:
        account = {"metadata": {"name": "team"}}
        empty.request("POST", f"/api/v1/namespaces/{space}/serviceaccounts", account).raise_for_status()
        bind(empty, space, "admin", {"kind": "ServiceAccount", "name": "team", "namespace": space})
        team = admin.at(empty.kubeconfig_for(space, "team"))
        here = f"--namespace={space}"
        values = {"watchNamespaces": [space], "crds": {"install": False}}
        refused = team.refusal("install", RELEASE, CHART, here, values=values)
        assert "attempting to grant RBAC permissions not currently held" in refused
        team.run("uninstall", RELEASE, here)

        rights = admin.output("template", RELEASE, CHART, here, "--show-only=templates/rbac.yaml", values=values)
        users = admin.output("template", RELEASE, CHART, "--show-only=templates/user-roles.yaml")
        done = empty.kubectl("apply", "--filename=-", stdin=f"{rights}\n---\n{users}")
        assert done.returncode == 0, done.stderr
        try:
            team.output("install", RELEASE, CHART, here, values={**values, "rbac": {"create": False}})
            user = f"system:serviceaccount:{space}:team"
            wait_for(lambda: may(empty, space, user, "create"), 30, "the team may create models")
        finally:
            remove_user_roles(empty)


def remove_user_roles(plane: ControlPlane) -> None:
    """Remove the cluster's roles of users, which no release owns and the next one would refuse to own."""
    done = plane.kubectl("delete", "clusterrole", "mmrouter-view", "mmrouter-edit", "--ignore-not-found")
    assert done.returncode == 0, done.stderr


def bind(plane: ControlPlane, namespace: str, role: str, subject: dict[str, str]) -> None:
    """Bind one of the cluster's roles in a namespace."""
    body = {**binding("ClusterRole", role, subject), "kind": "RoleBinding", "metadata": {"name": role}}
    plane.request("POST", f"/apis/{RBAC}/v1/namespaces/{namespace}/rolebindings", body).raise_for_status()


def test_the_api_servers_addresses_come_from_the_cluster_unless_the_values_set_them(
    admin: Helm, empty: ControlPlane
) -> None:
    # A server on a loopback address does not publish it, so this is what one elsewhere writes.
    slices = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
    slice_ = yaml.safe_load("""
      {apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, addressType: IPv4,
       metadata: {name: kubernetes, labels: {kubernetes.io/service-name: kubernetes}},
       endpoints: [{addresses: [192.0.2.12]}, {addresses: [192.0.2.11]}],
       ports: [{name: https, port: 6443, protocol: TCP}]}
    """)
    there = ["192.0.2.11/32", "192.0.2.12/32"]
    empty.request("POST", slices, slice_).raise_for_status()

    def opened(**values: Any) -> tuple[list[str], list[str]]:
        """What the policy and the operator's file have."""
        install(admin, values=values)
        policy = get(empty, "NetworkPolicy", NAMESPACE, "mmrouter-operator")
        (rule,) = (row for row in policy["spec"]["egress"] if {"protocol": "TCP", "port": 6443} in row["ports"])
        config = get(empty, "ConfigMap", NAMESPACE, "mmrouter-operator-config")["data"]["operator.yaml"]
        peers = [peer["ipBlock"]["cidr"] for peer in rule.get("to", [])]
        return peers, yaml.safe_load(config).get("apiServerCidrs", [])

    try:
        asking = {"lookupApiServer": True}
        assert opened() == ([], [])
        assert opened(networkPolicy=asking) == (there, there)
        cidrs = ["198.51.100.1/32"]
        assert opened(networkPolicy=asking, operatorConfig={"apiServerCidrs": cidrs}) == (cidrs, cidrs)
    finally:
        empty.request("DELETE", f"{slices}/kubernetes")
    assert opened(networkPolicy=asking) == ([], [])


def test_users_may_do_with_models_what_they_may_do_with_deployments(admin: Helm, empty: ControlPlane) -> None:
    install(admin)
    with empty.namespace() as space:
        for role in ("view", "edit"):
            bind(empty, space, role, {"apiGroup": RBAC, "kind": "User", "name": f"{role}er"})
        wait_for(lambda: may(empty, space, "editer", "create"), 30, "the roles are aggregated")
        wait_for(lambda: may(empty, space, "viewer", "list"), 30, "the roles are aggregated")
        assert may(empty, space, "editer", "update", "scale")
        assert not may(empty, space, "viewer", "create")
        assert not may(empty, space, "editer", "update", "status")


def may(plane: ControlPlane, namespace: str, user: str, verb: str, subresource: str = "") -> bool:
    """Return whether a user has a right on the models of a namespace."""
    attributes = {"namespace": namespace, "verb": verb, "group": "mmrouter.io", "resource": "mmrouterdeployments"}
    spec = {"user": user, "resourceAttributes": {**attributes, "subresource": subresource}}
    answer = plane.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", {"spec": spec})
    return bool(answer.raise_for_status().json()["status"]["allowed"])


def test_the_notes_name_what_is_missing(admin: Helm, empty: ControlPlane) -> None:
    assert "`mmrouter doctor qwen-vl --namespace default` diagnoses a model" in install(admin)
    notes = install(admin, values={"crds": {"install": False}, "rbac": {"create": False}})
    assert "crds.install is false: the operator waits" in notes
    assert "rbac.create is false: the operator cannot work" in notes
    assert "removes no model: every MMRouterDeployment" in notes


FOUND = [command for page, command in commands() if page == CHART_PAGE]
TEAM = "team-a"


def test_every_command_of_the_page_succeeds_in_its_order(empty: ControlPlane, helm: Helm, admin: Helm) -> None:
    assert len(FOUND) >= 8
    for name in (TEAM, "inference"):
        empty.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    path = f"{helm.command.parent}:{empty.bin}:{os.environ['PATH']}"
    env = os.environ | {"KUBECONFIG": str(empty.kubeconfig), "PATH": path, "HOME": str(helm.home)}
    try:
        for command in FOUND:
            if "kubectl delete mmrouterdeployment" in command:
                apply(empty, "inference", resource("qwen-vl"))
            typed = command.replace(" --wait", "").replace("helm test", "helm get hooks")
            done = subprocess.run(["bash", "-c", typed], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            assert "helm test" not in command or "kind: Pod" in done.stdout
    finally:
        admin.run("uninstall", "mmrouter", f"--namespace={TEAM}")
        remove_user_roles(empty)
