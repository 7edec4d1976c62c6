"""Doctor's checks on facts: each kind of trouble is seen, named, and comes with what to do; health is no trouble."""

import io
import json
from dataclasses import replace
from typing import Any, get_args

import pytest
from rich.console import Console
from unit.cli import healthy_cluster as d

import mmrouter_lib as mmrouter
from mmrouter_cli.doctor import advice, diagnose, findings
from mmrouter_cli.doctor.check_cluster import api_check, definition_check, looks_stale, operator_check
from mmrouter_cli.doctor.check_pods import memory_check, pod_check
from mmrouter_cli.doctor.check_resource import (
    condition_check,
    network_check,
    reference_check,
    security_check,
    spec_check,
)
from mmrouter_cli.doctor.check_routing import STALE_SECONDS, event_check, exactness_check, frontend_check
from mmrouter_cli.doctor.facts import FrontendFacts, RoutingFacts
from mmrouter_cli.doctor.findings import Diagnosis, Finding
from mmrouter_cli.status.frontend_state import NOT_RUNNING, Unread, open_frontends
from mmrouter_lib.api.crd import HASH_ANNOTATION
from mmrouter_operator.cluster.child_kinds import KINDS
from mmrouter_operator.model.kinds import Ref
from mmrouter_operator.status.conditions import ABNORMAL, PROGRESSING, REASONS
from mmrouter_router.explain.block_diff import Cause
from mmrouter_router.fleet import feed_client as feeds

DENIED = Unread("GET /x: forbidden")


def test_a_healthy_deployment_has_no_problem_and_one_thing_that_cannot_be_known() -> None:
    found = diagnose.of_deployment(d.cluster(), d.deployed(), d.heard(d.state(d.worker(), d.worker("vl-worker-1"))))
    assert found.problems == 0
    assert [finding.check for finding in found.findings if finding.level == "warning"] == ["NetworkPolicy"]
    assert diagnose.of_cluster(d.cluster()).problems == 0


def test_whatever_is_not_ok_says_what_to_do() -> None:
    denied = d.cluster(apis=DENIED, crd=DENIED, leases=DENIED, operators=DENIED, nodes=DENIED, pods=DENIED)
    sick = d.deployed(pods=DENIED, namespace=DENIED, shared_memory=DENIED)
    found = [*diagnose.of_cluster(denied).findings, *diagnose.of_deployment(denied, sick, None).findings]
    assert len([finding for finding in found if finding.level == "warning"]) >= 8
    assert all(finding.do for finding in found if finding.level != "ok")
    assert not any(finding.level == "problem" for finding in found), "what cannot be read is not wrong"


# -- definition ----------------------------------------------------------------------------------------------------


def test_the_definition_of_this_version_is_ok() -> None:
    assert d.levels(definition_check(d.cluster())) == ["ok"]


@pytest.mark.parametrize(
    ("crd", "says"),
    [
        (None, "is not installed"),
        (d.crd(**{HASH_ANNOTATION: "0123456789abcdef"}), "has the schema 0123456789abcdef"),
        ({**d.crd(), "metadata": {}}, "has the schema of an unknown version"),
    ],
)
def test_another_definition_is_a_problem_with_the_command_that_installs_it(crd: Any, says: str) -> None:
    finding = d.the(definition_check(d.cluster(crd=crd)), "problem")
    assert says in finding.seen
    assert "mmrouter crd | kubectl apply" in finding.do


def test_a_definition_that_is_not_served_is_a_problem() -> None:
    crd = d.crd()
    crd["status"]["conditions"] = [{"type": "NamesAccepted", "status": "False", "message": "mmrd is taken"}]
    assert "mmrd is taken" in d.the(definition_check(d.cluster(crd=crd)), "problem").seen


# -- operator ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leases", "says"),
    [
        ((), "no operator has run on this cluster"),
        ((d.lease(age=40),), "operator-a has not renewed the Lease mmrouter-system/mmrouter-operator for 40 s"),
        ((d.lease(holder=""),), "has no holder"),
        ((d.lease(), d.lease(namespace="other")), "2 operators lead"),
    ],
)
def test_no_leader_and_two_are_problems(leases: tuple[Any, ...], says: str) -> None:
    assert says in d.the(operator_check(d.cluster(leases=leases)), "problem").seen


def test_an_old_lease_beside_a_fresh_one_is_no_second_leader() -> None:
    finding = d.the(operator_check(d.cluster(leases=(d.lease(age=900, namespace="before"), d.lease()))), "ok")
    assert "mmrouter-system" in finding.seen


def test_a_lease_that_is_renewed_under_our_eyes_is_fresh_whatever_the_clock_says() -> None:
    facts = d.cluster(leases=(d.lease(age=400),))
    assert looks_stale(facts.leases, facts.now)
    assert "clocks differ" in d.the(operator_check(replace(facts, renewed=True)), "warning").seen


def test_an_operators_pod_that_cannot_start_or_has_another_version_is_reported() -> None:
    pod = d.pod("operator-1", "", **d.waiting("ImagePullBackOff", container="operator"))
    pod["metadata"]["labels"]["app.kubernetes.io/version"] = "9.9.9"
    found = list(operator_check(d.cluster(operators=(pod,))))
    assert "operator-1: container operator waits, ImagePullBackOff" in d.the(found, "problem").seen
    assert f"version 9.9.9, this command is {mmrouter.__version__}" in d.the(found, "warning").seen


# -- APIs ----------------------------------------------------------------------------------------------------------

WANTS = {
    "autoscaling": ({"autoscaling": {"maxReplicas": 3}}, {}, "custom.metrics.k8s.io/v1beta1"),
    "claims": (
        {"accelerator": {"kind": "nvidia", "claims": [{"name": "g", "resourceClaimTemplateName": "t"}]}},
        {},
        "resource.k8s.io/v1",
    ),
    "monitors": ({}, {"observability": {"podMonitor": "Enabled"}}, "monitoring.coreos.com/v1"),
}


def wanting(of_pool: dict[str, Any], of_spec: dict[str, Any]) -> Any:
    pool = {"name": "worker", "role": "worker", "replicas": 1, "accelerator": {"kind": "nvidia"}} | of_pool
    return d.deployed(d.resource(pools=[pool], **of_spec)).dep


@pytest.mark.parametrize(("of_pool", "of_spec", "api"), WANTS.values(), ids=WANTS)
def test_an_api_that_the_spec_wants_is_a_problem_where_it_is_not_served(of_pool: Any, of_spec: Any, api: str) -> None:
    dep = wanting(of_pool, of_spec)
    assert api in d.the(api_check(d.cluster(), dep), "problem").seen
    served = d.cluster(apis=frozenset({api}))
    assert f"{api} is served" in d.the(api_check(served, dep), "ok").seen


def test_unused_apis_are_not_required() -> None:
    assert d.levels(api_check(d.cluster(), wanting({}, {}))) == ["ok"]


# -- spec and conditions -------------------------------------------------------------------------------------------


def test_a_spec_that_cannot_be_rendered_is_a_problem_with_its_field() -> None:
    facts = d.deployed(d.resource(engine={"type": "vllm", "kvConnector": 3}))
    assert "spec.engine.kvConnector" in d.the(spec_check(facts), "problem").seen
    whole = diagnose.of_deployment(d.cluster(), facts, None)
    assert whole.problems == 1, "nothing else is judged by a spec that cannot be read"


def test_an_image_that_the_operator_may_know_is_no_problem() -> None:
    pool = {"name": "worker", "role": "worker", "accelerator": {"kind": "gaudi"}}
    assert "no default engine image" in d.the(spec_check(d.deployed(d.resource(pools=[pool]))), "warning").seen


def told(*conditions: Any) -> list[Finding]:
    return list(condition_check(d.deployed(d.resource(conditions=conditions))))


def test_conditions_as_they_should_be_are_one_ok() -> None:
    assert d.levels(told(*d.GOOD_CONDITIONS)) == ["ok"]


def test_a_condition_that_needs_action_is_a_problem_with_the_operators_message() -> None:
    finding = d.the(told(d.condition("Degraded", "True", "ImagePullFailed", "pod x: no such image")), "problem")
    assert "pod x: no such image" in finding.seen
    assert finding.do == advice.REASONS["ImagePullFailed"]


def test_what_is_under_way_or_only_advice_is_a_warning() -> None:
    found = told(
        d.condition("Ready", "False", "RollingOut"),
        d.condition("ExactRoutingVerified", "Unknown", "FrontendNotHeard"),
        d.condition("Authenticated", "False", "NoApiKeys"),
    )
    assert d.levels(found) == ["warning"] * 3


def test_a_deployment_that_no_operator_processed_is_a_problem() -> None:
    made = d.resource()
    del made["status"]
    assert "no operator has processed it" in d.the(condition_check(d.deployed(made)), "problem").seen


def test_a_status_of_an_older_generation_is_a_warning() -> None:
    made = d.resource()
    made["metadata"]["generation"] = 4
    assert "generation 3, the spec of 4" in d.the(condition_check(d.deployed(made)), "warning").seen


def test_every_reason_that_is_not_good_has_advice() -> None:
    bad = {
        reason
        for type_, reasons in REASONS.items()
        for reason, status in reasons.items()
        if type_ != PROGRESSING and status != ("False" if type_ in ABNORMAL else "True")
    }
    assert bad <= advice.REASONS.keys()


def test_every_cause_of_a_difference_has_advice() -> None:
    assert set(get_args(Cause)) == advice.CAUSES.keys()


# -- references ----------------------------------------------------------------------------------------------------


def named(kind: str, name: str) -> tuple[Ref, str]:
    return Ref(KINDS[kind].api, kind, "home", name), f"spec.some.{kind}"


def test_what_is_named_and_not_there_is_a_problem_with_its_field() -> None:
    found = {named("Secret", "hub"): None, named("ConfigMap", "t"): {}, named("PersistentVolumeClaim", "w"): DENIED}
    results = list(reference_check(d.deployed(referred=found)))
    assert d.the(results, "problem").seen == "spec.some.Secret: Secret hub does not exist"
    assert "cannot be read" in d.the(results, "warning").seen


def test_a_claim_that_lost_its_volume_is_a_problem() -> None:
    lost = {named("PersistentVolumeClaim", "weights"): {"status": {"phase": "Lost"}}}
    assert "has lost its volume" in d.the(reference_check(d.deployed(referred=lost)), "problem").seen


# -- Pod Security and NetworkPolicy --------------------------------------------------------------------------------


def secured(level: str, **pool: Any) -> list[Finding]:
    shape = {"name": "worker", "role": "worker", "replicas": 1, "accelerator": {"kind": "nvidia"}} | pool
    labels = {"pod-security.kubernetes.io/enforce": level} if level else {}
    facts = d.deployed(d.resource(pools=[shape]), namespace={"metadata": {"labels": labels}})
    return list(security_check(facts, facts.dep))


NODE_MEMORY = {"sharedMemory": {"scope": "node"}}
AS_ROOT = {"podTemplate": {"spec": {"securityContext": {"runAsUser": 0}}}}


@pytest.mark.parametrize("level", ["", "privileged", "baseline", "restricted"])
def test_pods_as_they_come_are_within_every_level(level: str) -> None:
    assert d.levels(secured(level)) == ["ok"]


@pytest.mark.parametrize(
    ("level", "expected"), [("", "warning"), ("privileged", "ok"), ("baseline", "problem"), ("restricted", "problem")]
)
def test_a_nodes_shared_memory_needs_a_namespace_that_allows_it(level: str, expected: str) -> None:
    finding = d.the(secured(level, **NODE_MEMORY), expected)
    assert expected == "ok" or "pool worker: volume shared: hostPath" in finding.seen


@pytest.mark.parametrize(("level", "expected"), [("baseline", "ok"), ("restricted", "problem")])
def test_a_level_below_restricted_takes_what_it_allows(level: str, expected: str) -> None:
    assert d.levels(secured(level, **AS_ROOT)) == [expected]


def test_enforcement_of_network_policies_is_unknown() -> None:
    assert "is not visible" in d.the(network_check(wanting({}, {})), "warning").seen
    assert "every pod" in d.the(network_check(wanting({}, {"networkPolicy": {"enabled": False}})), "warning").seen


# -- pods ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "do"),
    [
        ("ImagePullBackOff", "imagePullSecrets"),
        ("CrashLoopBackOff", "kubectl logs -n home a -c engine --previous"),
        ("CreateContainerConfigError", "kubectl describe pod -n home a"),
    ],
)
def test_a_container_that_cannot_run_is_reported_once_per_pool(reason: str, do: str) -> None:
    pods = tuple(d.pod(name, ready=False, **d.waiting(reason)) for name in "abc")
    finding = d.the(pod_check(d.deployed(pods=pods)), "problem")
    assert finding.seen == f"a and 2 more of its pool: container engine waits, {reason}: the runtime's words"
    assert do in finding.do


def test_a_pod_that_is_being_deleted_is_not_reported() -> None:
    going = d.pod("a", ready=False, **d.waiting("ImagePullBackOff"))
    going["metadata"]["deletionTimestamp"] = d.timestamp(d.NOW)
    assert d.levels(pod_check(d.deployed(pods=(going, d.pod("b"))))) == ["ok"]


def test_a_pod_without_a_node_is_reported_with_the_schedulers_message() -> None:
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    pods = (d.pod("a", on="", ready=False, phase="Pending", conditions=[unscheduled]),)
    assert "0/3 nodes" in d.the(pod_check(d.deployed(pods=pods)), "problem").seen


def test_pods_that_are_starting_are_a_warning_with_their_names() -> None:
    pods = (d.pod("a"), d.pod("b", ready=False))
    assert "1 of 2 pods are Ready; not: b" in d.the(pod_check(d.deployed(pods=pods)), "warning").seen


def test_what_one_pool_waits_for_does_not_hide_the_pods_of_another() -> None:
    pods = (d.pod("a", ready=False, **d.waiting("ImagePullBackOff")), d.pod("f", "", ready=False), d.pod("b", "other"))
    found = list(pod_check(d.deployed(pods=pods)))
    assert d.the(found, "problem").seen.startswith("a: ")
    assert "1 of 3 pods are Ready; not: f" in d.the(found, "warning").seen


async def test_a_frontend_whose_pod_does_not_run_is_not_to_be_forwarded_to() -> None:
    failing = d.pod("f", "", ready=False, phase="Pending", podIP="10.1.2.3")
    async with open_frontends([failing], None) as (frontend,):
        assert frontend.url == Unread(NOT_RUNNING)
    silent = Unread(NOT_RUNNING)
    facts = RoutingFacts((FrontendFacts("f", silent, silent),), 0.0, "forward a port")
    assert d.the(frontend_check(facts), "warning").do == "See pods."


def test_what_every_frontend_says_of_an_engine_is_said_once() -> None:
    starting = d.state(d.worker(engine_state="starting"))
    one = d.heard(starting).frontends[0]
    facts = replace(d.heard(starting), frontends=(one, replace(one, name="another")))
    assert d.levels(event_check(facts)) == ["warning"]


def test_a_name_that_is_longer_than_a_line_is_shown_whole() -> None:
    file, name = io.StringIO(), "registry.example/" + "a" * 90
    findings.show(Console(file=file, width=60), [Diagnosis("x", (Finding("problem", "pods", name, "look"),))])
    assert name in "".join(line.strip() for line in file.getvalue().splitlines()).replace("PROBLEM  pods  ", "")


# -- shared memory -------------------------------------------------------------------------------------------------


def remembered(use: Any, pods: Any = None, **pool: Any) -> list[Finding]:
    """``use``: pod -> bytes used and size; ``pods``: those that run, by default the same."""
    shape = {"name": "worker", "role": "worker", "replicas": 1, "accelerator": {"kind": "nvidia"}} | pool
    known = use if isinstance(use, dict) else {}
    there = [d.pod(name) for name in known] if pods is None else pods
    facts = d.deployed(d.resource(pools=[shape]), shared_memory=use, pods=tuple(there))
    return list(memory_check(facts, facts.dep))


@pytest.mark.parametrize(("used", "level"), [(0, "ok"), (74, "ok"), (75, "warning"), (89, "warning"), (90, "problem")])
def test_shared_memory_is_reported_before_it_is_full(used: int, level: str) -> None:
    (finding,) = remembered({"a": (used << 20, 100 << 20)}, sharedMemory={"size": "100Mi"})
    assert finding.level == level


def test_an_engine_that_runs_and_was_not_measured_yet_is_said_to_be_so_and_not_taken_for_none() -> None:
    told = d.the(remembered({"a": (0, 8 << 30)}, pods=[d.pod("a"), d.pod("young")]), "warning")
    assert told.seen.endswith("not known yet of young")
    assert "once a minute" in told.do
    assert "no engine runs" in d.the(remembered({}, pods=[d.pod("front", "")]), "ok").seen
    pending = d.pod("a", ready=False, phase="Pending")
    assert "no engine runs" in d.the(remembered({}, pods=[pending]), "ok").seen


def test_shared_memory_smaller_than_specified_is_a_warning() -> None:
    told = d.the(remembered({"a": (0, 4 << 30)}), "warning")
    assert "4096 MiB" in told.seen
    assert "8Gi" in told.seen


def test_a_shared_memory_larger_than_the_containers_memory_is_a_problem() -> None:
    limited = {"resources": {"limits": {"memory": "8192Mi"}}}
    assert "killed before it is full" in d.the(remembered({}, **limited), "problem").seen
    assert d.levels(remembered({}, resources={"limits": {"memory": "32Gi"}})) == ["ok"]


def test_a_use_that_cannot_be_read_is_said() -> None:
    assert "8Gi (worker)" in d.the(remembered(DENIED), "warning").seen


# -- frontends, events, exactness ----------------------------------------------------------------------------------


def test_an_unreachable_frontend_is_a_warning_with_the_way_to_reach_it() -> None:
    facts = RoutingFacts((FrontendFacts("vl-frontend-0", DENIED, DENIED),), 1.5, advice="kubectl port-forward")
    assert d.the(frontend_check(facts), "warning").do == "kubectl port-forward"
    assert [*event_check(facts), *exactness_check(facts)] == []


def test_frontends_that_know_different_engines_are_a_problem() -> None:
    facts = d.heard(d.state(d.worker("a"), d.worker("b")), d.state(d.worker("a")))
    assert "vl-frontend-1 does not know b" in d.the(frontend_check(facts), "problem").seen


def test_a_deployment_without_engines_is_a_problem() -> None:
    assert "know no engine" in d.the(frontend_check(d.heard({**d.state(), "workers": []})), "problem").seen


@pytest.mark.parametrize(
    ("change", "level", "says"),
    [
        ({"heard_seconds_ago": None}, "problem", "has received no heartbeat"),
        ({"heard_seconds_ago": 9.4}, "problem", "received the last heartbeat 9 s ago"),
        ({"engine_state": "starting"}, "warning", "its engine is starting"),
        ({"engine_state": "down"}, "problem", "its engine is down"),
        ({"engine_state": ""}, "problem", "its engine is not known yet"),
        ({"synced": False}, "warning", "waits for the snapshot"),
    ],
)
def test_an_engine_whose_events_do_not_arrive_is_named(change: dict[str, Any], level: str, says: str) -> None:
    facts = d.heard(d.state(d.worker("good"), d.worker("bad", **change)))
    finding = d.the(event_check(facts), level)
    assert says in finding.seen
    assert "bad" in finding.seen


def test_a_lost_history_is_a_warning() -> None:
    facts = d.heard(d.state(d.worker(epoch="e2")), before=d.state(d.worker(epoch="e1")))
    assert "began epoch e2" in d.the(event_check(facts), "warning").seen


def test_a_busy_engine_whose_sequence_stands_still_is_suspicious_and_an_idle_one_is_not() -> None:
    assert d.levels(event_check(d.heard(d.state(d.worker(in_flight=0))))) == ["ok"]
    assert "stays 7" in d.the(event_check(d.heard(d.state(d.worker(in_flight=2)))), "warning").seen
    moving = d.heard(d.state(d.worker(in_flight=2, seq=8)), before=d.state(d.worker(in_flight=2)))
    assert d.levels(event_check(moving)) == ["ok"]


@pytest.mark.parametrize("change", [{"draining": True}, {"role": "encoder"}])
def test_who_publishes_nothing_or_goes_is_not_listened_for(change: dict[str, Any]) -> None:
    silent = d.worker("other", heard_seconds_ago=None, canary="Unknown", **change)
    facts = d.heard(d.state(d.worker(), silent))
    assert d.levels(event_check(facts)) == ["ok"]
    assert d.levels(exactness_check(facts)) == ["ok"]


def test_silence_means_here_what_it_means_to_a_frontend() -> None:
    assert STALE_SECONDS == feeds.STALE_SECONDS


def test_proved_engines_are_listed_beside_unproved_ones() -> None:
    facts = d.heard(d.state(d.worker("good"), d.worker("young", canary="Unknown", standing="pending")))
    assert "young" in d.the(exactness_check(facts), "warning").seen
    assert d.the(exactness_check(facts), "ok").seen == "proved: good"


@pytest.mark.parametrize("cause", get_args(Cause))
def test_a_canary_that_failed_is_a_problem_with_its_cause_and_advice(cause: str) -> None:
    wrong = d.worker(canary="False", standing="degraded", canary_cause=cause, canary_message="block 2 differs")
    finding = d.the(exactness_check(d.heard(d.state(wrong))), "problem")
    assert f"({cause}): block 2 differs" in finding.seen
    assert finding.do == advice.CAUSES[cause]


@pytest.mark.parametrize(
    ("change", "level", "says"),
    [
        ({"standing": "pending", "cause": "pending", "message": "not answered yet"}, "warning", "not proved yet"),
        ({"standing": "degraded"}, "problem", "used without overlap"),
        ({"standing": "refused"}, "problem", "not used"),
        (
            {"standing": "degraded", "cause": "not_modelled", "message": "it is not modelled"},
            "warning",
            "it is not modelled",
        ),
    ],
)
def test_an_unproved_engine_is_reported_by_how_it_is_used(change: Any, level: str, says: str) -> None:
    facts = d.heard(d.state(d.worker("good"), d.worker("other", canary="Unknown", **change)))
    assert says in d.the(exactness_check(facts), level).seen


def test_a_proved_engine_with_closed_gates_is_a_warning() -> None:
    facts = d.heard(d.state(d.worker("good"), d.worker("new", standing="waiting", admitted=False)))
    assert "new is proved but used only as a last resort" in d.the(exactness_check(facts), "warning").seen
    assert d.the(exactness_check(facts), "ok").seen == "proved: good, new"


def test_what_one_frontend_has_proved_is_proved() -> None:
    facts = d.heard(d.state(d.worker(canary="Unknown", standing="pending")), d.state(d.worker()))
    assert d.levels(exactness_check(facts)) == ["ok"]


@pytest.mark.parametrize(
    ("exact", "hit", "level"), [(1000, 400, "ok"), (949, 400, "warning"), (1000, 0, "warning"), (950, 1, "ok")]
)
def test_few_exact_decisions_or_no_hits_are_a_warning(exact: int, hit: int, level: str) -> None:
    counts = {"decisions": 1000, "exact_decisions": exact, "prompt_blocks": 800, "hit_blocks": hit}
    *_, finding = exactness_check(d.heard(d.state(d.worker(), **counts)))
    assert finding.level == level
    assert "of 1000 decisions" in finding.seen


# -- what is shown -------------------------------------------------------------------------------------------------


def test_what_is_shown_has_every_finding_and_markup_is_text() -> None:
    found = (
        Finding("ok", "spec", "spec.pools[0] is [bold]fine[/bold]"),
        Finding("problem", "pods", "it fell", "Lift it"),
    )
    console = Console(width=100, record=True, file=io.StringIO())
    findings.show(console, [Diagnosis("home/vl", found)])
    text = console.export_text()
    assert "spec.pools[0] is [bold]fine[/bold]" in text
    assert "PROBLEM" in text
    assert "-> Lift it" in text
    assert "1 problem, 0 warnings" in text
    told = json.loads(json.dumps(findings.as_json([Diagnosis("home/vl", found)])))
    assert (told["passed"], told["problems"]) == (False, 1)
    assert told["subjects"][0]["findings"][1] == {
        "level": "problem",
        "check": "pods",
        "seen": "it fell",
        "do": "Lift it",
    }
