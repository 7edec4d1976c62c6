"""Images that travel outside of requests: the same answers in every mode, and bytes wherever a hand-over fails."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from local.load import load
from local.rig import MEDIA, Deployment, deployed, example
from local.test_broken_routing import Second
from long_form import parameters
from scenarios import SCENARIOS, Chat, Folder, Scenario, open_chat, title
from waiting import wait_for

from mmrouter_cli.sample_images import data_uri, picture
from mmrouter_handover.shm import ledger
from mmrouter_handover.shm.files import clock
from mmrouter_lib.engines.vllm.plugin_api import ITEMS_PATH, RENDER_PATH

WORKERS = 2
Ask = Callable[..., Any]


def started(folder: Path, transfer: str, frontends: int, name: str = "demo-handover.yaml") -> Any:
    """Run an example; small pictures cost nothing, so whatever is possible is done whatever it costs."""
    resource = example(name)
    spec = resource["spec"]
    for pool in spec["pools"]:
        pool["sharedMemory"] = {"size": "256Mi", "scope": "node"}
    always = {"name": "router", "env": [{"name": "MMROUTER_HANDOVER", "value": "always"}]}
    spec["frontend"] |= {"replicas": frontends, "podTemplate": {"spec": {"containers": [always]}}}
    spec["routing"] = {"transfer": transfer, "media": MEDIA, "minPrefillTokens": 0}
    return deployed(folder, resource)


def plugins_known(deployment: Deployment, frontends: int) -> bool:
    greetings = [line for line in deployment.log if "mmrouter.handover" in line and "plugin:" in line]
    return len(greetings) >= frontends * (WORKERS + 1)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with started(tmp_path_factory.mktemp("shm"), "shm", 2) as deployment:
        wait_for(lambda: plugins_known(deployment, 2), 30, "every frontend has heard every plugin")
        yield deployment


@pytest.fixture(scope="module")
def by_nixl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with started(tmp_path_factory.mktemp("nixl"), "nixl", 1) as deployment:
        wait_for(lambda: plugins_known(deployment, 1), 30, "the frontend has heard every plugin")
        yield deployment


def root_of(deployment: Deployment) -> Path:
    return Path(next(iter(deployment.processes("router").values())).environ()["MMROUTER_SHARED_DIR"])


def leased(root: Path) -> list[tuple[str, str, int]]:
    """What is written or leased, and what the dead left; free slots of who lives are there to be used again."""
    entries = ledger(root, clock()).entries
    return [
        (one.path, one.state, one.bytes)
        for one in entries
        # What is of no writer of ours is an engine's connector's: embeddings.
        if one.bytes and one.state != "other" and (one.state in ("writing", "leased") or not one.lives)
    ]


def nothing_left(root: Path) -> None:
    wait_for(lambda: not leased(root), 20, f"nothing is left in {root}")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=title)
@pytest.mark.parametrize("mode", parameters(["demo", "by_nixl"], "demo"))
def test_scenario(scenario: Scenario, mode: str, request: pytest.FixtureRequest, web: Folder) -> None:
    deployment: Deployment = request.getfixturevalue(mode)
    with open_chat(deployment) as chat:
        scenario(chat, web)


def test_an_image_travels_by_memory_that_is_shared_and_explain_says_so(settled: Deployment, chat: Chat) -> None:
    decision = chat.decided(chat.image("a"), "what?")
    (one,) = decision["travelled"]
    assert (one["how"], one["instead_of"]) == ("shm", [])
    assert (one["engine"], one["identity"]) == (decision["worker"], decision["images"][0]["identity"])
    assert one["seconds"] > 0
    shown = settled.mmrouter("explain", settled.url, decision["request_id"]).stdout
    assert "how images travelled" in shown
    assert "shm" in shown


def test_where_there_is_no_nixl_the_next_way_of_the_ladder_is_taken_and_counted(by_nixl: Deployment) -> None:
    with open_chat(by_nixl) as chat:
        (one,) = chat.decided(chat.image("b"), "what?")["travelled"]
    assert one["how"] == "shm"
    assert one["instead_of"] == [{"how": "nixl", "reason": "absent"}]
    assert by_nixl.metric("mmrouter_handover_total", how="nixl", reason="absent") > 0


def test_every_stage_of_a_chain_gets_the_image_by_a_file(tmp_path: Path) -> None:
    with started(tmp_path, "shm", 1, "demo-disaggregated.yaml") as chain:
        wait_for(chain.settled, 60, "every pod is verified")
        with open_chat(chain) as chat:
            decision = chat.decided(chat.image("c"), "what?")
        assert decision["form"] == "encode-prefill-decode"
        roles = {worker["name"]: worker["role"] for worker in chain.state()["workers"]}
        travelled = [(roles[one["engine"]], one["how"]) for one in decision["travelled"]]
        assert travelled == [("encoder", "file"), ("prefill", "file"), ("decode", "file")]
        nothing_left(root_of(chain))


# -- every way is broken once: the request succeeds by the bytes that the router kept ----------------------------------


@pytest.fixture(scope="module")
def second(demo: Deployment) -> Iterator[Second]:
    """A router in this process, to be broken in one way after the other."""
    wait_for(demo.settled, 60, "every pod is verified on every frontend")
    second = Second(demo, workers=WORKERS)
    with second.running():
        handover = second.router.handover
        assert handover is not None
        wait_for(lambda: len(handover.plugins._polled) == WORKERS + 1, 30, "the plugins have answered")
        yield second


def asks_otherwise(path: str, instead: Callable[[Ask, bytes], Any]) -> Callable[[Any, pytest.MonkeyPatch], None]:
    """Have a request to a plugin changed on its way, or answered in its place."""

    def broken(handover: Any, patch: pytest.MonkeyPatch) -> None:
        requests = handover._processed._ask.__self__
        upstream = requests._upstream

        async def ask(address: Any, method: str, where: str, headers: Any, body: bytes, **options: Any) -> Any:
            async def sent(other_body: bytes) -> bytes:
                return bytes((await upstream.ask(address, method, where, headers, other_body, **options))[1])

            return 200, await (instead(sent, body) if where == path else sent(body))

        patch.setattr(requests, "_upstream", SimpleNamespace(ask=ask))

    return broken


async def another_generation(ask: Ask, body: bytes) -> bytes:
    question = json.loads(body)
    for offer in question["items"].values():
        offer["handle"]["generation"] += 1
    return bytes(await ask(json.dumps(question).encode()))


async def a_slot_that_is_gone(ask: Ask, body: bytes) -> bytes:
    question = json.loads(body)
    for offer in question["items"].values():
        offer["handle"]["path"] = offer["handle"]["path"].partition("/")[0] + "/slot-ffffff"
    return bytes(await ask(json.dumps(question).encode()))


async def forgotten(ask: Ask, body: bytes) -> bytes:
    return json.dumps({"held": list(json.loads(body)["items"])}).encode()


async def nonsense(ask: Ask, body: bytes) -> bytes:
    return b"[]"


def unlinked(handover: Any, patch: pytest.MonkeyPatch) -> None:
    """Files are gone when the engine comes to read them, and nothing is processed."""
    puts = handover._folder.put

    async def put(name: str, media: Any) -> Any:
        file = await puts(name, media)
        file.path.unlink()
        return file

    patch.setattr(handover, "_renders", False)
    patch.setattr(handover._folder, "put", put)


def full(handover: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(handover, "_renders", False)
    patch.setattr(handover._folder._plains, "mark_bytes", 0)


BROKEN = {
    "another generation in the slot": (asks_otherwise(ITEMS_PATH, another_generation), "shm", "stale", "file"),
    "the slot is gone": (asks_otherwise(ITEMS_PATH, a_slot_that_is_gone), "shm", "gone", "file"),
    "the engine does not hold it": (asks_otherwise(ITEMS_PATH, forgotten), "shm", "missed", "bytes"),
    "the engine's plugin talks nonsense": (asks_otherwise(ITEMS_PATH, nonsense), "shm", "engine_unusable", "file"),
    "the renderer's plugin talks nonsense": (asks_otherwise(RENDER_PATH, nonsense), "shm", "renderer_unusable", "file"),
    "the file is gone": (unlinked, "file", "refused", "bytes"),
    "above the high-water mark": (full, "file", "full", "bytes"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_case_61_of_the_field_what_breaks_is_counted_and_the_request_succeeds(
    second: Second, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    break_it, way, reason, instead = BROKEN[broken]
    handover = second.router.handover
    assert handover is not None
    handover.backoff.retain(set())
    break_it(handover, monkeypatch)
    counted = second.router.metrics.handovers
    before = [counted.labels(*labels)._value.get() for labels in ((way, reason), (instead, ""))]
    image = {"type": "image_url", "image_url": {"url": data_uri(picture(broken, 112, 112))}}
    (one,) = second.control(second.ask([image]))["travelled"]
    assert (one["how"], {"how": way, "reason": reason} in one["instead_of"]) == (instead, True), one
    after = [counted.labels(*labels)._value.get() for labels in ((way, reason), (instead, ""))]
    assert after == [value + 1 for value in before]
    nothing_left(root_of(second.demo))


# -- processes killed during a hand-over -------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["router", "engine", "renderer"])
def test_a_kill_while_images_are_handed_over_fails_no_request_and_leaves_nothing(settled: Deployment, who: str) -> None:
    root = root_of(settled)
    with load(settled) as sending:
        role = {"router": "router", "engine": "vllm", "renderer": "vllm"}[who]
        for name, process in sorted(settled.processes(role).items()):
            if ("render" in name) is (who == "renderer"):
                process.send_signal(signal.SIGKILL)
                break
        sending.more(20, seconds=60)
    nothing_left(root)
    wait_for(settled.settled, 60, "every pod is back")
