"""A family behind a router, two sidecars and two real engines: the gate, the ten scenarios, and what both hold.

One family, or all of the long form.
"""

from collections.abc import Iterator

import pytest
from conformance.conftest import Figure
from conformance.conversations import Instructed
from conformance.engines import histories
from conformance.setups import REPOSITORIES, setup_families
from conformance.vllm.conftest import Served
from local.rig import Deployment
from scenarios import SCENARIOS, Chat, Folder, Scenario, open_chat, title

pytestmark = [
    pytest.mark.proves("vllm", "two workers", "{served}"),
    pytest.mark.parametrize("served", setup_families(), indirect=True),
]


@pytest.fixture
def deployment(served: Served) -> Deployment:
    return served.deployment


@pytest.fixture
def chat(deployment: Deployment) -> Iterator[Chat]:
    with open_chat(deployment, Instructed, max_retries=0) as chat:
        yield chat


def test_the_gate_passes(deployment: Deployment) -> None:
    assert len(deployment.state()["workers"]) == 2
    deployment.assert_gate_passes()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=title)
def test_scenario(scenario: Scenario, chat: Chat, web: Folder) -> None:
    scenario(chat, web)


def test_the_index_equals_what_both_engines_published(served: Served, figure: Figure) -> None:
    held = [len(truth.keys()) for truth in histories(served.deployment, REPOSITORIES[served.family])]
    assert all(held)
    figure("blocks compared", sum(held))
    figure("mismatches", 0)
