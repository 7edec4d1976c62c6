"""Accounts of the pods, and the one right that one of them has."""

from collections.abc import Callable
from typing import Any

from mmrouter_lib.api import MMRouterDeployment
from mmrouter_operator.render.role import render_roles
from mmrouter_operator.render.rolebinding import render_rolebindings
from mmrouter_operator.render.serviceaccount import engine_account, frontend_account, render_serviceaccounts

Valid = Callable[[list[dict[str, Any]]], None]


def test_accounts_roles_and_bindings_are_valid_for_the_api(whole: MMRouterDeployment, valid: Valid) -> None:
    valid([*render_serviceaccounts(whole), *render_roles(whole), *render_rolebindings(whole)])


def test_no_account_hands_out_its_token_unasked(whole: MMRouterDeployment) -> None:
    accounts = {account["metadata"]["name"]: account for account in render_serviceaccounts(whole)}
    assert set(accounts) == {"qwen-vl-frontend", "qwen-vl-engine"}
    assert all(account["automountServiceAccountToken"] is False for account in accounts.values())


def test_a_frontend_may_read_pods_and_nothing_else(whole: MMRouterDeployment) -> None:
    (role,) = render_roles(whole)
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]


def test_only_the_frontend_is_bound_to_the_role(whole: MMRouterDeployment) -> None:
    (role,) = render_roles(whole)
    (binding,) = render_rolebindings(whole)
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": frontend_account(whole), "namespace": whole.metadata.namespace}
    ]
    assert engine_account(whole) != frontend_account(whole)
