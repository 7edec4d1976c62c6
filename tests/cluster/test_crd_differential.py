"""The API server and the Python models agree on random specs: what one takes, the other takes."""

from collections.abc import Sequence
from typing import Any

import pytest
from cluster.controlplane import ControlPlane
from cluster.crd_cases import Object, create, good, put
from cluster.crd_mutations import ARGS, HOSTS, NUMBERS, QUANTITIES, RANGES, WORDS, documents
from hypothesis import HealthCheck, given, settings

from mmrouter_lib.api import MMRouterDeployment, SpecError, parse_deployment, to_json

BEYOND_CEL = ("is not a label name", "cannot be set here")
"""Sentences of Python's for what the server takes all the same: the syntax of label names in `nodeSelector`, as keys of
maps have no bound that a rule could be costed by, and shortened or upper-case spellings of owned flags."""


@pytest.fixture(scope="module")
def home(crd: ControlPlane) -> Any:
    """A namespace."""
    with crd.namespace() as name:
        yield name


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("spec.routing.media.allowedHosts[0]", HOSTS),
        ("spec.routing.media.allowedCIDRs[0]", RANGES),
        ("spec.routing.media.maxBytes", QUANTITIES),
        ("spec.pools[2].resources.requests.cpu", QUANTITIES),
        ("spec.routing.overlapWeight", NUMBERS),
        ("spec.engine.args[0]", ARGS),
        ("spec.pools[2].tolerations[0].key", WORDS),
        ("spec.model.servedName", WORDS),
    ],
)
def test_the_server_and_the_models_agree_on_odd_text(
    crd: ControlPlane, home: str, field: str, values: Sequence[str]
) -> None:
    for value in values:
        document = good()["encoders"]
        put(document, field, value)
        _agree(crd, home, document)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(documents())
def test_the_server_and_the_models_agree(crd: ControlPlane, home: str, document: Object) -> None:
    _agree(crd, home, document)


def _agree(crd: ControlPlane, home: str, document: Object) -> None:
    status, answer = create(crd, home, document)
    assert status in (201, 400, 422), answer
    said = _parsed(document)
    if status != 201:
        assert isinstance(said, SpecError), f"only the server refuses: {answer['message']}"
        return
    filled = _parsed(answer)
    if isinstance(filled, SpecError):
        surprising = [text for _, text in filled.errors if not any(known in text for known in BEYOND_CEL)]
        assert not surprising, f"only Python refuses: {filled}"
    elif not isinstance(said, SpecError):  # Python refuses a null that the server drops
        assert filled.spec == said.spec
        assert to_json(filled)["spec"] == to_json(said)["spec"]


def _parsed(document: Object) -> MMRouterDeployment | SpecError:
    try:
        return parse_deployment(document)
    except SpecError as error:
        return error
