"""Checks of a deployment's spec, conditions, references, Pod Security level and network policies. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from mmrouter_cli.doctor.advice import REASONS
from mmrouter_cli.doctor.facts import DeploymentFacts
from mmrouter_cli.doctor.findings import Finding, ok, problem, warning
from mmrouter_cli.status.frontend_state import Unread
from mmrouter_lib.api import MMRouterDeployment, SpecError
from mmrouter_operator.model.credentials import new_secret_data
from mmrouter_operator.model.labels import POOL_LABEL
from mmrouter_operator.render import render
from mmrouter_operator.render.pod.pod_security import violations
from mmrouter_operator.status import conditions as c

ENFORCE = "pod-security.kubernetes.io/enforce"

_UNDER_WAY = frozenset({"RollingOut", "Verifying", "NoReplicas", "Paused", "SecretRecreated", "ScaledToZero"})
"""Reasons of something in progress or intended."""
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
"""Prefixes of violations that the baseline level allows."""


def spec_check(facts: DeploymentFacts) -> Iterator[Finding]:
    """Check that this version can read and render the spec."""
    check = "spec"
    dep = facts.dep
    if not isinstance(dep, SpecError):
        try:
            render(dep, secrets=new_secret_data())
        except SpecError as error:
            dep = error
    if isinstance(dep, SpecError):
        for path, sentence in dep.errors:
            # The operator may have a default image configured.
            if "no default engine image" in sentence:
                do = "Name one, or configure it in the operator's engineImages: its SpecValid below decides."
                yield warning(check, f"{path}: {sentence}", do)
            else:
                yield problem(check, f"{path}: {sentence}", "Correct the field.")
        return
    yield ok(check, "it can be read and rendered")


def condition_check(facts: DeploymentFacts) -> Iterator[Finding]:
    """Check the conditions that the operator reports."""
    check = "conditions"
    status = facts.resource.get("status") or {}
    conditions = status.get("conditions") or []
    if not conditions:
        yield problem(check, "no operator has processed it yet", "See that one runs and manages this namespace.")
        return
    generation = facts.resource["metadata"].get("generation", 0)
    if status.get("observedGeneration", 0) < generation:
        yield warning(
            check,
            f"the status is of generation {status.get('observedGeneration', 0)}, the spec of {generation}",
            "Wait a moment; where that does not help, see the operator's log.",
        )
    bad = [item for item in conditions if _is_bad(item)]
    yield from (_of_condition(item) for item in bad)
    if not any(item["type"] not in _ADVICE_ONLY for item in bad):
        yield ok(check, f"{status.get('phase', 'Unknown')}: all conditions of a working deployment hold")


def _is_bad(item: Mapping[str, Any]) -> bool:
    if item["type"] == c.PROGRESSING:
        return False  # Ready and Degraded report the same in more detail
    return bool(item["status"] != ("False" if item["type"] in c.ABNORMAL else "True"))


def _of_condition(item: Mapping[str, Any]) -> Finding:
    reason = item["reason"]
    seen = f"{item['type']} is {item['status']}, {reason}: {item.get('message', '')}"
    do = REASONS.get(reason, f"See docs/conditions.md, {reason}.")
    mild = item["type"] in _ADVICE_ONLY or reason in _UNDER_WAY or item["status"] == "Unknown"
    return warning("conditions", seen, do) if mild else problem("conditions", seen, do)


def reference_check(facts: DeploymentFacts) -> Iterator[Finding]:
    """Check that the objects that the resource names exist."""
    check = "references"
    for (ref, path), referred in facts.referred.items():
        what = f"{path}: {ref.kind} {ref.name}"
        if isinstance(referred, Unread):
            yield warning(check, f"{what} cannot be read: {referred.why}", "Run this with the right to read it.")
        elif referred is None:
            where = f" in namespace {ref.namespace}" if ref.namespace else ""
            yield problem(check, f"{what} does not exist", f"Create the {ref.kind}{where}.")
        elif ref.kind == "PersistentVolumeClaim" and (referred.get("status") or {}).get("phase") == "Lost":
            yield problem(check, f"{what} has lost its volume", f"kubectl describe pvc -n {ref.namespace} {ref.name}")
    existing = sum(isinstance(referred, dict) for referred in facts.referred.values())
    if existing == len(facts.referred):
        yield ok(check, f"all {existing} objects that it names exist" if existing else "it names no other objects")


def security_check(facts: DeploymentFacts, dep: MMRouterDeployment) -> Iterator[Finding]:
    """Check that the namespace's Pod Security level admits the pods."""
    check = "Pod Security"
    if isinstance(facts.namespace, Unread):
        yield warning(
            check, f"the namespace cannot be read: {facts.namespace.why}", "Run this with the right to read it."
        )
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
            f"{seen}; if the server's default is stricter than privileged, it rejects pods: {'; '.join(broken)}",
            f"State the level: kubectl label namespace {dep.metadata.namespace} {ENFORCE}=privileged",
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
    """Report which network policies protect the pods."""
    check = "NetworkPolicy"
    if dep.spec.network_policy.enabled:
        yield warning(
            check,
            "policies exist; whether the cluster's network plugin enforces them is not visible in its API",
            "Try it: a pod of another kind must not reach an engine's port 8000 (docs/children.md has the table).",
        )
    else:
        yield warning(
            check,
            "networkPolicy.enabled is false: every pod of the cluster can reach an engine's or a sidecar's port",
            "Enable it unless your own policies do the same. Keys protect these ports in any case.",
        )


def violated(dep: MMRouterDeployment, level: str) -> list[str]:
    """Return the pods' violations of a Pod Security level; without a level, of restricted."""
    if level == "privileged":
        return []
    try:
        objects = render(dep, secrets=new_secret_data())
    except SpecError:
        return []  # reported by the check of the spec
    result = []
    for obj in objects:
        if obj["kind"] == "Deployment":
            pool = obj["spec"]["selector"]["matchLabels"].get(POOL_LABEL, "")
            who = f"pool {pool}" if pool else "frontend"
            for place, what in violations(obj["spec"]["template"]["spec"]):
                if level != "baseline" or not _baseline_allows(what):
                    result.append(f"{who}: {place}: {what}")
    return list(dict.fromkeys(result))


def _baseline_allows(what: str) -> bool:
    # Of the volumes, baseline forbids those of the node only.
    return what.startswith(_ONLY_RESTRICTED) or (
        "is not among the volumes" in what and not what.startswith("hostPath ")
    )
