"""The ten scenarios in every mode of ``routing.transfer``: which way an image takes changes nothing that is seen of it.

With ``none`` an engine gets the bytes and processes the image. With ``shm`` and ``nixl`` a real ``vllm launch render``
has processed it, and the engine, stock but for our plugin, reads that from a slot on the shared tmpfs or over NIXL.

The mode is the frontend's affair: one engine and one renderer stay for all three, and know none of them. An engine
without the plugin is served with ``none`` in ``test_routing``.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from conformance.engine_process import require_memory
from conformance.resources import REPOSITORY, pool, resource
from local.rig import Deployment, running, wait_for
from local.test_scenarios import Folder, web
from prometheus_client.parser import text_string_to_metric_families
from scenarios import SCENARIOS, Chat, Scenario, title

__all__ = ["web"]

WAYS = {"nixl": "nixl", "shm": "shm", "none": ""}
"""Mode -> how an image reaches an engine that has never seen it; empty where nothing is handed over at all."""


@pytest.fixture(scope="module")
def deployment(
    vllm_env: Path, shrunk: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """One engine and a renderer; hand-overs whether they pay off or not."""
    require_memory()
    pools = [pool("worker"), pool("renderer")]
    made = resource(shrunk(REPOSITORY), pools, frontend={"MMROUTER_HANDOVER": "always"}, transfer=next(iter(WAYS)))
    file = tmp_path_factory.mktemp("transfer") / "deployment.yaml"
    file.write_text(yaml.safe_dump(made))
    with running(file, "--engines", "path", "--engine-env", str(vllm_env), start_seconds=650) as deployment:
        yield deployment


@pytest.fixture(scope="module", params=WAYS)
def mode(request: pytest.FixtureRequest, deployment: Deployment) -> str:
    """The mode of the frontend, which reads it when it starts: it is started anew for another one."""
    mode = str(request.param)
    (router,) = deployment.processes("router").values()
    config = Path(router.environ()["MMROUTER_CONFIG"]) / "deployment.json"
    told = json.loads(config.read_text())
    if told["spec"]["routing"]["transfer"] != mode:
        told["spec"]["routing"]["transfer"] = mode
        config.write_text(json.dumps(told))
        router.terminate()
        router.wait(60)
        wait_for(deployment.settled, 60, "the frontend is back and sees every engine verified")
    with deployment.control() as control, deployment.client() as client:
        chat = Chat("demo", client, [control])
        # The router asks plugins now and then what they can do.
        wait_for(lambda: way(deployment, chat, chat.image("first")) == WAYS[mode], 60, f"an image goes by {mode}")
    return mode


@pytest.fixture
def chat(deployment: Deployment) -> Iterator[Chat]:
    with ExitStack() as stack:
        control = stack.enter_context(deployment.control())
        yield Chat("demo", stack.enter_context(deployment.client(max_retries=0)), [control])


def way(deployment: Deployment, chat: Chat, image: str) -> str:
    """Send an image; return how it reached the engine."""
    raw = chat.client.chat.completions.with_raw_response.create(
        model="demo", messages=chat.messages(image, "what?"), max_tokens=1
    )
    with deployment.control() as control:
        found = control.get(f"/control/decisions/{raw.headers['x-mmrouter-request-id']}").raise_for_status().json()
    return str(found["travelled"][0]["how"]) if found["travelled"] else ""


def counted(deployment: Deployment) -> dict[tuple[str, str], float]:
    """Return how many images took each way, and why others did not: way, reason -> how many."""
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


def test_images_were_handed_over_in_the_modes_that_do(
    deployment: Deployment, mode: str, record: Callable[[str, Any], None]
) -> None:
    """The scenarios look that there was no other way; here, that there were images at all."""
    found = {f"{how} {reason}".strip(): count for (how, reason), count in counted(deployment).items() if count}
    record(f"transfer {mode}: images by their way, and ways that were not taken before the plugins had answered", found)
    assert not WAYS[mode] or found[WAYS[mode]] > len(SCENARIOS)
    assert WAYS[mode] or not found
