"""A real SGLang with a hierarchical cache behind a router: promises of its device and of its host memory.

The device's cache has room for a part of the conversations and host memory for all of them, so many hits are loaded
back. Host memory of a CPU is not registered with a device (``hack/engines/sglang_env.py``).
"""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from artefacts import Record
from conformance.conftest import Shrunk
from conformance.engine_process import BLOCK_SIZE, require_memory
from conformance.engines import History, deployed, send, sglang_manifest
from conformance.workload import STORY, Case, image_part, picture, user
from local.rig import Deployment
from waiting import wait_for

from mmrouter_lib.cache_layout import DEVICE

pytestmark = pytest.mark.long_form
REPOSITORY = "Qwen/Qwen2.5-VL-7B-Instruct"
DEVICE_TOKENS, HOST = 4096, "CPU_PINNED"
HIERARCHICAL = (
    "--enable-hierarchical-cache",
    *("--hicache-ratio", "6"),
    *("--hicache-io-backend", "direct"),
    *("--hicache-mem-layout", "layer_first"),
    *("--max-total-tokens", str(DEVICE_TOKENS)),
)
RESERVED_BYTES = 10 << 30
"""SGLang refuses host memory for its cache where less would be left."""
CONVERSATIONS = 10
REQUESTS = 40
SETTLE_SECONDS = 120.0


@pytest.fixture(scope="module")
def deployment(sglang_env: Path, shrunk: Shrunk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    require_memory(reserved_bytes=RESERVED_BYTES)
    made = sglang_manifest(shrunk(REPOSITORY), REPOSITORY, [("worker", 1)], *HIERARCHICAL)
    with deployed(sglang_env, tmp_path_factory.mktemp("tiers"), made) as deployment:
        wait_for(deployment.settled, SETTLE_SECONDS, "the engine is verified")
        yield deployment


def conversation(number: int, turns: int) -> Case:
    """Return the first turns of a conversation; every second one shows a picture."""
    shown = [image_part(picture(224, 224, seed=number))] if number % 2 else []
    messages = [user(f"Conversation {number}. {STORY}", *shown, "What happens?")]
    for turn in range(turns):
        messages += [{"role": "assistant", "content": f"It happens {turn} times."}, user(f"And then? {STORY[:300]}")]
    return Case(f"conversation {number}, {turns} turns", {"messages": messages})


def wait_until_indexed(deployment: Deployment) -> None:
    """Wait until the router's index has what the engine's events say of both memories."""
    (worker,) = deployment.state()["workers"]
    truth = History(deployment, worker["ip"], REPOSITORY, "sglang")

    def equal() -> bool:
        index = deployment.keys(worker["uid"])
        held = [set(index["keys"].get("0", ())), set(index["tiers"].get(f"0/{HOST}", ()))]
        return held == [set(truth.roots(medium)) for medium in (DEVICE, HOST)]

    wait_for(equal, SETTLE_SECONDS, "the index has what the engine published")


def test_a_promise_of_device_and_host_memory_is_what_the_engine_reuses(deployment: Deployment, record: Record) -> None:
    dice, seen, above = random.Random(REPOSITORY), Counter[str](), []
    for _ in range(REQUESTS):
        wait_until_indexed(deployment)
        answer = send(deployment, conversation(dice.randrange(CONVERSATIONS), dice.randrange(3)), max_tokens=1)
        assert answer.exactness == "exact"
        tier = answer.decision["tier"]
        promised = min((answer.overlap + tier) * BLOCK_SIZE, answer.most)
        seen.update(requests=1, promised_tokens=promised, hit_tokens=answer.cached, equal=promised == answer.cached)
        seen.update(from_host=tier > 0, from_both=tier > 0 and answer.overlap > 0)
        if promised > answer.cached:
            above.append((answer.case.name, answer.overlap, tier, answer.cached))
    record("SGLang's hierarchical cache", dict(seen))
    assert not above
    assert seen["from_host"] > REQUESTS / 10
    assert seen["equal"] == REQUESTS
