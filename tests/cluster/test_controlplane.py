"""The control plane that the other tests of this level stand on is a real one."""

import time

from cluster.controlplane import APPLY, ControlPlane
from waiting import wait_for


def test_the_server_has_the_requested_version(cluster: ControlPlane) -> None:
    wanted = cluster.bin.name.partition("-")[0]
    assert cluster.request("GET", "/version").json()["gitVersion"] == f"v{wanted}"


def test_a_service_account_may_do_nothing_until_a_role_says_so(cluster: ControlPlane, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}"
    who = wait_for(
        lambda: cluster.request("GET", f"{path}/serviceaccounts/default").status_code == 200, 10, "a ServiceAccount"
    )
    assert who
    with cluster.client(cluster.token(namespace, "default")) as client:
        assert client.get(f"{path}/pods").status_code == 403


def test_the_audit_log_names_who_asked_for_what(cluster: ControlPlane, namespace: str) -> None:
    began = time.time()
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "one"}, "data": {"key": "value"}}
    path = f"/api/v1/namespaces/{namespace}/configmaps/one"
    cluster.request("PATCH", path, body, APPLY, fieldManager="test").raise_for_status()
    rows = [row for row in cluster.audit(began) if row.namespace == namespace and row.resource == "configmaps"]
    assert [(row.verb, row.name, row.user, row.agent, row.code) for row in rows if row.name == "one"] == [
        ("patch", "one", "admin", "mmrouter-tests", 201)
    ]


def test_an_owner_takes_its_children_with_it(cluster: ControlPlane, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owner"}}
    uid = cluster.request("POST", path, owner).raise_for_status().json()["metadata"]["uid"]
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": uid}
    child = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "child", "ownerReferences": [reference]}}
    cluster.request("POST", path, child).raise_for_status()
    cluster.request("DELETE", f"{path}/owner").raise_for_status()
    wait_for(lambda: cluster.request("GET", f"{path}/child").status_code == 404, 20, "the child is collected")


def test_what_was_stored_outlives_a_crash_of_the_server(cluster: ControlPlane, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    cluster.request(
        "POST", path, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kept"}}
    ).raise_for_status()
    cluster.restart_apiserver()
    assert cluster.request("GET", f"{path}/kept").status_code == 200
