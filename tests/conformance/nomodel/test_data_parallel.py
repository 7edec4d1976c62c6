"""A vLLM with several data parallel ranks behind a sidecar and a router: what each rank holds and is sent.

Every rank has a scheduler, a cache and a publisher of its own, as in any vLLM; only the forward pass is missing
(``hack/engines/no_model``).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from artefacts import ROOT, Record
from conformance.engine_process import VLLM_ENVIRONMENT, require_memory
from conformance.engines import (
    AGREE_SECONDS,
    Answer,
    Pod,
    deployed,
    engines,
    histories,
    manifest,
    pool,
    send,
    wait_until_published,
)
from conformance.event_listener import replay
from conformance.workload import STORY, Case, image_part, picture, user
from local.rig import Deployment
from long_form import parameters
from waiting import wait_for

from mmrouter_lib.engines import adapter

REPOSITORY = "mmrouter/tiny-qwen2-vl"
EXECUTOR = ROOT / "hack" / "engines" / "no_model"
ARGS = (
    "--distributed-executor-backend=vllm_executor.NoModelExecutor",
    "--num-gpu-blocks-override=400",
    "--max-model-len=8192",
    "--max-num-seqs=4",
)
SETTLE_SECONDS = 120.0


@dataclass(frozen=True)
class Served:
    deployment: Deployment
    ranks: int

    @property
    def pod(self) -> Pod:
        ((_, pod),) = engines(self.deployment)
        return pod

    def ask(self, name: str) -> list[Answer]:
        """Send a few conversations of that name, one after another; each is in the index before the next."""
        answers = []
        for number in range(4 * self.ranks):
            answers.append(send(self.deployment, conversation(name, number)))
            wait_until_published(self.deployment, answers[-1])
        return answers

    def held(self) -> dict[int, set[str]]:
        """Return the keys of each rank in the router's index."""
        return {int(rank): set(keys) for rank, keys in self.deployment.keys(self.pod.uid)["keys"].items()}

    def hits(self) -> dict[int, float]:
        """Return the prompt tokens that each rank has found in its cache, as the engine counts them."""
        name = "vllm:prefix_cache_hits_total"
        return {rank: self.pod.value(name, engine=str(rank)) for rank in range(self.ranks)}


def conversation(name: str, number: int) -> Case:
    """Return a chat that shares no block with another one; every second one shows a picture."""
    shown = [image_part(picture(224, 224, seed=number))] if number % 2 else []
    return Case(f"{name} {number}", {"messages": [user(f"{name} {number}: {STORY}", *shown, "What happens?")]})


@pytest.fixture(scope="module", params=parameters([2, 4], 2))
def served(
    request: pytest.FixtureRequest, vllm_env: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    require_memory()
    model = ROOT / "examples" / "models" / "tiny-qwen2-vl"
    variables = {**VLLM_ENVIRONMENT, "PYTHONPATH": str(EXECUTOR)}
    workers = [pool("worker", variables, parallelism={"data": request.param})]
    made = manifest(model, {"type": "vllm", "args": list(ARGS)}, workers, repository=REPOSITORY)
    with deployed(vllm_env, tmp_path_factory.mktemp("ranks"), made) as deployment:
        wait_for(deployment.settled, SETTLE_SECONDS, "every rank is verified")
        yield Served(deployment, request.param)


def test_a_rank_holds_what_it_published_and_no_prompt_of_another_rank(served: Served, record: Record) -> None:
    answers = served.ask("held")
    assert {answer.rank for answer in answers} == set(range(served.ranks))
    truths = histories(served.deployment, REPOSITORY, ranks=served.ranks)
    for truth in truths:
        batches = [adapter("vllm").decode_batch(payload) for _, payload in replay(served.pod.ip, truth.rank)]
        assert {batch.rank for batch in batches} == {truth.rank}
    held = served.held()
    for answer in answers:
        holders = [rank for rank, keys in held.items() if keys & set(answer.keys)]
        assert holders == [answer.rank], answer.case.name
    record(f"vLLM without a model, {served.ranks} ranks: blocks compared", sum(len(truth.keys()) for truth in truths))


def test_a_repeat_is_sent_to_the_rank_that_holds_it_and_hits_what_is_promised(served: Served) -> None:
    answers = served.ask("repeated")
    before = served.hits()
    expected = dict(before)
    for first in reversed(answers):
        again = send(served.deployment, first.case)
        assert (again.exactness, again.rank, again.overlap) == ("exact", first.rank, again.blocks)
        assert again.cached == again.promised > 0
        expected[again.rank] += again.cached
    assert {rank for rank in expected if expected[rank] > before[rank]} == set(range(served.ranks))
    wait_for(lambda: served.hits() == expected, AGREE_SECONDS, "every rank has counted its hits")


def test_a_promise_of_one_rank_is_none_of_the_others(served: Served) -> None:
    """A prompt that one rank holds is new to the others, also for the engine itself."""
    (first, *_) = served.ask("parted")
    other = (first.rank + 1) % served.ranks
    overlaps = {each["id"]: each["overlap"] for each in send(served.deployment, first.case).decision["candidates"]}
    worker = first.decision["worker_id"].rpartition("#")[0]
    assert overlaps[f"{worker}#{first.rank}"] == first.blocks
    assert overlaps[f"{worker}#{other}"] == 0
    assert cached(served, first.case, other) == 0
    wait_for(lambda: set(first.keys) <= served.held()[other], AGREE_SECONDS, "the other rank's blocks are indexed")
    assert cached(served, first.case, other) > 0
    histories(served.deployment, REPOSITORY, ranks=served.ranks)


def cached(served: Served, case: Case, rank: int) -> int:
    """Ask a rank past the router, and return the tokens that it had."""
    pod = served.pod
    headers = {"authorization": f"Bearer {pod.key}", "x-data-parallel-rank": str(rank)}
    body = {"model": "demo", "max_tokens": 1, **case.body}
    answer = httpx.post(f"http://{pod.ip}:8000/v1/chat/completions", json=body, headers=headers, timeout=120)
    return int(answer.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"])
