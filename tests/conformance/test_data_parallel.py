"""Engines with several data parallel ranks behind a sidecar and a router: what each rank holds and is sent.

Every rank has a scheduler, a cache and a publisher of its own. vLLM runs without a forward pass
(``hack/engines/no_model``), SGLang with random weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from artefacts import ROOT, Record
from conformance.engine_process import SGLANG_ENVIRONMENT, VLLM_ENVIRONMENT, require_memory, sglang_args
from conformance.engines import (
    AGREE_SECONDS,
    SGLANG_IMAGE,
    Answer,
    deployed,
    histories,
    manifest,
    pool,
    send,
    wait_until_published,
)
from conformance.event_listener import replay
from conformance.workload import STORY, Case, image_part, picture, user
from local.rig import Deployment, metric
from waiting import wait_for

from mmrouter_lib.engines import adapter

MODEL = ROOT / "examples" / "models" / "tiny-qwen2-vl"
REPOSITORY = "mmrouter/tiny-qwen2-vl"
NO_MODEL = (
    "--distributed-executor-backend=vllm_executor.NoModelExecutor",
    "--num-gpu-blocks-override=400",
    "--max-model-len=8192",
    "--max-num-seqs=4",
)
ENGINES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "vllm": (
        {"type": "vllm", "args": [*NO_MODEL]},
        {**VLLM_ENVIRONMENT, "PYTHONPATH": str(ROOT / "hack" / "engines" / "no_model")},
    ),
    "sglang": (
        {"type": "sglang", "image": SGLANG_IMAGE, "args": sglang_args()},
        # More ranks than NUMA nodes need a list of the cores of each.
        {**SGLANG_ENVIRONMENT, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    ),
}
"""Engine -> its section of the resource, and its environment."""
# Unit tests of the sidecar and the router have several ranks in every run.
pytestmark = pytest.mark.long_form
KINDS = [("vllm", 2), ("vllm", 4), ("sglang", 2)]
"""Engine, and its ranks."""
SETTLE_SECONDS = 300.0


@dataclass(frozen=True)
class Served:
    deployment: Deployment
    engine: str
    ranks: int

    @property
    def worker(self) -> dict[str, Any]:
        (worker,) = self.deployment.state()["workers"]
        return worker

    def ask(self, name: str) -> list[Answer]:
        """Send a few conversations of that name, one after another; each is in the index before the next."""
        answers = []
        for number in range(4 * self.ranks):
            answers.append(send(self.deployment, conversation(name, number)))
            wait_until_published(self.deployment, answers[-1])
        return answers

    def held(self) -> dict[int, set[str]]:
        """Return the keys of each rank in the router's index."""
        return {int(rank): set(keys) for rank, keys in self.deployment.keys(self.worker["uid"])["keys"].items()}

    def cached(self, case: Case, rank: int) -> int:
        """Ask a rank past the router, and return the tokens that it had."""
        key = (self.deployment.secrets / "engine.key").read_text().strip()
        headers = {"authorization": f"Bearer {key}", "x-data-parallel-rank": str(rank)}
        url = f"http://{self.worker['ip']}:8000/v1/chat/completions"
        answer = httpx.post(url, json={"model": "demo", "max_tokens": 1, **case.body}, headers=headers, timeout=120)
        details = answer.raise_for_status().json()["usage"]["prompt_tokens_details"] or {}
        return int(details.get("cached_tokens") or 0)


def conversation(name: str, number: int) -> Case:
    """Return a chat that shares no block with another one; every second one shows a picture."""
    shown = [image_part(picture(224, 224, seed=number))] if number % 2 else []
    return Case(f"{name} {number}", {"messages": [user(f"{name} {number}: {STORY}", *shown, "What happens?")]})


@pytest.fixture(scope="module", params=KINDS, ids="{0[0]} {0[1]}".format)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    kind, ranks = request.param
    env: Path = request.getfixturevalue(f"{kind}_env")
    require_memory()
    engine, variables = ENGINES[kind]
    made = manifest(MODEL, engine, [pool("worker", variables, parallelism={"data": ranks})], repository=REPOSITORY)
    with deployed(env, tmp_path_factory.mktemp("ranks"), made) as deployment:
        wait_for(deployment.settled, SETTLE_SECONDS, "every rank is verified")
        yield Served(deployment, kind, ranks)


def test_a_rank_holds_what_it_published_and_no_prompt_of_another_rank(served: Served, record: Record) -> None:
    answers = served.ask("held")
    assert {answer.rank for answer in answers} == set(range(served.ranks))
    truths = histories(served.deployment, REPOSITORY, served.engine, served.ranks)
    for truth in truths:
        decode = adapter(served.engine).decode_batch
        batches = [decode(payload) for _, payload in replay(served.worker["ip"], truth.rank)]
        assert {batch.rank for batch in batches} == {truth.rank}
    held = served.held()
    for answer in answers:
        holders = [rank for rank, keys in held.items() if keys & set(answer.keys)]
        assert holders == [answer.rank], answer.case.name
    compared = sum(len(truth.keys()) for truth in truths)
    record(f"{served.engine}, {served.ranks} data parallel ranks: blocks compared", compared)


def test_a_repeat_is_sent_to_the_rank_that_holds_it_and_hits_what_is_promised(served: Served) -> None:
    answers = served.ask("repeated")
    before = counted_hits(served)
    hits = dict.fromkeys(range(served.ranks), 0)
    for first in reversed(answers):
        again = send(served.deployment, first.case)
        assert (again.exactness, again.rank, again.overlap) == ("exact", first.rank, again.blocks)
        assert again.cached == again.promised > 0
        hits[again.rank] += again.cached
    assert all(hits.values())
    expected = {rank: count + hits[rank] for rank, count in before.items()}
    wait_for(lambda: counted_hits(served) == expected, AGREE_SECONDS, "every rank has counted its hits")


def test_a_promise_of_one_rank_is_none_of_the_others(served: Served) -> None:
    """A prompt that one rank holds is new to the others, also for the engine itself."""
    (first, *_) = served.ask("parted")
    other = (first.rank + 1) % served.ranks
    overlaps = {each["id"]: each["overlap"] for each in send(served.deployment, first.case).decision["candidates"]}
    worker = first.decision["worker_id"].rpartition("#")[0]
    assert overlaps[f"{worker}#{first.rank}"] == first.blocks
    assert overlaps[f"{worker}#{other}"] == 0
    assert served.cached(first.case, other) == 0
    wait_for(lambda: set(first.keys) <= served.held()[other], AGREE_SECONDS, "the other rank's blocks are indexed")
    assert served.cached(first.case, other) == first.most
    histories(served.deployment, REPOSITORY, served.engine, served.ranks)


def counted_hits(served: Served) -> dict[int, float]:
    """Return the prompt tokens that each rank has found in its cache. SGLang does not count them by rank."""
    ip, name = served.worker["ip"], "vllm:prefix_cache_hits_total"
    ranks = range(served.ranks) if served.engine == "vllm" else ()
    return {rank: metric(ip, name, 8000, engine=str(rank)) for rank in ranks}
