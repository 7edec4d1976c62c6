"""Doctor's checks on facts: each kind of trouble is seen, named, and comes with what to do; health is no trouble."""

import io
import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, get_args

import pytest
from rich.console import Console
from unit.cli import healthy_cluster as d

import mmrouter_lib as mmrouter
from mmrouter_cli.doctor import check_deployment, diagnose, findings
from mmrouter_cli.doctor.check_cluster import api_check, definition_check, looks_stale, operator_check
from mmrouter_cli.doctor.check_routing import STALE_SECONDS, device_check, event_check, exactness_check, frontend_check
from mmrouter_cli.doctor.findings import Diagnosis, Finding, FrontendFacts, RoutingFacts
from mmrouter_cli.status.control_api import NOT_RUNNING, Unread
from mmrouter_lib.api.crd import HASH_ANNOTATION
from mmrouter_operator.cluster.operator_kinds import KINDS
from mmrouter_operator.model.kinds import Ref
from mmrouter_operator.status.conditions import ABNORMAL, PROGRESSING, REASONS
from mmrouter_router.explain.differences import Cause
from mmrouter_router.fleet import feed_session as feeds

DENIED = Unread("GET /x: forbidden")
Cases = dict[str, Iterable[Finding]]
"""``LEVEL: part of what is seen -> part of what to do`` of each finding, in order -> what the check finds."""


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


def pooled(**pool: Any) -> Any:
    return d.deployed(d.resource(pools=[d.pool(replicas=1, **pool)]))


def judged(*conditions: Any) -> list[Finding]:
    return list(check_deployment.condition_check(d.deployed(d.resource(conditions=conditions))))


def without_status() -> Any:
    made = d.resource()
    del made["status"]
    return d.deployed(made)


def of_generation(number: int) -> Any:
    made = d.resource()
    made["metadata"]["generation"] = number
    return d.deployed(made)


def named(kind: str, name: str) -> tuple[Ref, str]:
    return Ref(KINDS[kind].api, kind, "home", name), f"spec.some.{kind}"


NOT_SERVED = d.crd() | {"status": {"conditions": [{"type": "NamesAccepted", "status": "False", "message": "taken"}]}}
OTHER_OPERATOR = d.pod("operator-1", "", **d.waiting("ImagePullBackOff", container="operator"))
OTHER_OPERATOR["metadata"]["labels"]["app.kubernetes.io/version"] = "9.9.9"
STOPPED, OTHER = d.lease(holder=""), d.lease(namespace="other")
OLD, BEFORE = d.lease(age=40), d.lease(age=900, namespace="before")
CLAIMS = {"kind": "nvidia", "claims": [{"name": "g", "resourceClaimTemplateName": "t"}]}
SCALED, CLAIMING = pooled(autoscaling={"maxReplicas": 3}).dep, pooled(accelerator=CLAIMS).dep
MONITORED = d.deployed(d.resource(observability={"podMonitor": "Enabled"})).dep
OPEN = d.deployed(d.resource(networkPolicy={"enabled": False})).dep
REFERRED = {named("Secret", "hub"): None, named("ConfigMap", "t"): {}, named("PersistentVolumeClaim", "w"): DENIED}
LOST = {named("PersistentVolumeClaim", "w"): {"status": {"phase": "Lost"}}}


def serving(*apis: str) -> Any:
    return d.cluster(apis=frozenset(apis))


OF_CLUSTER: Cases = {
    "ok: is the one of version": definition_check(d.cluster()),
    "problem: is not served: NamesAccepted is False: taken | ok: is the": definition_check(d.cluster(crd=NOT_SERVED)),
    "problem: is not installed -> mmrouter crd | kubectl apply": definition_check(d.cluster(crd=None)),
    "problem: has the schema 0123456789abcdef -> mmrouter crd | kubectl apply": definition_check(
        d.cluster(crd=d.crd(**{HASH_ANNOTATION: "0123456789abcdef"}))
    ),
    "problem: has the schema of an unknown version -> mmrouter crd | kubectl apply": definition_check(
        d.cluster(crd={**d.crd(), "metadata": {}})
    ),
    "problem: no operator has run on this cluster": operator_check(d.cluster(leases=())),
    "problem: operator-a has not renewed the Lease mmrouter-system/mmrouter-operator for 40 s": operator_check(
        d.cluster(leases=(OLD,))
    ),
    "problem: has no holder": operator_check(d.cluster(leases=(STOPPED,))),
    "problem: 2 operators lead": operator_check(d.cluster(leases=(d.lease(), OTHER))),
    "ok: by the Lease mmrouter-system/": operator_check(d.cluster(leases=(BEFORE, d.lease()))),
    "problem: operator-1: container operator waits, ImagePullBackOff | warning: is version 9.9.9, this command is "
    f"{mmrouter.__version__} | ok: ": operator_check(d.cluster(operators=(OTHER_OPERATOR,))),
    "ok: needs none beyond the core": api_check(d.cluster(), pooled().dep),
    "problem: custom.metrics.k8s.io/v1beta1": api_check(d.cluster(), SCALED),
    "ok: custom.metrics.k8s.io/v1beta1 is served": api_check(serving("custom.metrics.k8s.io/v1beta1"), SCALED),
    "problem: needs resource.k8s.io/v1": api_check(d.cluster(), CLAIMING),
    "ok: resource.k8s.io/v1 is served": api_check(serving("resource.k8s.io/v1"), CLAIMING),
    "problem: needs monitoring.coreos.com/v1": api_check(d.cluster(), MONITORED),
    "ok: monitoring.coreos.com/v1 is served": api_check(serving("monitoring.coreos.com/v1"), MONITORED),
}
OF_RESOURCE: Cases = {
    "warning: no default engine image": check_deployment.spec_check(pooled(accelerator={"kind": "gaudi"})),
    "ok: all conditions of a working deployment hold": check_deployment.condition_check(d.deployed()),
    "problem: no operator has processed it": check_deployment.condition_check(without_status()),
    "warning: generation 3, the spec of 4 | ok: all conditions": check_deployment.condition_check(of_generation(4)),
    f"problem: pod x: no such image -> {findings.reason_advice('Degraded', 'ImagePullFailed')}": judged(
        d.condition("Degraded", "True", "ImagePullFailed", "pod x: no such image")
    ),
    "warning: RollingOut | warning: FrontendNotHeard | warning: NoApiKeys": judged(
        d.condition("Ready", "False", "RollingOut"),
        d.condition("ExactRoutingVerified", "Unknown", "FrontendNotHeard"),
        d.condition("Authenticated", "False", "NoApiKeys"),
    ),
    "problem: spec.some.Secret: Secret hub does not exist | warning: cannot be read": check_deployment.reference_check(
        d.deployed(referred=REFERRED)
    ),
    "problem: has lost its volume | ok: all 1 objects": check_deployment.reference_check(d.deployed(referred=LOST)),
    "warning: is not visible": check_deployment.network_check(pooled().dep),
    "warning: every pod": check_deployment.network_check(OPEN),
}
UNSCHEDULED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
PULLING = d.pod("a", ready=False, **d.waiting("ImagePullBackOff"))
GOING = PULLING | {"metadata": {**PULLING["metadata"], "deletionTimestamp": d.timestamp(d.NOW)}}
NODELESS = d.pod("a", on="", ready=False, phase="Pending", conditions=[UNSCHEDULED])


def running(*pods: Any) -> list[Finding]:
    return list(check_deployment.pod_check(d.deployed(pods=pods)))


HELP = {
    "ImagePullBackOff": "imagePullSecrets",
    "CrashLoopBackOff": "kubectl logs -n home a -c engine --previous",
    "CreateContainerConfigError": "kubectl describe pod -n home a",
}
OF_PODS: Cases = {
    **{
        f"problem: a and 2 more of its pool: container engine waits, {reason}: the runtime's words -> {do}": running(
            *(d.pod(name, ready=False, **d.waiting(reason)) for name in "abc")
        )
        for reason, do in HELP.items()
    },
    "ok: all 1 pods are Ready": running(GOING, d.pod("b")),
    "problem: 0/3 nodes": running(NODELESS),
    "warning: 1 of 2 pods are Ready; not: b": running(d.pod("a"), d.pod("b", ready=False)),
    "problem: a: | warning: 1 of 3 pods are Ready; not: f": running(
        PULLING, d.pod("f", "", ready=False), d.pod("b", "other")
    ),
}
TWO = d.state(d.worker("a"), d.worker("b"))
REPLACED = d.heard(d.state(d.worker(epoch="e2")), before=d.state(d.worker(epoch="e1")))
MOVING = d.heard(d.state(d.worker(in_flight=2, seq=8)), before=d.state(d.worker(in_flight=2)))
NOT_MODELLED = {"standing": "degraded", "cause": "not_modelled", "message": "it is not modelled"}


def unread(why: str) -> RoutingFacts:
    return RoutingFacts((FrontendFacts("f", Unread(why), Unread(why)),), 1.5, advice="forward a port")


def events_of(**change: Any) -> Iterable[Finding]:
    """Of an engine beside a good one."""
    return event_check(d.heard(d.state(d.worker("good"), d.worker("bad", **change))))


def exactness_of(canary: str = "Unknown", **change: Any) -> Iterable[Finding]:
    return exactness_check(d.heard(d.state(d.worker("good"), d.worker("other", canary=canary, **change))))


def decided(exact: int, hit: int) -> Iterable[Finding]:
    counts = {"decisions": 1000, "exact_decisions": exact, "prompt_blocks": 800, "hit_blocks": hit}
    return exactness_check(d.heard(d.state(d.worker(), **counts)))


def devices_of(**change: Any) -> Iterable[Finding]:
    return device_check(d.heard(d.state(d.worker("bad", **change))))


OF_ROUTING: Cases = {
    "warning: f cannot be queried: its pod does not run -> See pods.": frontend_check(unread(NOT_RUNNING)),
    "warning: f cannot be queried: GET /x: forbidden -> forward a port": frontend_check(unread(DENIED.why)),
    "problem: vl-frontend-1 does not know b": frontend_check(d.heard(TWO, d.state(d.worker("a")))),
    "problem: know no engine": frontend_check(d.heard({**d.state(), "workers": []})),
    "problem: has received no heartbeat: bad": events_of(heard_seconds_ago=None),
    "problem: received the last heartbeat 9 s ago: bad": events_of(heard_seconds_ago=9.4),
    "warning: bad: its engine is starting": events_of(engine_state="starting"),
    "problem: bad: its engine is down": events_of(engine_state="down"),
    "problem: bad: its engine is not known yet": events_of(engine_state=""),
    "warning: waits for the snapshot of bad": events_of(synced=False),
    "warning: began epoch e2": event_check(REPLACED),
    "ok: at 7": event_check(d.heard(d.state(d.worker(in_flight=0)))),
    "warning: stays 7": event_check(d.heard(d.state(d.worker(in_flight=2)))),
    "ok: at 8": event_check(MOVING),
    "problem: bad computes on cpu, and its pool asks for cuda -> image": devices_of(
        device="cpu", requested_device="cuda"
    ),
    "ok: bad on cuda": devices_of(device="cuda", requested_device="cuda"),
    "ok: unknown, because the engine does not report it: bad": devices_of(device="unknown", requested_device="cuda"),
    "warning: other is not proved yet | ok: proved: good": exactness_of(
        standing="pending", cause="pending", message="not answered yet"
    ),
    "problem: used without overlap | ok: proved: good": exactness_of(standing="degraded"),
    "problem: not used | ok: proved: good": exactness_of(standing="refused"),
    "warning: it is not modelled | ok: proved: good": exactness_of(**NOT_MODELLED),
    "warning: other is proved but used only as a last resort | ok: proved: good, other": exactness_of(
        "True", standing="waiting", admitted=False
    ),
    "ok: proved: vl-worker-0": exactness_check(
        d.heard(d.state(d.worker(canary="Unknown", standing="pending")), d.state(d.worker()))
    ),
    "ok: proved | ok: 100.0% of 1000 decisions": decided(1000, 400),
    "ok: proved | warning: 94.9% of 1000 decisions": decided(949, 400),
    "ok: proved | warning: 100.0% of 1000 decisions were exact, 0.0%": decided(1000, 0),
    "ok: proved | ok: 95.0% of 1000 decisions": decided(950, 1),
}


def remembered(use: Any, pods: Any = None, **pool: Any) -> list[Finding]:
    """``use``: pod -> bytes used and size; ``pods``: those that run, by default the same."""
    there = [d.pod(name) for name in (use if isinstance(use, dict) else {})] if pods is None else pods
    facts = replace(pooled(**pool), shared_memory=use, pods=tuple(there))
    return list(check_deployment.memory_check(facts, facts.dep))


def filled(used: int) -> list[Finding]:
    """``used``: of 100 MiB."""
    return remembered({"a": (used << 20, 100 << 20)}, sharedMemory={"size": "100Mi"})


def limited(memory: str) -> list[Finding]:
    return remembered({}, resources={"limits": {"memory": memory}})


OF_MEMORY: Cases = {
    "ok: at most 0%": filled(0),
    "ok: at most 74%": filled(74),
    "warning: 75 of 100 MiB": filled(75),
    "warning: 89 of 100 MiB": filled(89),
    "problem: 90 of 100 MiB": filled(90),
    "warning: not known yet of young -> once a minute": remembered(
        {"a": (0, 8 << 30)}, pods=[d.pod("a"), d.pod("young")]
    ),
    "ok: 8Gi (worker); no engine runs": remembered({}, pods=[d.pod("front", "")]),
    "ok: no engine runs": remembered({}, pods=[d.pod("a", ready=False, phase="Pending")]),
    "warning: has 4096 MiB, the pool's sharedMemory.size is 8Gi | ok: ": remembered({"a": (0, 4 << 30)}),
    "problem: so the engine is killed before it is full | ok: no engine runs": limited("8192Mi"),
    "ok: sizes are 8Gi (worker)": limited("32Gi"),
    "warning: 8Gi (worker); how full they are cannot be read": remembered(DENIED),
}


CASES = {**OF_CLUSTER, **OF_RESOURCE, **OF_PODS, **OF_ROUTING, **OF_MEMORY}


@pytest.mark.parametrize("case", CASES)
def test_health_is_ok_and_each_trouble_is_a_finding_of_its_level_that_names_it(case: str) -> None:
    d.require(CASES[case], case)


def test_an_engine_on_another_device_is_not_listed_among_the_right_ones() -> None:
    assert [finding.level for finding in devices_of(device="cpu", requested_device="cuda")] == ["problem"]


def test_a_lease_that_is_renewed_under_our_eyes_is_fresh_whatever_the_clock_says() -> None:
    facts = d.cluster(leases=(d.lease(age=400),))
    assert looks_stale(facts.leases, facts.now)
    assert "clocks differ" in d.the(operator_check(replace(facts, renewed=True)), "warning").seen


def test_a_spec_that_cannot_be_rendered_is_a_problem_with_its_field() -> None:
    facts = d.deployed(d.resource(engine={"type": "vllm", "kvConnector": 3}))
    assert "spec.engine.kvConnector" in d.the(check_deployment.spec_check(facts), "problem").seen
    whole = diagnose.of_deployment(d.cluster(), facts, None)
    assert whole.problems == 1, "nothing else is judged by a spec that cannot be read"


def test_every_reason_that_is_not_good_has_advice_and_one_of_a_newer_operator_a_place_to_read() -> None:
    bad = {
        (type_, reason)
        for type_, reasons in REASONS.items()
        for reason, status in reasons.items()
        if type_ != PROGRESSING and status != ("False" if type_ in ABNORMAL else "True")
    }
    advice = {each: findings.reason_advice(*each) for each in bad}
    assert not [each for each, do in advice.items() if do == "Nothing." or "docs/conditions.md" in do]
    assert findings.reason_advice("Ready", "Sunny") == "See docs/conditions.md, Sunny."


def secured(level: str, **pool: Any) -> list[Finding]:
    labels = {"pod-security.kubernetes.io/enforce": level} if level else {}
    facts = replace(pooled(**pool), namespace={"metadata": {"labels": labels}})
    return list(check_deployment.security_check(facts, facts.dep))


NODE_MEMORY = {"sharedMemory": {"scope": "node"}}
AS_ROOT = {"podTemplate": {"spec": {"securityContext": {"runAsUser": 0}}}}


@pytest.mark.parametrize(
    ("level", "as_they_come", "node_memory", "as_root"),
    [
        ("", "ok", "warning", "warning"),
        ("privileged", "ok", "ok", "ok"),
        ("baseline", "ok", "problem", "ok"),
        ("restricted", "ok", "problem", "problem"),
    ],
)
def test_pods_are_within_every_level_and_with_changes_within_those_that_allow_them(
    level: str, as_they_come: str, node_memory: str, as_root: str
) -> None:
    assert d.levels(secured(level)) == [as_they_come]
    assert d.levels(secured(level, **AS_ROOT)) == [as_root]
    finding = d.the(secured(level, **NODE_MEMORY), node_memory)
    assert node_memory == "ok" or "pool worker: volume shared: hostPath" in finding.seen


def test_what_every_frontend_says_of_an_engine_is_said_once() -> None:
    starting = d.state(d.worker(engine_state="starting"))
    one = d.heard(starting).frontends[0]
    facts = d.heard(starting)._replace(frontends=(one, one._replace(name="another")))
    assert d.levels(event_check(facts)) == ["warning"]


def test_an_unreachable_frontend_is_judged_by_nothing_else() -> None:
    assert [*event_check(unread("forbidden")), *exactness_check(unread("forbidden"))] == []


@pytest.mark.parametrize("change", [{"draining": True}, {"role": "encoder"}])
def test_who_publishes_nothing_or_goes_is_not_listened_for(change: dict[str, Any]) -> None:
    silent = d.worker("other", heard_seconds_ago=None, canary="Unknown", **change)
    facts = d.heard(d.state(d.worker(), silent))
    assert d.levels(event_check(facts)) == ["ok"]
    assert d.levels(exactness_check(facts)) == ["ok"]


def test_silence_means_here_what_it_means_to_a_frontend() -> None:
    assert STALE_SECONDS == feeds.STALE_SECONDS


@pytest.mark.parametrize("cause", get_args(Cause))
def test_a_canary_that_failed_is_a_problem_with_its_cause_and_advice(cause: str) -> None:
    wrong = d.worker(canary="False", standing="degraded", canary_cause=cause, canary_message="block 2 differs")
    finding = d.the(exactness_check(d.heard(d.state(wrong))), "problem")
    assert f"({cause}): block 2 differs" in finding.seen
    assert finding.do == findings.CAUSES[cause]


def test_what_is_shown_has_every_finding_and_markup_is_text() -> None:
    name = "registry.example/" + "a" * 90
    found = (
        Finding("ok", "spec", "spec.pools[0] is [bold]fine[/bold]"),
        Finding("problem", "pods", "it fell", "Lift it"),
        Finding("ok", "pods", name),
    )
    console = Console(width=60, record=True, file=io.StringIO())
    findings.show(console, [Diagnosis("home/vl", found)])
    text = console.export_text()
    assert "spec.pools[0] is [bold]fine[/bold]" in text
    assert "PROBLEM" in text
    assert "-> Lift it" in text
    assert "1 problem, 0 warnings" in text
    assert name in "".join(line.strip() for line in text.splitlines()), "a name longer than a line is shown whole"
    report = json.loads(json.dumps(findings.as_json([Diagnosis("home/vl", found)])))
    assert (report["passed"], report["problems"]) == (False, 1)
    shown = {"level": "problem", "check": "pods", "seen": "it fell", "do": "Lift it"}
    assert report["subjects"][0]["findings"][1] == shown
