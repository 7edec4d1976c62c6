"""What the watches have shown: the newest state stays, whatever the order in which news of it arrives."""

import base64
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mmrouter_operator.cluster.cache import WatchCache, content_of
from mmrouter_operator.model.credentials import new_secret_data

KEY = ("n", "d")
OWN = {"apiVersion": "mmrouter.io/v1alpha1", "kind": "MMRouterDeployment", "name": "d", "uid": "r", "controller": True}


def obj(kind: str, name: str, uid: str, version: int, **more: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "n", "uid": uid, "resourceVersion": str(version)}
    labels = {"mmrouter.io/deployment": "d", "app.kubernetes.io/managed-by": "mmrouter-operator"}
    return {"kind": kind, "metadata": metadata | {"labels": labels, "ownerReferences": [OWN]}, **more}


def resource(version: int = 1, **spec: Any) -> dict[str, Any]:
    metadata = {"name": "d", "namespace": "n", "uid": "r", "resourceVersion": str(version), "generation": 1}
    return {"apiVersion": OWN["apiVersion"], "kind": OWN["kind"], "metadata": metadata, "spec": spec}


def test_a_deployment_is_known_by_its_resource_and_gone_with_it() -> None:
    cache = WatchCache()
    cache.put("ConfigMap", obj("ConfigMap", "c", "1", 1))
    assert cache.deployments() == []
    assert cache.put("MMRouterDeployment", resource()) == (KEY,)
    assert cache.deployments() == [KEY]
    assert cache.remove("MMRouterDeployment", "r") == (KEY,)
    assert cache.deployments() == []
    assert cache.resource(KEY) is None


def test_an_unchanged_object_reports_no_deployment() -> None:
    cache = WatchCache()
    service = obj("Service", "s", "1", 1, spec={"ports": []})
    assert cache.put("Service", service) == (KEY,)
    again = obj("Service", "s", "1", 2, spec={"ports": []})
    again["metadata"]["managedFields"] = [{"manager": "x", "fieldsV1": {}}]
    assert cache.put("Service", again) == ()
    assert cache.put("Service", obj("Service", "s", "1", 3, spec={"ports": [1]})) == (KEY,)


def test_the_deployment_controllers_counting_is_no_change_but_its_status_is() -> None:
    cache = WatchCache()
    deployment = obj("Deployment", "w", "1", 1, spec={"replicas": 2}, status={})
    cache.put("Deployment", deployment)
    counted = obj("Deployment", "w", "1", 2, spec={"replicas": 2}, status={})
    counted["metadata"]["annotations"] = {"deployment.kubernetes.io/revision": "1"}
    assert cache.put("Deployment", counted) == ()
    ready = obj("Deployment", "w", "1", 3, spec={"replicas": 2}, status={"readyReplicas": 1})
    content = cache.content(KEY, "Deployment", "w")
    assert cache.put("Deployment", ready) == (KEY,)
    assert cache.content(KEY, "Deployment", "w") == content


def test_news_of_an_end_is_not_undone_by_an_answer_that_comes_later() -> None:
    cache = WatchCache()
    cache.put("ConfigMap", obj("ConfigMap", "c", "1", 5))
    cache.remove("ConfigMap", "1", "9")
    assert cache.put("ConfigMap", obj("ConfigMap", "c", "1", 8)) == ()
    assert cache.children(KEY) == {}


def test_an_object_that_left_the_selector_comes_back_with_something_newer() -> None:
    cache = WatchCache()
    cache.put("ConfigMap", obj("ConfigMap", "c", "1", 5))
    cache.remove("ConfigMap", "1", "9")
    assert cache.put("ConfigMap", obj("ConfigMap", "c", "1", 10)) == (KEY,)
    assert ("ConfigMap", "c") in cache.children(KEY)


def test_a_child_whose_label_was_taken_off_is_nobodys() -> None:
    cache = WatchCache()
    cache.put("ConfigMap", obj("ConfigMap", "c", "1", 5))
    bare = obj("ConfigMap", "c", "1", 6)
    del bare["metadata"]["labels"]["mmrouter.io/deployment"]
    assert cache.put("ConfigMap", bare) == (KEY,)
    assert cache.children(KEY) == {}


def test_a_label_that_names_another_deployment_wakes_both() -> None:
    cache = WatchCache()
    cache.put("ConfigMap", obj("ConfigMap", "c", "1", 5))
    moved = obj("ConfigMap", "c", "1", 6)
    moved["metadata"]["labels"]["mmrouter.io/deployment"] = "e"
    assert set(cache.put("ConfigMap", moved)) == {KEY, ("n", "e")}
    assert cache.children(KEY) == {}


def test_a_successor_of_the_same_name_outlives_the_news_of_its_predecessors_end() -> None:
    cache = WatchCache()
    cache.put("ConfigMap", obj("ConfigMap", "c", "old", 5))
    cache.put("ConfigMap", obj("ConfigMap", "c", "new", 7))
    cache.remove("ConfigMap", "old", "6")
    assert cache.children(KEY)["ConfigMap", "c"].uid == "new"


@given(order=st.permutations(range(1, 8)))
def test_the_newest_version_stays_in_whatever_order_they_arrive(order: list[int]) -> None:
    cache = WatchCache()
    for version in order:
        cache.put("ConfigMap", obj("ConfigMap", "c", "1", version, data={"v": str(version)}))
    assert cache.children(KEY)["ConfigMap", "c"].resource_version == "7"
    assert cache.content(KEY, "ConfigMap", "c") == content_of(obj("ConfigMap", "c", "1", 7, data={"v": "7"}))


def test_secrets_are_read_or_their_fault_is_named_and_never_shown() -> None:
    cache = WatchCache()
    made = new_secret_data()
    data = {name: base64.b64encode(value).decode() for name, value in made.entries().items()}
    cache.put("Secret", obj("Secret", "d-secrets", "1", 1, data=data))
    assert cache.secret(KEY, "d-secrets") == made
    assert cache.secret(KEY, "other") is None
    for entry, value, word in [
        ("identity.key", base64.b64encode(b"short").decode(), "identity.key"),
        ("engine.key", None, "engine.key"),
        ("sidecar.curve.secret", "???", "sidecar.curve.secret"),
        ("control.token", "", "control.token"),
    ]:
        broken = {**data, entry: value} if value is not None else {k: v for k, v in data.items() if k != entry}
        version = int(cache.children(KEY)["Secret", "d-secrets"].resource_version) + 1
        cache.put("Secret", obj("Secret", "d-secrets", "1", version, data=broken))
        fault = cache.secret(KEY, "d-secrets")
        assert isinstance(fault, str)
        assert word in fault
        assert "short" not in fault


def test_revisions_are_the_owners_in_order_with_what_they_keep() -> None:
    cache = WatchCache()
    for number in (3, 1, 2):
        kept = obj("ControllerRevision", f"d-{number}", str(number), number, revision=number, data={"n": number})
        cache.put("ControllerRevision", kept)
    foreign = obj("ControllerRevision", "d-9", "9", 9, revision=9, data={})
    foreign["metadata"]["ownerReferences"] = [{**OWN, "uid": "other"}]
    cache.put("ControllerRevision", foreign)
    assert [(view.number, view.data) for view in cache.revisions(KEY, "r")] == [(n, {"n": n}) for n in (1, 2, 3)]


def test_the_status_of_a_resource_counts_as_a_change_and_its_managed_fields_do_not() -> None:
    cache = WatchCache()
    cache.put("MMRouterDeployment", resource(1))
    touched = resource(2)
    touched["metadata"]["managedFields"] = [{"manager": "kubectl"}]
    assert cache.put("MMRouterDeployment", touched) == ()
    assert cache.put("MMRouterDeployment", resource(3) | {"status": {"phase": "Ready"}}) == (KEY,)
    found = cache.resource(KEY)
    assert found is not None
    assert found["status"] == {"phase": "Ready"}
    assert "managedFields" not in found["metadata"]
