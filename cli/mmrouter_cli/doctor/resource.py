"""Checks of one deployment: its spec, its conditions, what it names, and what its namespace allows. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from mmrouter_cli.doctor.advice import REASONS
from mmrouter_cli.doctor.facts import DeploymentFacts
from mmrouter_cli.doctor.finding import Finding, ok, problem, warning
from mmrouter_cli.status.frontend_state import Unread
from mmrouter_lib.api import MMRouterDeployment, SpecError
from mmrouter_operator.model.credentials import new_secret_data
from mmrouter_operator.model.labels import POOL_LABEL
from mmrouter_operator.render import render
from mmrouter_operator.render.pod.pod_security import violations
from mmrouter_operator.status import conditions as c

ENFORCE = "pod-security.kubernetes.io/enforce"

_UNDER_WAY = frozenset({"RollingOut", "Verifying", "NoReplicas", "Paused", "SecretRecreated", "ScaledToZero"})
"""Reasons of something that is on its way, or as somebody wanted it."""
_ADVICE_ONLY = frozenset(
    {
        c.REVISION_PINNED,
        c.AUTHENTICATED,
        c.AUTOSCALING,
        c.MONITORING,
        c.RESTRICTED,
        c.OVERLAID,
        c.CHAIN,
        c.PRESSURE,
        c.COMPATIBLE,
    }
)
"""Conditions that keep nothing from working."""
_ONLY_RESTRICTED = (
    "allowPrivilegeEscalation is not false",
    "it does not drop all capabilities",
    "runAsNonRoot is not true",
    "it runs as root",
    "its seccomp profile is not set",
)
"""How what baseline allows begins, in the words of ``podsecurity``."""


def spec_check(facts: DeploymentFacts) -> Iterator[Finding]:
    """Whether this version can read and render the spec."""
    check = "spec"
    dep = facts.dep
    if not isinstance(dep, SpecError):
        try:
            render(dep, secrets=new_secret_data())
        except SpecError as error:
            dep = error
    if isinstance(dep, SpecError):
        for path, sentence in dep.errors:
            # An image may be the operator's to know.
            if "no default engine image" in sentence:
                do = "Name one, or see that the operator's engineImages do: its SpecValid below counts."
                yield warning(check, f"{path}: {sentence}", do)
            else:
                yield problem(check, f"{path}: {sentence}", "Correct the field.")
        return
    yield ok(check, "it can be read and rendered")


def condition_check(facts: DeploymentFacts) -> Iterator[Finding]:
    """What the operator says of it."""
    check = "conditions"
    status = facts.resource.get("status") or {}
    conditions = status.get("conditions") or []
    if not conditions:
        yield problem(check, "no operator has looked at it yet", "See that one runs, and looks after this namespace.")
        return
    generation = facts.resource["metadata"].get("generation", 0)
    if status.get("observedGeneration", 0) < generation:
        yield warning(
            check,
            f"the status speaks of generation {status.get('observedGeneration', 0)}, the spec is at {generation}",
            "Wait a moment; where that does not help, see the operator's log.",
        )
    bad = [item for item in conditions if _is_bad(item)]
    yield from (_of_condition(item) for item in bad)
    if not any(item["type"] not in _ADVICE_ONLY for item in bad):
        yield ok(check, f"{status.get('phase', 'told')}: all conditions of a working deployment hold")


def _is_bad(item: Mapping[str, Any]) -> bool:
    if item["type"] == c.PROGRESSING:
        return False  # Ready and Degraded say the same, and better
    return bool(item["status"] != ("False" if item["type"] in c.ABNORMAL else "True"))


def _of_condition(item: Mapping[str, Any]) -> Finding:
    reason = item["reason"]
    seen = f"{item['type']} is {item['status']}, {reason}: {item.get('message', '')}"
    do = REASONS.get(reason, f"See docs/conditions.md, {reason}.")
    mild = item["type"] in _ADVICE_ONLY or reason in _UNDER_WAY or item["status"] == "Unknown"
    return warning("conditions", seen, do) if mild else problem("conditions", seen, do)


def reference_check(facts: DeploymentFacts) -> Iterator[Finding]:
    """Whether what the resource names is there."""
    check = "references"
    for (ref, path), found in facts.found.items():
        what = f"{path}: {ref.kind} {ref.name}"
        if isinstance(found, Unread):
            yield warning(check, f"{what} cannot be looked for: {found.why}", "Ask somebody who may read it.")
        elif found is None:
            where = f" in namespace {ref.namespace}" if ref.namespace else ""
            yield problem(check, f"{what} is not there", f"Create the {ref.kind}{where}.")
        elif ref.kind == "PersistentVolumeClaim" and (found.get("status") or {}).get("phase") == "Lost":
            yield problem(check, f"{what} has lost its volume", f"kubectl describe pvc -n {ref.namespace} {ref.name}")
    there = sum(isinstance(found, dict) for found in facts.found.values())
    if there == len(facts.found):
        yield ok(check, f"all {there} objects that it names are there" if there else "it names no other objects")


def security_check(facts: DeploymentFacts, dep: MMRouterDeployment) -> Iterator[Finding]:
    """Whether the namespace's Pod Security level lets the pods in."""
    check = "Pod Security"
    if isinstance(facts.namespace, Unread):
        yield warning(check, f"the namespace cannot be read: {facts.namespace.why}", "Ask somebody who may read it.")
        return
    level = (facts.namespace["metadata"].get("labels") or {}).get(ENFORCE, "")
    broken = violated(dep, level)
    if not level:
        seen = "the namespace enforces no level of its own"
        if not broken:
            yield ok(check, f"{seen}, and every pod is within restricted")
            return
        yield warning(
            check,
            f"{seen}; should the server's default be stricter than privileged, it refuses pods: {'; '.join(broken)}",
            f"Say what you want: kubectl label namespace {dep.metadata.namespace} {ENFORCE}=privileged",
        )
    elif not broken:
        yield ok(check, f"the namespace enforces {level}, which the pods are within")
    else:
        yield problem(
            check,
            f"the namespace enforces {level}, and pods are not within it: {'; '.join(broken)}",
            "Use sharedMemory.scope: pod and no podTemplate that needs more, or a namespace with another level.",
        )


def network_check(dep: MMRouterDeployment) -> Iterator[Finding]:
    """What is known of who may reach the pods."""
    check = "NetworkPolicy"
    if dep.spec.network_policy.enabled:
        yield warning(
            check,
            "policies are made; whether the cluster's network plugin enforces them cannot be seen through its API",
            "Try it: a pod of another kind must not reach an engine's port 8000 (docs/children.md has the table).",
        )
    else:
        yield warning(
            check,
            "networkPolicy.enabled is false: every pod of the cluster may try an engine's or a sidecar's port",
            "Leave it on, unless policies of your own do the same. Keys protect these ports all the same.",
        )


def violated(dep: MMRouterDeployment, level: str) -> list[str]:
    """Return what the pods have that a Pod Security level does not allow. Without a level: what restricted does not."""
    if level == "privileged":
        return []
    try:
        objects = render(dep, secrets=new_secret_data())
    except SpecError:
        return []  # told by the check of the spec
    found = []
    for obj in objects:
        if obj["kind"] == "Deployment":
            pool = obj["spec"]["selector"]["matchLabels"].get(POOL_LABEL, "")
            who = f"pool {pool}" if pool else "frontend"
            for place, what in violations(obj["spec"]["template"]["spec"]):
                if level != "baseline" or not _baseline_allows(what):
                    found.append(f"{who}: {place}: {what}")
    return list(dict.fromkeys(found))


def _baseline_allows(what: str) -> bool:
    # Of the volumes, baseline forbids those of the node only.
    return what.startswith(_ONLY_RESTRICTED) or (
        "is not among the volumes" in what and not what.startswith("hostPath ")
    )
