"""The ten scenarios in every mode of ``routing.transfer``: the answers do not depend on how an image is handed over.

With ``none`` the engine receives the bytes and processes the image. With ``shm`` and ``nixl`` a real ``vllm launch
render`` processes it, and the engine, stock but for the plugin, reads the result from shared memory or over NIXL.

Only the frontend has the mode, so one engine and one renderer serve all three. ``test_routing`` covers an engine
without the plugin.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from conformance.engine_process import require_memory
from conformance.resources import REPOSITORY, pool, resource
from local.rig import Deployment, running
from local.test_scenarios import Folder, web
from prometheus_client.parser import text_string_to_metric_families
from scenarios import SCENARIOS, Chat, Scenario, open_chat, title
from waiting import wait_for

__all__ = ["web"]

WAYS = {"nixl": "nixl", "shm": "shm", "none": ""}
"""Mode -> how a new image reaches an engine; empty where nothing is handed over."""


@pytest.fixture(scope="module")
def deployment(
    vllm_env: Path, shrunk: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """One engine and a renderer, with hand-over forced even where it is not cheaper."""
    require_memory()
    pools = [pool("worker"), pool("renderer")]
    made = resource(shrunk(REPOSITORY), pools, frontend={"MMROUTER_HANDOVER": "always"}, transfer=next(iter(WAYS)))
    file = tmp_path_factory.mktemp("transfer") / "deployment.yaml"
    file.write_text(yaml.safe_dump(made))
    with running(file, "--engines", "path", "--engine-env", str(vllm_env), start_seconds=650) as deployment:
        yield deployment


@pytest.fixture(scope="module", params=WAYS)
def mode(request: pytest.FixtureRequest, deployment: Deployment) -> str:
    """The mode of the frontend, which is restarted to change it."""
    mode = str(request.param)
    (router,) = deployment.processes("router").values()
    config = Path(router.environ()["MMROUTER_CONFIG"]) / "deployment.json"
    config_json = json.loads(config.read_text())
    if config_json["spec"]["routing"]["transfer"] != mode:
        config_json["spec"]["routing"]["transfer"] = mode
        config.write_text(json.dumps(config_json))
        router.terminate()
        router.wait(60)
        wait_for(deployment.settled, 60, "the frontend is back and sees every engine verified")
    # The official client retries a connection that the Service still forwarded to the former router.
    with open_chat(deployment) as chat:
        # The router queries the plugins' capabilities periodically.
        wait_for(lambda: way(deployment, chat, chat.image("first")) == WAYS[mode], 60, f"an image goes by {mode}")
    return mode


@pytest.fixture
def chat(deployment: Deployment) -> Iterator[Chat]:
    with open_chat(deployment, max_retries=0) as chat:
        yield chat


def way(deployment: Deployment, chat: Chat, image: str) -> str:
    """Send an image; return how it reached the engine."""
    raw = chat.client.chat.completions.with_raw_response.create(
        model="demo", messages=chat.messages(image, "what?"), max_tokens=1
    )
    travelled = deployment.decision(raw)["travelled"]
    return str(travelled[0]["how"]) if travelled else ""


def counted(deployment: Deployment) -> dict[tuple[str, str], float]:
    """Return (way, reason) -> number of images; the reason says why another way was not taken."""
    page = httpx.get(deployment.controls[0].replace(":8001", ":9090") + "/metrics").text
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return {
        (sample.labels["how"], sample.labels["reason"]): sample.value
        for sample in samples
        if sample.name == "mmrouter_handover_total"
    }


@pytest.mark.parametrize("scenario", SCENARIOS, ids=title)
def test_scenario(scenario: Scenario, deployment: Deployment, mode: str, chat: Chat, web: Folder) -> None:
    before = counted(deployment)
    scenario(chat, web)
    passed = {key: value - before.get(key, 0) for key, value in counted(deployment).items()}
    assert {key for key, value in passed.items() if value} <= {(WAYS[mode], "")}


def test_modes_with_a_hand_over_hand_images_over(
    deployment: Deployment, mode: str, record: Callable[[str, Any], None]
) -> None:
    """The scenarios check that no other way was used; this checks that images were handed over at all."""
    found = {f"{how} {reason}".strip(): count for (how, reason), count in counted(deployment).items() if count}
    record(f"transfer {mode}: images by their way, and ways that were not taken before the plugins had answered", found)
    assert not WAYS[mode] or found[WAYS[mode]] > len(SCENARIOS)
    assert WAYS[mode] or not found
