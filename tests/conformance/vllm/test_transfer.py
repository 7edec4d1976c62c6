"""The ten scenarios in every mode of ``routing.transfer``: the answers do not depend on how an image is handed over.

With ``none`` the engine receives the bytes and processes the image. With ``shm`` and ``nixl`` a real ``vllm launch
render`` processes it, and the engine, stock but for the plugin, reads the result from shared memory or over NIXL.

Only the frontend has the mode, so one engine and one renderer serve all three. ``test_routing`` covers an engine
without the plugin. NIXL reads that fail drain nothing, and nothing wrong is ever read.
"""

import itertools
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from artefacts import Record
from conformance.conftest import Figure, Shrunk
from conformance.conversations import Instructed
from conformance.engine_process import require_memory
from conformance.engines import deployed, pool, resource
from conformance.setups import REPOSITORIES, setup_families
from local.rig import Deployment, samples
from long_form import parameters
from scenarios import SCENARIOS, Chat, Folder, Scenario, open_chat, title
from waiting import wait_for

from mmrouter_handover.plugin.start import install

PROVES = pytest.mark.proves("vllm", "hand-over {mode}", "{deployment}")
WAYS = {"nixl": "nixl", "shm": "shm", "none": ""}
"""Mode -> how a new image reaches an engine; empty where nothing is handed over."""
LATE = {("nixl", "failed"), ("nixl", "resting"), ("shm", ""), ("file", "")}
"""Ways and reasons of images whose read over NIXL takes longer than three seconds, as happens on a busy machine."""


@pytest.fixture(scope="module", params=setup_families())
def deployment(
    request: pytest.FixtureRequest, vllm_env: Path, shrunk: Shrunk, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """One engine and a renderer, with hand-over forced even where it is not cheaper."""
    require_memory()
    model = shrunk(REPOSITORIES[request.param])
    pools = [pool("worker"), pool("renderer")]
    made = resource(model, pools, frontend={"MMROUTER_HANDOVER": "always"}, transfer=next(iter(WAYS)))
    with deployed(vllm_env, tmp_path_factory.mktemp("transfer"), made) as deployment:
        yield deployment


@pytest.fixture(scope="module", params=parameters(WAYS, "nixl", "shm"))
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
    with open_chat(deployment, Instructed, max_retries=0) as chat:
        yield chat


def way(deployment: Deployment, chat: Chat, image: str) -> str:
    raw = chat.client.chat.completions.with_raw_response.create(
        model="demo", messages=chat.messages(image, "what?"), max_tokens=1
    )
    travelled = deployment.decision(raw)["travelled"]
    return str(travelled[0]["how"]) if travelled else ""


def counted(deployment: Deployment) -> dict[tuple[str, str], float]:
    """Return (way, reason) -> number of images; the reason says why another way was not taken."""
    found = samples(str(httpx.URL(deployment.controls[0]).host), "mmrouter_handover_total")
    return {(each.labels["how"], each.labels["reason"]): each.value for each in found}


@PROVES
@pytest.mark.parametrize("scenario", SCENARIOS, ids=title)
def test_scenario(scenario: Scenario, deployment: Deployment, mode: str, chat: Chat, web: Folder) -> None:
    before = counted(deployment)
    scenario(chat, web)
    passed = {key: value - before.get(key, 0) for key, value in counted(deployment).items()}
    others = {key for key, value in passed.items() if value} - {(WAYS[mode], "")}
    assert not others or (mode == "nixl" and others <= LATE)


@PROVES
def test_modes_with_a_hand_over_hand_images_over(
    deployment: Deployment, mode: str, chat: Chat, record: Record, figure: Figure
) -> None:
    """The scenarios check that images went no other way than one allowed; this checks that they were handed over."""
    late = counted(deployment).get(("nixl", "failed"), 0)
    if late:  # the pause after a failure ends
        names = map(str, itertools.count())
        wait_for(lambda: way(deployment, chat, chat.image(next(names))) == WAYS[mode], 120, f"an image goes by {mode}")
    found = {f"{how} {reason}".strip(): count for (how, reason), count in counted(deployment).items() if count}
    record(f"transfer {mode}: images by their way, and ways that were not taken before the plugins had answered", found)
    figure("images handed over", int(found.get(WAYS[mode], 0)))
    assert not WAYS[mode] or found[WAYS[mode]] > (0 if late else len(SCENARIOS))
    assert WAYS[mode] or not found


SCRIPT = Path(__file__).with_name("nixl_reads.py")
ROUNDS = 20


def test_case_64_failed_reads_drain_no_pool_whatever_the_renderer_does(vllm_env: Path, tmp_path: Path):
    """The pool holds eight of these items: twenty buffers that are not given back would be seen."""
    if not list(vllm_env.glob("lib/python3*/site-packages/nixl")):
        pytest.skip("not run: the engine's environment has no NIXL")
    install(tmp_path / "plugin")
    done = subprocess.run(
        [str(vllm_env / "bin" / "python"), str(SCRIPT), str(tmp_path / "plugin"), str(ROUNDS)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    steps = json.loads(done.stdout)
    came = {name: set(step["came"]) for name, step in steps.items() if isinstance(step, dict)}
    assert came == {
        "well": {"ok"},
        "released": {"stale"},
        "no such memory": {"failed"},
        "another item": {"corrupt"},
        "well after these": {"ok"},
        "standing still": {"failed"},
        "going on": {"ok"},
        "standing still again": {"failed"},
        "killed": {"failed"},
    }
    assert [step["wrong"] for step in steps.values() if isinstance(step, dict)] == [0] * len(came)
    assert (steps["settled after it went on"], steps["settled after its end"]) == (True, True)
    files = [step["files"] for step in steps.values() if isinstance(step, dict)]
    assert max(files) <= files[0] + 5, files
    for name, step in steps.items():
        if isinstance(step, dict):
            # A renderer that stands still has one buffer, and gets no other until it has let go of it.
            assert step["stuck"] == name.startswith("standing still"), name
            assert bool(step["lent"]) == bool(step["stuck"]), name
