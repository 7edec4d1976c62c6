"""Views of objects as an API server of 1.35 returns them."""

from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from mmrouter_operator.model.kinds import ROUTABLE, VERIFIED
from mmrouter_operator.model.snapshot import ChildView, DeploymentView, RevisionView
from mmrouter_operator.model.views import child_view, deployment_view, pod_view, revision_view

DEPLOYMENT = yaml.safe_load("""
apiVersion: apps/v1
kind: Deployment
metadata:
  annotations: {deployment.kubernetes.io/revision: "2", mmrouter.io/set-target: "5"}
  creationTimestamp: "2026-11-21T10:00:00Z"
  generation: 7
  labels: {mmrouter.io/deployment: vl, mmrouter.io/pool: work, mmrouter.io/role: worker}
  managedFields:
  - {apiVersion: apps/v1, fieldsType: FieldsV1, manager: mmrouter-operator, operation: Apply,
     fieldsV1: {"f:metadata": {"f:labels": {}}, "f:spec": {"f:selector": {}, "f:template": {}}}}
  - {apiVersion: apps/v1, fieldsType: FieldsV1, manager: kube-controller-manager, operation: Update,
     subresource: scale, fieldsV1: {"f:spec": {"f:replicas": {}}}}
  - {apiVersion: apps/v1, fieldsType: FieldsV1, manager: kube-controller-manager, operation: Update,
     subresource: status, fieldsV1: {"f:status": {"f:replicas": {}}}}
  name: vl-work
  namespace: team
  ownerReferences:
  - {apiVersion: example.org/v1, kind: Friend, name: f, uid: other}
  - {apiVersion: mmrouter.io/v1alpha1, blockOwnerDeletion: true, controller: true, kind: MMRouterDeployment, name: vl,
     uid: the-owner}
  resourceVersion: "4711"
  uid: d-uid
spec:
  replicas: 3
  selector: {matchLabels: {mmrouter.io/deployment: vl, mmrouter.io/pool: work}}
  template:
    metadata:
      annotations: {mmrouter.io/template-hash: in, mmrouter.io/rendering-hash: abc}
      labels: {mmrouter.io/compatibility: 0123456789abcdef}
    spec: {containers: [{name: engine, image: x}]}
status:
  {replicas: 4, updatedReplicas: 1, readyReplicas: 2, availableReplicas: 1, unavailableReplicas: 3,
   observedGeneration: 6, conditions: [
    {message: m, reason: MinimumReplicasUnavailable, status: "False", type: Available},
    {message: quota, reason: FailedCreate, status: "True", type: ReplicaFailure},
    {message: m, reason: ReplicaSetUpdated, status: "True", type: Progressing}]}
""")

POD = yaml.safe_load("""
apiVersion: v1
kind: Pod
metadata:
  annotations: {mmrouter.io/rendering-hash: abc}
  creationTimestamp: "2026-11-21T10:00:00Z"
  labels: {mmrouter.io/deployment: vl, mmrouter.io/pool: work, mmrouter.io/role: worker, pod-template-hash: 5d4}
  name: vl-work-5d4-x
  namespace: team
  uid: p-uid
spec:
  nodeName: gpu-1
  readinessGates: [{conditionType: mmrouter.io/routable}, {conditionType: mmrouter.io/verified}]
status:
  conditions:
  - {lastTransitionTime: "2026-11-21T10:05:00Z", status: "True", type: mmrouter.io/routable}
  - {lastTransitionTime: "2026-11-21T10:04:00Z", status: "True", type: ContainersReady}
  - {lastTransitionTime: "2026-11-21T10:00:01Z", status: "True", type: PodScheduled}
  - {lastTransitionTime: "2026-11-21T10:00:00Z", reason: ReadinessGatesNotReady, status: "False", type: Ready}
  containerStatuses:
  - {name: engine, ready: true, state: {running: {startedAt: "2026-11-21T10:01:00Z"}}}
  initContainerStatuses:
  - {name: sidecar, ready: true, state: {running: {startedAt: "2026-11-21T10:00:30Z"}}}
  phase: Running
  podIP: 10.1.2.3
""")


def pod(**status: Any) -> dict[str, Any]:
    return {**POD, "status": {**POD["status"], **status}}


def test_a_deployment_is_seen_with_its_counts_and_its_managers() -> None:
    metadata = ("Deployment", "vl-work", "d-uid", "4711", "the-owner", 7)
    labels: Any = {"pool": "work", "role": "worker", "template_hash": "abc", "compatibility": "0123456789abcdef"}
    counts: Any = {"replicas": 3, "observed_generation": 6, "updated": 1, "ready": 2, "available": 1, "total": 4}
    state: Any = {"progressing_reason": "ReplicaSetUpdated", "failure": "quota", "set_target": 5}
    managers = ("kube-controller-manager",)
    assert child_view(DEPLOYMENT) == DeploymentView(*metadata, **labels, **counts, **state, replicas_managers=managers)


def test_a_deployment_that_was_just_made_has_counts_of_zero_and_a_failure_that_is_over_is_none() -> None:
    over = [{"type": "ReplicaFailure", "status": "False", "message": "quota"}]
    view = deployment_view({**DEPLOYMENT, "status": {"conditions": over}, "spec": {"template": {"metadata": {}}}})
    assert (view.replicas, view.total, view.observed_generation, view.failure) == (1, 0, 0, "")


def test_other_children_are_seen_by_name_and_owner() -> None:
    service = {
        "kind": "Service",
        "metadata": {**DEPLOYMENT["metadata"], "name": "vl", "deletionTimestamp": "2026-11-21T10:00:00Z"},
    }
    assert child_view(service) == ChildView("Service", "vl", "d-uid", "4711", "the-owner", 7, True)
    orphan = {"kind": "Service", "metadata": {"name": "vl", "namespace": "team", "uid": "u", "resourceVersion": "1"}}
    assert child_view(orphan).owner == ""


def test_a_pod_is_seen_with_its_gates_and_the_time_when_its_containers_were_ready() -> None:
    view = pod_view(POD)
    assert view.gates == {ROUTABLE: True, VERIFIED: False}
    assert view.gate_times == {ROUTABLE: "2026-11-21T10:05:00Z"}, "the other one has no condition"
    assert (view.ready, view.containers_ready, view.node, view.ip) == (False, True, "gpu-1", "10.1.2.3")
    assert view.started is not None
    assert view.started - view.created == 240
    assert (view.pool, view.role, view.template_hash) == ("work", "worker", "abc")
    assert view.waiting is None


def test_the_scheduler_is_quoted_only_while_it_finds_no_node_and_containers_that_are_not_ready_have_no_start() -> None:
    sentence = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
    stopped = {"type": "ContainersReady", "status": "False", "lastTransitionTime": "2026-11-21T10:04:00Z"}
    stuck = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": sentence}
    view = pod_view(pod(conditions=[stopped, stuck]))
    assert (view.unschedulable, view.started) == (sentence, None)
    gated = [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "waits"}]
    assert pod_view(pod(conditions=gated)).unschedulable == ""


def test_a_container_that_waits_for_a_bad_reason_is_named_and_one_that_is_being_made_is_not() -> None:
    def waits(reason: str) -> dict[str, Any]:
        return {"name": "engine", "state": {"waiting": {"reason": reason, "message": "no such image"}}}

    view = pod_view(pod(containerStatuses=[waits("ImagePullBackOff")]))
    assert view.waiting == ("engine", "ImagePullBackOff", "no such image")
    assert pod_view(pod(containerStatuses=[waits("ContainerCreating")])).waiting is None
    sidecar = {**waits("CrashLoopBackOff"), "name": "sidecar"}
    assert (pod_view(pod(initContainerStatuses=[sidecar])).waiting or ("",))[0] == "sidecar"


def crashed(state: str, ready: bool = False, restarts: int = 3) -> dict[str, Any]:
    return {
        "name": "engine",
        "ready": ready,
        "restartCount": restarts,
        "state": {state: {"reason": "CrashLoopBackOff", "message": "back-off"} if state == "waiting" else {}},
        "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
    }


def test_a_container_that_keeps_ending_is_reported_alike_between_two_ends() -> None:
    last_words = ("engine", "CrashLoopBackOff", "restarted 3 times, last: exit 137 OOMKilled")
    assert pod_view(pod(containerStatuses=[crashed("waiting")])).waiting == last_words
    assert pod_view(pod(containerStatuses=[crashed("running")])).waiting == last_words
    assert pod_view(pod(containerStatuses=[crashed("running", ready=True)])).waiting is None
    assert pod_view(pod(containerStatuses=[crashed("running", restarts=1)])).waiting is None


def test_the_end_before_the_back_off_is_reported_with_its_own_status() -> None:
    ended = crashed("terminated") | {"state": {"terminated": {"exitCode": 2, "reason": "Error"}}}
    view = pod_view(pod(initContainerStatuses=[ended]))
    assert view.waiting == ("engine", "CrashLoopBackOff", "restarted 3 times, last: exit 2")
    done = crashed("terminated") | {"state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
    assert pod_view(pod(initContainerStatuses=[done])).waiting is None


def test_a_containers_last_message_is_reported_by_its_last_line() -> None:
    def last_words(message: str) -> str:
        ended = crashed("waiting")
        ended["lastState"]["terminated"] = {"exitCode": 1, "reason": "Error", "message": message}
        waiting = pod_view(pod(containerStatuses=[ended])).waiting
        assert waiting is not None
        return waiting[2]

    log = "loading weights\n  RuntimeError: CUDA error: out of memory  \n\n"
    assert last_words(log) == "restarted 3 times, last: exit 1: RuntimeError: CUDA error: out of memory"
    assert last_words(" \n") == last_words("") == "restarted 3 times, last: exit 1"
    assert len(last_words("x" * 10_000)) < 300


def test_digits_that_are_no_number_are_no_target() -> None:
    metadata = {"name": "d", "annotations": {"mmrouter.io/set-target": "\N{SUPERSCRIPT TWO}"}}
    assert deployment_view({"kind": "Deployment", "metadata": metadata}).set_target is None


def test_a_revision_is_seen_with_its_data() -> None:
    obj = {"metadata": {"name": "vl-3", "uid": "u"}, "revision": 3, "data": {"deployments": {}}}
    assert revision_view(obj) == RevisionView("vl-3", 3, {"deployments": {}}, "u")


parts = st.sampled_from(["status", "spec"])


@given(st.sets(parts), st.sampled_from([None, {}]))
def test_an_object_without_its_parts_is_no_crash(missing: set[str], instead: Any) -> None:
    for view, obj in ((pod_view, POD), (deployment_view, DEPLOYMENT)):
        assert view({**obj, **dict.fromkeys(missing, instead)}).uid
