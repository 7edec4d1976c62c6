"""Accounts of the pods, and the one right that one of them has."""

from collections.abc import Callable
from typing import Any

from unit.render.objects import children

from mmrouter_lib.api import MMRouterDeployment
from mmrouter_operator.render.serviceaccount import engine_account, frontend_account

Valid = Callable[[list[dict[str, Any]]], None]


def test_accounts_roles_and_bindings_are_valid_for_the_api(whole: MMRouterDeployment, valid: Valid) -> None:
    valid([*children(whole, "ServiceAccount"), *children(whole, "Role"), *children(whole, "RoleBinding")])


def test_no_account_hands_out_its_token_unasked(whole: MMRouterDeployment) -> None:
    accounts = {account["metadata"]["name"]: account for account in children(whole, "ServiceAccount")}
    assert set(accounts) == {"qwen-vl-frontend", "qwen-vl-engine"}
    assert all(account["automountServiceAccountToken"] is False for account in accounts.values())


def test_a_frontend_may_read_pods_and_nothing_else(whole: MMRouterDeployment) -> None:
    (role,) = children(whole, "Role")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]


def test_only_the_frontend_is_bound_to_the_role(whole: MMRouterDeployment) -> None:
    (role,) = children(whole, "Role")
    (binding,) = children(whole, "RoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": frontend_account(whole), "namespace": whole.metadata.namespace}
    ]
    assert engine_account(whole) != frontend_account(whole)
