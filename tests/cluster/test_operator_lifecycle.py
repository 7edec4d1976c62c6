"""One resource from its creation to its end, on a real API server, under the operator's own rights."""

import base64
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.controlplane import ControlPlane
from cluster.deployments import CHILDREN, LABEL, MINIMAL, SECONDS, Deployed, named
from cluster.hollow_kubelet import Hollow
from cluster.operators import Replica, operator
from cluster.resources import Object, apply, condition, resource
from waiting import wait_for

from mmrouter_operator.model.kinds import REPLACE_KEYS

ROOT = Path(__file__).resolve().parents[2]

Children = dict[tuple[str, str], dict[str, Any]]

DRIFT: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "configmaps": lambda live: {"data": dict.fromkeys(live["data"], "changed")},
    "deployments": lambda _: {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 3601}}}},
    "networkpolicies": lambda _: {"spec": {"ingress": [{}]}},
    "poddisruptionbudgets": lambda _: {"spec": {"selector": {"matchLabels": {"app": "elsewhere"}}}},
    "rolebindings": lambda _: {"subjects": []},
    "roles": lambda _: {"rules": []},
    "serviceaccounts": lambda live: {"automountServiceAccountToken": not live["automountServiceAccountToken"]},
    "services": lambda _: {"spec": {"selector": {"app": "elsewhere"}}},
}
"""Kind -> a change of a field of ours. What is in a Secret is never written over, and told; what is in a
ControllerRevision cannot change, and its number says only which one came later."""


def ours(child: dict[str, Any]) -> dict[str, Any]:
    """What the operator renders of a child, and no more of its metadata than that."""
    fields = {name: value for name, value in child.items() if name not in ("apiVersion", "kind", "metadata", "status")}
    metadata = child["metadata"]
    return {**fields, "labels": metadata.get("labels"), "owners": metadata.get("ownerReferences")}


@pytest.fixture(scope="module")
def replica(crd: ControlPlane, kubelet: Hollow) -> Iterator[Replica]:
    with operator(crd) as one:
        yield one


@pytest.fixture
def deployed(replica: Replica, namespace: str) -> Deployed:
    return Deployed(replica.plane, namespace)


def test_the_shortest_resource_gets_all_its_children_and_each_is_its_own(deployed: Deployed) -> None:
    deployed.apply(MINIMAL)
    children = deployed.settled("vl")
    uid = deployed.resource("vl")["metadata"]["uid"]
    assert {("deployments", "vl-frontend"), ("deployments", "vl-worker"), ("services", "vl")} <= children.keys()
    assert {kind for kind, _ in children} == set(CHILDREN) - {"horizontalpodautoscalers"}
    for place, child in children.items():
        owners = child["metadata"]["ownerReferences"]
        assert [(owner["uid"], owner["controller"]) for owner in owners] == [(uid, True)], place
        assert "finalizers" not in child["metadata"], place
        managers = {entry["manager"] for entry in child["metadata"]["managedFields"] if not entry.get("subresource")}
        assert "mmrouter-operator" in managers, place
    metadata = deployed.resource("vl")["metadata"]
    assert "finalizers" not in metadata
    assert set(metadata["annotations"]) == {"kubectl.kubernetes.io/last-applied-configuration"}


def test_every_example_gets_all_its_children(deployed: Deployed) -> None:
    for file in ("mmrouter.yaml", "full.yaml", "disaggregated.yaml"):
        documents = [item for item in yaml.safe_load_all((ROOT / "examples" / file).read_text()) if item]
        for document in documents:
            document["metadata"].pop("namespace", None)
            deployed.apply(document)
        [resource] = [item for item in documents if item["kind"] == "MMRouterDeployment"]
        name = resource["metadata"]["name"]
        children = deployed.settled(name)
        pools = {("deployments", f"{name}-{pool['name']}") for pool in resource["spec"]["pools"]}
        bound = {item for item in children if item[0] == "deployments"}
        assert {kind for kind, _ in children} >= set(CHILDREN) - {"horizontalpodautoscalers"}
        assert len(bound) == len(pools) + 1, bound


def test_every_child_that_is_deleted_by_hand_comes_back(deployed: Deployed, replica: Replica) -> None:
    children = deployed.made("back")
    # The revision first: with the Secret the templates change, and the revision before is no longer needed.
    for (kind, name), child in sorted(children.items(), key=lambda item: item[0][0] != "controllerrevisions"):
        deployed.delete(kind, name)
        uid = child["metadata"]["uid"]

        def another(kind: str = kind, name: str = name, uid: str = uid) -> bool:
            now = deployed.get(kind, name)
            return now is not None and now["metadata"]["uid"] != uid

        wait_for(another, SECONDS, f"{kind} {name} is there again")
    assert "Traceback" not in replica.log()


def test_drift_in_our_fields_is_taken_back_and_other_managers_keep_theirs(deployed: Deployed) -> None:
    deployed.made("drift")

    def has_event() -> bool:
        events = deployed.plane.read(deployed.path("events"))["items"]
        return any(event["reason"] == "DriftRepaired" and "Service drift" in event["note"] for event in events)

    def spec() -> Any:
        return deployed.child("services", "drift")["spec"]

    before = spec()
    deployed.patch("services", "drift", {"spec": {"ports": [{**before["ports"][0], "port": 1234}]}})
    wait_for(lambda: spec() == before, SECONDS, "the port is ours again")
    wait_for(has_event, SECONDS, "an Event says so")
    theirs = {"annotations": {"example.org/theirs": "kept"}, "labels": {"team": "a"}}
    deployed.patch("services", "drift", {"metadata": theirs, "spec": {"selector": {"app": "elsewhere"}}})
    wait_for(lambda: spec() == before, SECONDS, "the selector is ours again")
    metadata = deployed.child("services", "drift")["metadata"]
    assert all(values.items() <= metadata[name].items() for name, values in theirs.items())


@pytest.fixture(scope="module")
def drifted(replica: Replica, crd: ControlPlane) -> Iterator[tuple[Deployed, Children]]:
    """A deployment, and its children before another writer changed a field of ours in each and added an annotation."""
    with crd.namespace() as namespace:
        deployed = Deployed(crd, namespace)
        children = deployed.made("all")
        for (kind, name), child in children.items():
            if kind not in DRIFT:
                continue
            change = {"metadata": {"annotations": {"example.org/theirs": "kept"}}, **DRIFT[kind](child)}
            assert ours(deployed.patch(kind, name, change)) != ours(child), f"{kind} {name} is as it was"
        assert {kind for kind, _ in children} == {*DRIFT, "secrets", "controllerrevisions"}
        yield deployed, children


def await_ours(deployed: Deployed, kind: str, name: str, before: dict[str, Any]) -> None:
    wait_for(lambda: ours(deployed.child(kind, name)) == ours(before), SECONDS, f"{kind} {name} is as it was")


@pytest.mark.parametrize("kind", sorted(DRIFT))
def test_drift_of_every_kind_is_taken_back_and_other_peoples_annotations_stay(
    drifted: tuple[Deployed, Children], kind: str
) -> None:
    deployed, children = drifted
    of_kind = {name: child for (found, name), child in children.items() if found == kind}
    assert of_kind
    for name, child in of_kind.items():
        await_ours(deployed, kind, name, child)
        now = deployed.child(kind, name)
        assert now["metadata"]["uid"] == child["metadata"]["uid"]
        assert now["metadata"]["annotations"]["example.org/theirs"] == "kept"


@pytest.mark.parametrize(
    "taken",
    [{"labels": {LABEL: None}}, {"labels": {"app.kubernetes.io/managed-by": None}}, {"ownerReferences": None}],
    ids=["the label of its deployment", "the label of its manager", "its owner"],
)
def test_a_child_from_which_a_label_or_the_owner_was_taken_gets_it_back(
    deployed: Deployed, taken: dict[str, Any]
) -> None:
    children = deployed.made("taken")
    for place in (("services", "taken"), ("deployments", "taken-worker")):
        deployed.patch(*place, {"metadata": taken})
        await_ours(deployed, *place, children[place])


def test_a_name_of_another_owners_object_is_left_alone_and_reported(deployed: Deployed) -> None:
    theirs = {"metadata": {"name": "held"}, "spec": {"ports": [{"port": 5}], "selector": {"app": "theirs"}}}
    deployed.plane.request("POST", deployed.path("services"), theirs).raise_for_status()
    deployed.apply(named("held"))
    degraded = deployed.await_condition("held", "Degraded", "True", "ChildNameTaken")
    assert "Service held" in degraded["message"]
    assert deployed.child("services", "held")["spec"]["selector"] == {"app": "theirs"}
    assert ("deployments", "held-worker") in deployed.children("held")


def test_a_resource_that_an_older_crd_accepted_is_reported_with_its_field_and_affects_no_other(
    deployed: Deployed, replica: Replica
) -> None:
    bad = named("bad")
    # The CRD takes a pod template as it is; only rendering sees that it is malformed.
    bad["spec"]["pools"][0]["podTemplate"] = {"spec": {"containers": [{"image": "no-name"}]}}
    deployed.apply(bad)
    spec_valid = deployed.await_condition("bad", "SpecValid", "False")
    assert "spec.pools[0].podTemplate" in spec_valid["message"]
    assert ("deployments", "good-worker") in deployed.made("good")
    assert not [place for place in deployed.children("bad") if place[0] == "deployments"]
    deployed.apply(named("bad"))
    deployed.await_condition("bad", "SpecValid", "True")
    assert ("deployments", "bad-worker") in deployed.children("bad")


def test_a_missing_reference_is_reported_until_it_exists(deployed: Deployed) -> None:
    resource = named("needy")
    resource["spec"]["model"]["tokenSecret"] = {"name": "hub", "key": "token"}
    deployed.apply(resource)
    degraded = deployed.await_condition("needy", "Degraded", "True", "SecretMissing")
    assert "hub" in degraded["message"]
    assert "spec.model.tokenSecret" in degraded["message"]
    secret = {"metadata": {"name": "hub"}, "stringData": {"token": "t"}}
    deployed.plane.request("POST", deployed.path("secrets"), secret).raise_for_status()

    def told_no_more() -> bool:
        condition = deployed.condition("needy", "Degraded")
        return condition is not None and condition["reason"] != "SecretMissing"

    wait_for(told_no_more, 40, "the Secret is seen")


def test_a_paused_resource_is_not_touched_and_says_so(deployed: Deployed) -> None:
    deployed.made("calm")
    paused = named("calm")
    paused["spec"]["paused"] = True
    deployed.apply(paused)
    deployed.await_condition("calm", "Progressing", "False", "Paused")
    deployed.delete("services", "calm")
    paused["spec"]["frontend"] = {"replicas": 3}
    deployed.apply(paused)
    deployed.await_condition("calm", "Progressing", "False", "Paused")
    assert deployed.child("deployments", "calm-frontend")["spec"]["replicas"] == 2
    assert deployed.get("services", "calm") is None
    del paused["spec"]["paused"]
    deployed.apply(paused)
    wait_for(lambda: deployed.get("services", "calm"), SECONDS, "the Service is back")


def test_a_pool_that_is_taken_out_takes_its_children_with_it(deployed: Deployed) -> None:
    resource = named("fewer")
    extra = {"name": "more", "role": "worker", "replicas": 2, "accelerator": {"kind": "nvidia"}}
    deployed.apply({**resource, "spec": {**resource["spec"], "pools": [*resource["spec"]["pools"], extra]}})
    deployed.settled("fewer")
    wait_for(lambda: deployed.get("deployments", "fewer-more"), SECONDS, "the second pool is there")
    deployed.apply(resource)

    def gone() -> bool:
        return not [name for _, name in deployed.children("fewer") if name.startswith("fewer-more")]

    wait_for(gone, SECONDS, "nothing of the second pool is left")
    assert deployed.get("deployments", "fewer-worker")


def test_a_lost_secret_keeps_its_keys_or_is_made_anew_and_told_and_a_malformed_one_is_left_alone(
    deployed: Deployed,
) -> None:
    children = deployed.made("keys")
    [name] = [name for kind, name in children if kind == "secrets"]
    secret = children["secrets", name]
    before, running = secret["data"], deployed.get("deployments", "keys-worker")["metadata"]["generation"]
    deployed.delete("secrets", name)

    def restored() -> bool:
        found = deployed.get("secrets", name)
        return bool(found) and found["metadata"]["uid"] != secret["metadata"]["uid"]

    wait_for(restored, SECONDS, "the Secret is back")
    assert deployed.get("secrets", name)["data"] == before
    assert deployed.get("deployments", "keys-worker")["metadata"]["generation"] == running
    deployed.patch("secrets", name, {"metadata": {"annotations": {REPLACE_KEYS: "true"}}})
    deployed.delete("secrets", name)
    degraded = deployed.await_condition("keys", "Degraded", "True", "SecretRecreated")
    assert name in degraded["message"]
    after = deployed.child("secrets", name)
    assert all(after["data"][entry] != before[entry] for entry in before)
    garbled = {"data": {"identity.key": base64.b64encode(b"short").decode()}}
    deployed.patch("secrets", name, garbled)
    degraded = deployed.await_condition("keys", "Degraded", "True", "SecretMalformed")
    assert "identity.key" in degraded["message"]
    assert deployed.child("secrets", name)["data"]["identity.key"] == garbled["data"]["identity.key"]
    deployed.delete("secrets", name)
    wait_for(lambda: deployed.get("secrets", name), SECONDS, "rotation by deletion makes a new one")


@pytest.mark.parametrize(
    ("field", "value", "condition", "words", "made"),
    [
        pytest.param(
            *("model", {"volume": {"persistentVolumeClaim": {"claimName": "weights"}}}),
            *(("Degraded", "True", "PersistentVolumeClaimMissing"), "weights", True),
            id="a claim that is not there",
        ),
        # Two sources in one volume: well-formed, and only the API server knows that it is invalid.
        pytest.param(
            *("volume", {"emptyDir": {}, "downwardAPI": {"items": []}}),
            *(("Degraded", "True", "ChildRefused"), "told-worker", True),
            id="a child that the server refuses, and the others are made",
        ),
        pytest.param(
            *("volume", {"configMap": {"name": True}}, ("SpecValid", "False", "Invalid")),
            *("spec.pools[0].podTemplate.spec.volumes[x].configMap.name", False),
            id="a wrong type in a pod template, before any write",
        ),
    ],
)
def test_what_is_wrong_is_reported(
    deployed: Deployed, field: str, value: dict[str, Any], condition: tuple[str, str, str], words: str, made: bool
) -> None:
    resource = named("told")
    if field == "volume":
        resource["spec"]["pools"][0]["podTemplate"] = {"spec": {"volumes": [{"name": "x", **value}]}}
    else:
        resource["spec"][field] |= value
    deployed.apply(resource)
    assert words in deployed.await_condition("told", *condition)["message"]
    assert (("deployments", "told-frontend") in deployed.children("told")) is made


def blocked(plane: ControlPlane, namespace: str) -> tuple[str, str]:
    progressing: Object = condition(plane, "Progressing", namespace)
    return progressing.get("reason", ""), progressing.get("message", "")


@pytest.mark.parametrize(
    ("waiting", "reason"),
    [
        ("ImagePullBackOff", "ImagePullFailed"),
        ("CreateContainerConfigError", "ContainerConfigError"),
        ("CrashLoopBackOff", "CrashLoopBackOff"),
    ],
)
def test_a_container_that_does_not_run_is_reported_until_it_does(
    replica: Replica, kubelet: Hollow, namespace: str, waiting: str, reason: str
) -> None:
    plane = replica.plane
    rule = kubelet.hold(namespace, {"mmrouter.io/role": "worker"}, waiting, "the runtime's own words", "engine")
    apply(plane, namespace, resource())
    wait_for(
        lambda: blocked(plane, namespace)[0] == reason,
        SECONDS,
        f"Progressing says {reason}",
        known=lambda: (condition(plane, "Degraded", namespace), plane.pods(namespace)),
    )
    assert "the runtime's own words" in blocked(plane, namespace)[1]
    assert condition(plane, "Ready", namespace)["status"] == "False"
    kubelet.release(rule)
    wait_for(lambda: blocked(plane, namespace)[0] != reason, SECONDS, "the reason is gone")


def test_a_missing_accelerator_is_reported_in_the_schedulers_words(replica: Replica, namespace: str) -> None:
    pool = {"name": "worker", "role": "worker", "replicas": 1, "accelerator": {"kind": "amd"}}
    plane = replica.plane
    apply(plane, namespace, resource(pools=[pool]))
    wait_for(lambda: blocked(plane, namespace)[0] == "Unschedulable", SECONDS, "Progressing says Unschedulable")
    assert "0/" in blocked(plane, namespace)[1]
