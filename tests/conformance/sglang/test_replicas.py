"""Two real SGLang engines behind two frontends: computed and learned identities, eviction, and the death of an engine.

The engines' caches are small. At the end of a round both routers' index must equal what an independent reader makes of
the engines' own event history.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
from artefacts import Record
from conformance.conftest import Figure, Shrunk
from conformance.conversations import Taught
from conformance.engine_process import require_memory
from conformance.engines import deployed as deployed_engines
from conformance.engines import histories, sglang_manifest
from conformance.setups import TINY
from local.rig import Deployment
from local.test_sglang import BLOCK, LONG, Served, image, text
from long_form import parameters
from scenarios import SCENARIOS, Chat, Folder, Scenario, open_chat, title
from waiting import wait_for

pytestmark = pytest.mark.proves("sglang", "two workers", "qwen2_vl")
CACHE_TOKENS = 9216  # the longest context and little more
OWN_NAMES = ("--mm-preprocess-cache-size-mb", "0")
PROVE_SECONDS = 300.0
"""Bound of a hang: a router trusts what it sees a minute after its start, and engines may share two cores."""


@pytest.fixture(scope="module", params=parameters(["artifact", "learned"], "artifact"))
def served(
    request: pytest.FixtureRequest, sglang_env: Path, shrunk: Shrunk, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    require_memory()
    args = OWN_NAMES if request.param == "learned" else ()
    pools = [("worker", 2)]
    made = sglang_manifest(shrunk(TINY), TINY, pools, "--max-total-tokens", str(CACHE_TOKENS), *args)
    made["spec"]["engine"]["blockSize"] = BLOCK
    made["spec"]["frontend"]["replicas"] = 2
    with deployed_engines(sglang_env, tmp_path_factory.mktemp("replicas"), made) as deployment:
        wait_for(deployment.settled, PROVE_SECONDS, "both engines are verified on both frontends")
        yield Served(request.param, deployment)


@pytest.fixture(scope="module")
def deployment(served: Served) -> Deployment:
    return served.deployment


@pytest.fixture
def chat(served: Served) -> Iterator[Chat]:
    with ExitStack() as stack:
        kind = Chat if served.provider == "artifact" else Taught
        chat = stack.enter_context(open_chat(served.deployment, kind, max_retries=0))
        if isinstance(chat, Taught):
            urls = [f"{frontend['url']}/v1" for frontend in served.deployment.run["frontends"]]
            chat.frontends = [stack.enter_context(chat.client.with_options(base_url=url)) for url in urls]
        yield chat


def assert_indexes_are_the_engines_caches(deployment: Deployment) -> tuple[int, int]:
    """Return the blocks compared and the removals seen."""
    truths = histories(deployment, TINY, "sglang")
    return sum(len(truth.keys()) for truth in truths), sum(truth.removed for truth in truths)


def test_the_gate_passes(served: Served) -> None:
    served.deployment.assert_gate_passes(*(["--no-strict"] if served.provider == "learned" else []))


def test_the_frontends_show_the_device_that_the_engines_report(served: Served) -> None:
    workers = served.deployment.state()["workers"]
    shown = [(worker["device"], worker["devices"], worker["requested_device"]) for worker in workers]
    assert shown == [("cpu", 1, "cpu")] * 2


def test_repeats_are_exact_hits_and_another_image_hits_the_text_before_it_alone(served: Served) -> None:
    parts = [text(f"{served.provider} replicas. {LONG}"), image("replica one"), text(LONG)]
    known = served.known(*parts)
    assert known["identity"]["provider"] == served.provider
    again = served.held(*parts)
    assert (again["exactness"], again["cached"]) == (
        "exact",
        min(again["overlap"] * BLOCK, (again["prompt"] - 1) // BLOCK * BLOCK),
    )
    other = served.ask(parts[0], image("replica two"), parts[2])
    assert other["cached"] == again["images"][0]["offset"] // BLOCK * BLOCK


@pytest.mark.parametrize("scenario", SCENARIOS, ids=title)
def test_scenario(scenario: Scenario, chat: Chat, web: Folder) -> None:
    scenario(chat, web)


def test_evicted_blocks_leave_the_indexes(served: Served, record: Record, figure: Figure) -> None:
    for number in range(40):
        served.ask(text(f"Volume {number} of the chronicle. " * 80), image(f"volume {number % 4}"))
    compared, removed = assert_indexes_are_the_engines_caches(served.deployment)
    record(f"replicas, sglang {served.provider}: removals seen", removed)
    assert removed > 50
    figure("blocks removed", removed)
    figure("blocks compared", compared)
    figure("mismatches", 0)


def test_a_killed_engine_is_replaced_and_its_blocks_are_forgotten(served: Served) -> None:
    """The last test of a round."""
    deployment = served.deployment
    parts = [text(f"{served.provider} killed. {LONG}"), image("killed"), text(LONG)]
    served.known(*parts)
    name = served.held(*parts)["worker"]
    for child in psutil.Process(deployment.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            own = child.environ()
            if own.get("POD_NAME") == name and "SGLANG_API_KEY" in own:
                os.kill(child.pid, signal.SIGKILL)
    assert served.ask(*parts)["cached"] >= 0  # the other one answers
    wait_for(deployment.settled, PROVE_SECONDS, "the engine is verified again")
    served.known(*parts)
    assert served.held(*parts)["exactness"] == "exact"
    assert_indexes_are_the_engines_caches(deployment)
