"""Every right that the chart and the operator grant has a row in docs/operator.md, and none is broader than its row."""

import re
from typing import Any

from chart.helm import ROOT, Helm
from unit.render.objects import GOLDENS, load, rendered

Right = tuple[str, str, str, str]
"""Role, group and resource as ``group/resource``, verb, and the only object's name or nothing."""
ROW = re.compile(
    r"^\| (operator|lease|gateway|frontend|view|edit) \| (\S*/\S+) \| ([a-z, ]+) \| (.+) \|$", re.MULTILINE
)
NAMES = {
    "mmrouter-operator": "operator",
    "mmrouter-operator-lease": "lease",
    "mmrouter-gateway": "gateway",
    "mmrouter-view": "view",
    "mmrouter-edit": "edit",
}
LEASE = "mmrouter-operator"
FORBIDDEN = {"*", "escalate", "bind", "impersonate", "approve", "sign", "use", "deletecollection"}
"""Verbs that the operator and its pods never have; users with `edit` may delete a collection of models."""


def documented() -> set[Right]:
    rows = ROW.findall((ROOT / "docs" / "operator.md").read_text())
    assert all(purpose.strip() for *_, purpose in rows)
    return {(role, place, verb, "") for role, place, verbs, _ in rows for verb in verbs.split(", ")}


def granted(role: str, rules: list[dict[str, Any]]) -> set[Right]:
    assert not any("nonResourceURLs" in rule for rule in rules)
    return {
        (role, f"{group}/{resource}", verb, name)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [""])
    }


def all_granted(helm: Helm) -> set[Right]:
    found: set[Right] = set()
    for values in ({}, {"watchNamespaces": ["team-a"]}, {"gateway": {"enabled": True}}):
        objects = helm.render(values).objects
        roles = [obj for obj in objects if obj["kind"] in ("ClusterRole", "Role")]
        found |= {right for role in roles for right in granted(NAMES[role["metadata"]["name"]], role["rules"])}
    for name in GOLDENS:
        roles = [obj for obj in rendered(load(name)) if obj["kind"] in ("Role", "ClusterRole")]
        found |= {right for role in roles for right in granted("frontend", role["rules"])}
    return found


def test_every_right_has_a_row_with_its_purpose_and_every_row_is_granted(helm: Helm) -> None:
    actual = all_granted(helm)
    named = {right for right in actual if right[3]}
    assert {(role, place, verb) for role, place, verb, _ in named} == {
        ("lease", "coordination.k8s.io/leases", verb) for verb in ("get", "update")
    }
    assert {name for *_, name in named} == {LEASE}
    assert {(*right[:3], "") for right in actual} == documented()


def test_no_right_is_a_wildcard_or_leads_to_others(helm: Helm) -> None:
    rights = all_granted(helm)
    assert not [right for right in rights if "*" in right[1]]
    assert {right[2] for right in rights if right[0] != "edit"} & FORBIDDEN == set()
    places = {right[1] for right in rights if right[0] != "edit"}
    assert not places & {"/pods/exec", "/pods/attach", "/pods/portforward", "/serviceaccounts/token", "/nodes"}
    # Secrets are created and read, and never changed or deleted.
    assert {right[2] for right in rights if right[1] == "/secrets"} == {"get", "list", "watch", "create"}
    # A frontend sees pods and nothing else; an engine's account is in no binding.
    assert not [right for right in rights if right[0] == "frontend" and right[1] != "/pods"]
