"""Routers and sidecars of the previous minor version work with this one's, in every order, and no request fails."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from artefacts import Record, run_tool_or_skip
from local.load import KeptConnections, assert_replicas_agree
from local.rig import Deployment, deployed, example
from local.versions import SECONDS, Versions, replace_routers, replace_sidecars, wrong_version
from long_form import IS_LONG
from scenarios import open_chat
from waiting import wait_for

COUNTS = {"router": 2, "sidecar": 3}
SIDECARS_FIRST = (("sidecar", "new"), ("router", "new"), ("sidecar", "previous"), ("router", "previous"))
ROUTERS_FIRST = (("router", "new"), ("sidecar", "new"), ("router", "previous"), ("sidecar", "previous"))
STEPS = (*SIDECARS_FIRST, *(ROUTERS_FIRST if IS_LONG else ()))
"""Upgrade and way back: every pair of versions stands once, and in the long form a second time by the other order."""


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    made = Versions(tmp_path / "versions", Path(run_tool_or_skip("previous_version")))
    made.folder.mkdir()
    for role in COUNTS:
        made.choose(role, previous=True)
    return made


@pytest.fixture
def mixed(versions: Versions, tmp_path: Path) -> Iterator[Deployment]:
    """Three engines and two frontends, of which routers and sidecars run the previous version."""
    with deployed(tmp_path, versions.apply(example())) as deployment:
        yield deployment


def assert_exact(deployment: Deployment, about: str) -> None:
    """What one frontend placed is a whole hit for the next request, and both frontends have the same index."""
    wait_for(deployment.settled, SECONDS, f"{about}: every worker is verified on every frontend")
    with open_chat(deployment) as chat:
        question = chat.messages(chat.image("a"), "what?")
        chat.send(messages=question)
        again = chat.send(messages=question)
        assert (again.exactness, again.overlap) == ("exact", again.blocks), about
    assert_replicas_agree(deployment)


def test_every_order_of_an_upgrade_and_back_loses_no_request_and_stays_exact(
    mixed: Deployment, versions: Versions, record: Record
) -> None:
    assert_exact(mixed, "before")
    for role, count in COUNTS.items():
        assert not wrong_version(mixed, versions, role, count, previous=True)
    clients = KeptConnections([frontend["url"] for frontend in mixed.run["frontends"]])
    with clients.asking():
        clients.more(12, seconds=SECONDS)
        for role, version in STEPS:
            about = f"{role}s of the {version} version"
            versions.choose(role, previous=version == "previous")
            if role == "sidecar":
                replace_sidecars(mixed)
            else:
                replace_routers(mixed, clients)
            assert not wrong_version(mixed, versions, role, COUNTS[role], previous=version == "previous")
            clients.more(12, seconds=SECONDS)
            assert_exact(mixed, about)
    answers = clients.answered.total()
    record("routers and sidecars of two versions", f"{len(STEPS)} replacements, {answers} answers, 0 failed")
