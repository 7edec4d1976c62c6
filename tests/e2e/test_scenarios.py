"""The ten scenarios of the field's gate in real pods, with the official client through the Service's address."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from cluster.access import Access
from e2e.deploying import RESTRICTED, deploy, example, make_model
from e2e.endpoints import Reached, reached
from e2e.web import PodWeb, pod_web
from scenarios import SCENARIOS, Chat, Scenario, title


@dataclass(frozen=True)
class Fetching:
    """A deployment that fetches from a web server of its own."""

    name: str
    reached: Reached
    web: PodWeb


@pytest.fixture(scope="module")
def fetching(operated: Access) -> Iterator[Fetching]:
    """The deployment of ``examples/kind.yaml``, allowed to fetch from a pod beside it."""
    body = example()
    with operated.namespace(**RESTRICTED) as namespace:
        make_model(operated, namespace)
        web = pod_web(operated, namespace, body["spec"]["engine"]["image"])
        body["spec"]["routing"] = {"media": web.media}
        made = deploy(operated, namespace, body)
        with reached(made) as where:
            yield Fetching(made.name, where, web)


@pytest.fixture
def chat(fetching: Fetching) -> Iterator[Chat]:
    with fetching.reached.chat(fetching.name) as made:
        yield made


@pytest.mark.parametrize("scenario", SCENARIOS, ids=title)
def test_scenario(scenario: Scenario, chat: Chat, fetching: Fetching) -> None:
    scenario(chat, fetching.web)
