"""The long form: every setup with every family that an engine serves, each as a deployment of its own.

Where the router learns images, each is shown behind other texts until it is known: then the same is exact as elsewhere.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conformance.conftest import Figure, Shrunk
from conformance.conversations import QUESTION, Instructed, Taught
from conformance.engine_process import require_memory
from conformance.engines import deployed, histories, pods, pool, resource, sglang_manifest
from conformance.setups import RENDERED, REPOSITORIES, Place, named_families, places
from conformance.sglang.test_llava import FAMILIES as LLAVA
from conformance.sglang.test_llava import checkpoint
from conformance.sglang.test_pairs import HOST_COPIES
from conformance.vllm.test_encoders import EMBEDDING
from local.rig import Deployment, metric
from scenarios import SCENARIOS, Chat, Folder, Scenario, open_chat, title
from waiting import wait_for

pytestmark = pytest.mark.proves("{place.engine}", "{place.setup}", "{place.family}")
VERIFY_SECONDS = 600.0
FETCHED = "vllm:prompt_tokens_by_source_total"


ELSEWHERE = pytest.mark.skip(reason="not run: vllm/test_unknown_families.py has the only setup of this family")
WITHOUT_CELLS = [Place("vllm", "renderer, worker", family) for family in RENDERED if family in named_families()]
PLACES = places() or [pytest.param(each, marks=ELSEWHERE) for each in WITHOUT_CELLS]


@pytest.fixture(scope="module", params=PLACES, ids=str)
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.param
    return found


@pytest.fixture(scope="module")
def deployment(
    place: Place, request: pytest.FixtureRequest, shrunk: Shrunk, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    require_memory(engines=len(place.roles))
    env: Path = request.getfixturevalue(f"{place.engine}_env")
    folder = tmp_path_factory.mktemp("cell")
    written = vllm(place, shrunk) if place.engine == "vllm" else sglang(place, shrunk, env, folder)
    with deployed(env, folder, written) as deployment:
        wait_for(lambda: verified(deployment), VERIFY_SECONDS, "every engine but encoders is verified")
        yield deployment


def vllm(place: Place, shrunk: Shrunk) -> dict[str, Any]:
    pools = [pool(role) for role in place.roles]
    return resource(shrunk(REPOSITORIES[place.family]), pools, minPrefillTokens=0)


def sglang(place: Place, shrunk: Shrunk, env: Path, folder: Path) -> dict[str, Any]:
    mode = next((mode for mode, family in LLAVA.items() if family == place.family), None)
    model = checkpoint(env, shrunk, folder, mode) if mode else shrunk(REPOSITORIES[place.family])
    pairs = "prefill" in place.roles
    args = [*(HOST_COPIES if pairs else ()), *(("--load-format", "auto") if mode else ())]
    more = {"kvConnector": {"transferBackend": "nixl"}} if pairs else {}
    pools = [(role, 2 if place.setup == "two workers" else 1) for role in place.roles]
    return sglang_manifest(model, REPOSITORIES[place.family], pools, *args, **more)


def verified(deployment: Deployment) -> bool:
    workers = deployment.state()["workers"]
    return {worker["standing"] for worker in workers if worker["role"] != "encoder"} == {"verified"}


@pytest.fixture
def chat(deployment: Deployment, place: Place) -> Iterator[Chat]:
    with open_chat(deployment, Taught if place.learned else Instructed, max_retries=0) as chat:
        yield chat


def test_the_gate_passes(deployment: Deployment, place: Place) -> None:
    deployment.assert_gate_passes(*(["--no-strict"] if place.learned else []))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=title)
def test_scenario(scenario: Scenario, chat: Chat, web: Folder) -> None:
    scenario(chat, web)


def test_every_stage_has_its_part_of_a_new_request(
    deployment: Deployment, place: Place, chat: Chat, figure: Figure
) -> None:
    before = {role: work(deployment, place, role) for role in place.roles}
    decision = chat.decided(chat.image("staged"), QUESTION)
    outcomes = {note["stage"]: note["outcome"] for note in decision["chain"]}
    assert outcomes.get("prefill") == ("done" if "prefill" in place.roles else None)
    assert outcomes.get("encode") == ("done" if place.engine == "vllm" and "encoder" in place.roles else None)
    for role, name in (("encoder", "images encoded"), ("decode", "tokens fetched")):
        if role in before and (place.engine, role) != ("sglang", "decode"):  # has no count of them
            done = work(deployment, place, role) - before[role]
            assert done > 0
            figure(name, int(done))


def work(deployment: Deployment, place: Place, role: str) -> float:
    """Return the images that encoders encoded, or the tokens that decode engines fetched."""
    if role == "decode":
        labels = {"source": "external_kv_transfer"}
        return sum(metric(each["ip"], FETCHED, 8000, **labels) for each in deployment.workers(role))
    if role != "encoder":
        return 0
    if place.engine == "sglang":
        name = "sglang:encoder_cache_total_files_total"
        return sum(metric(each["ip"], name, 8000) for each in deployment.workers(role))
    shared = pods(deployment)[place.roles[1]].processes[0].environ()["MMROUTER_SHARED_DIR"]
    return len(list(Path(shared).glob(f"*/{EMBEDDING}")))


def test_the_index_equals_what_the_engines_published(deployment: Deployment, place: Place, figure: Figure) -> None:
    held = [len(truth.keys()) for truth in histories(deployment, REPOSITORIES[place.family], place.engine)]
    assert sum(held)
    figure("blocks compared", sum(held))
    figure("mismatches", 0)
