"""The operator's rights as the chart gives them: those of files/, to its ServiceAccount, and no others."""

from typing import Any

import pytest
import yaml
from chart.cases import CASES
from chart.helm import CHART, NAMESPACE, Helm, Rendered

RULES = yaml.safe_load((CHART / "files" / "clusterrole.yaml").read_text())["rules"]
LEASE_RULES = yaml.safe_load((CHART / "files" / "lease-role.yaml").read_text())["rules"]
SUBJECT = {"kind": "ServiceAccount", "name": "mmrouter-operator", "namespace": NAMESPACE}


def granted(made: Rendered) -> list[tuple[str, str, str, Any]]:
    """Return (kind, name, namespace, rules) of every bound role, sorted."""
    found = []
    for binding in made.all("ClusterRoleBinding") + made.all("RoleBinding"):
        assert binding["subjects"] == [SUBJECT]
        reference = binding["roleRef"]
        role = next(
            role
            for role in made.all(reference["kind"])
            if role["metadata"]["name"] == reference["name"]
            and role["metadata"].get("namespace") == binding["metadata"].get("namespace")
        )
        found.append((role["kind"], role["metadata"]["name"], role["metadata"].get("namespace", ""), role["rules"]))
    return sorted(found, key=lambda row: row[:3])


def test_a_cluster_wide_operator_has_the_rules_of_the_files(helm: Helm) -> None:
    assert granted(helm.render()) == [
        ("ClusterRole", "mmrouter-operator", "", RULES),
        ("Role", "mmrouter-operator-lease", NAMESPACE, LEASE_RULES),
    ]


def test_an_operator_for_namespaces_has_the_same_rules_there_and_nothing_cluster_wide(helm: Helm) -> None:
    values, options = CASES["one team"]
    made = helm.render(values, *options)
    assert granted(made) == [
        ("Role", "mmrouter-operator", "team-a", RULES),
        ("Role", "mmrouter-operator", "team-b", RULES),
        ("Role", "mmrouter-operator-lease", NAMESPACE, LEASE_RULES),
    ]
    assert "--namespace=team-a,team-b" in made.operator["args"]
    # A team without rights on the cluster can install this.
    assert not [obj["kind"] for obj in made.objects if not obj["metadata"].get("namespace")]


def test_no_rule_is_a_wildcard() -> None:
    for rule in RULES + LEASE_RULES:
        assert not [word for row in rule.values() for word in row if "*" in word], rule


@pytest.mark.parametrize("case", CASES)
def test_what_is_bound_is_the_account_that_the_pods_use(helm: Helm, case: str) -> None:
    values, options = CASES[case]
    made = helm.render(values, *options)
    name = made.pods["mmrouter-operator"]["serviceAccountName"]
    assert [obj["metadata"]["name"] for obj in made.all("ServiceAccount")] in ([name], [])
    subjects = [row for obj in made.all("ClusterRoleBinding") + made.all("RoleBinding") for row in obj["subjects"]]
    assert {row["name"] for row in subjects} <= {name}


def test_without_rbac_nothing_is_granted(helm: Helm) -> None:
    kinds = {obj["kind"] for obj in helm.render({"rbac": {"create": False}}).objects}
    assert not kinds & {"ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"}


def test_users_of_a_namespace_get_models_beside_what_they_have(helm: Helm) -> None:
    made = helm.render()
    view, edit = (made.one("ClusterRole", name) for name in ("mmrouter-view", "mmrouter-edit"))
    for role, to in ((view, {"view"}), (edit, {"edit", "admin"})):
        prefix = "rbac.authorization.k8s.io/aggregate-to-"
        assert {key.removeprefix(prefix) for key in role["metadata"]["labels"] if key.startswith(prefix)} == to
        assert {group for rule in role["rules"] for group in rule["apiGroups"]} == {"mmrouter.io"}
    assert {verb for rule in view["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}
    # A status is the operator's word.
    writable = {name for rule in edit["rules"] for name in rule["resources"]}
    assert writable == {"mmrouterdeployments", "mmrouterdeployments/scale"}
    without = helm.render({"rbac": {"aggregate": False}})
    assert [role["metadata"]["name"] for role in without.all("ClusterRole")] == ["mmrouter-operator"]
