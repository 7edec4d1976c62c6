"""Real engines behind real sidecars and routers: every predicted key is published, every repeat is a whole hit.

The engines' caches are small, so blocks are evicted and stored again while the workload runs. At the end the routers'
index must equal what an independent reader makes of the engines' own event history, copies counted.
"""

import asyncio
import json
import threading
from collections import Counter
from itertools import product

import msgspec
import openai
import pytest
from conformance.engine_process import BLOCK_SIZE as BLOCK
from conformance.engine_process import engine_args, require_memory
from conformance.engines import deployed, histories, manifest, pool, send, wait_until_published
from conformance.setups import TINY
from conformance.workload import Case, image_part, picture, user, workload
from local.rig import Deployment, metric
from long_form import IS_LONG
from scenarios import completions_repeat_whole, several_prompts_and_an_echo_repeat_whole
from waiting import wait_for

from mmrouter_cli.bench.endpoint_probe import Target, examine
from mmrouter_cli.bench.types import Result
from mmrouter_lib.engines.base.launch import HTTP_PORT

STEP = 3
"""Outside of the long form, every third request: ``test_prediction`` sends all of them."""
CACHE_BLOCKS = 290  # the longest context and little more


@pytest.fixture(scope="module")
def deployment(vllm_env, shrunk, tmp_path_factory):
    """Two frontends and two engines, of which one was to have a GPU. ``test_families`` runs every family; eviction does
    not depend on it.
    """
    require_memory(engines=2)
    flags = [*engine_args(), f"--num-gpu-blocks-override={CACHE_BLOCKS}"]
    pools = [pool("worker"), pool("worker", name="gpu", accelerator={"kind": "nvidia"})]
    made = manifest(shrunk(TINY), {"type": "vllm", "args": flags}, pools, repository=TINY, frontends=2)
    with deployed(vllm_env, tmp_path_factory.mktemp("routing"), made) as deployment:
        yield deployment


MIX = (
    *("--requests", "36", "--concurrency", "2", "--turns", "4", "--system-prompts", "2", "--system-tokens", "200"),
    *("--text-tokens", "40", "--output-tokens", "4", "--image-share", "1", "--image-reuse", "1"),
    *("--image-size", "224x224", "--ignore-eos"),
)


def counted(deployment: Deployment) -> Counter[str]:
    """Return the prompt tokens that the engines looked for in their caches (queries), and those found there (hits)."""
    found = Counter[str]()
    for worker, name in product(deployment.state()["workers"], ("queries", "hits")):
        found[name] += int(metric(worker["ip"], f"vllm:prefix_cache_{name}_total", HTTP_PORT))
    return found


def questions(deployment: Deployment, salt: str) -> Counter[str]:
    """Return what engines count of the two questions that bench asks before it sends its load, once they are cached."""

    def again() -> Counter[str]:
        before = counted(deployment)
        asyncio.run(examine(Target(deployment.url, salt, 60)))
        return counted(deployment) - before

    def warm() -> Counter[str]:
        counts = again()
        # All but the last token may come from the cache, so one block of each prompt is computed in any case.
        return counts if counts["queries"] - counts["hits"] <= 2 * BLOCK else Counter()

    found: Counter[str] = wait_for(warm, 10, "both questions are whole hits")
    return found


def test_the_gate_passes_on_real_engines(deployment):
    done = deployment.mmrouter("verify", deployment.url, "--json")
    result = json.loads(done.stdout)
    assert result["passed"], [check for check in result["checks"] if not check["passed"]]


def test_the_doctor_names_the_engine_that_fell_back_to_a_cpu_and_no_other(deployment):
    report = json.loads(deployment.mmrouter("doctor", "--url", deployment.url, "--json").stdout)
    found = [item for subject in report["subjects"] for item in subject["findings"] if item["check"] == "devices"]
    assert [(item["level"], item["seen"]) for item in found] == [
        ("problem", "demo-gpu-0 computes on cpu, and its pool asks for cuda"),
        ("ok", "demo-worker-0 on cpu"),
    ]


def test_every_predicted_key_is_published_and_every_repeat_is_a_whole_hit(deployment, record):
    blocks = requests = refused = 0
    mismatches = []
    for case in workload()[:: 1 if IS_LONG else STEP]:
        if case.salt is not None:
            continue
        try:
            first = send(deployment, case)
        except openai.BadRequestError:
            refused += 1  # by the engine too, where it came so far: test_prediction compares that
            continue
        assert first.exactness == "exact", case.name
        wait_until_published(deployment, first)
        again = send(deployment, case)
        for seen in (first, again):
            if seen.predicted_tokens != seen.tokens or seen.cached != seen.promised:
                mismatches.append((case.name, vars(seen)))
        # A prompt shorter than a block is in no cache, so load and cache size decide.
        if again.overlap != again.blocks or (again.blocks and again.worker != first.worker):
            mismatches.append((case.name, "repeat", vars(again)))
        blocks += first.blocks
        requests += 2
    record(f"routing {TINY}: blocks compared", blocks)
    record(f"routing {TINY}: requests, refused, mismatches", (requests, refused, len(mismatches)))
    assert not mismatches, mismatches[:3]
    assert blocks > 1000 // STEP


def test_each_of_several_prompts_finds_its_own_blocks_and_an_echo_reads_the_cache(deployment, chat):
    several_prompts_and_an_echo_repeat_whole(chat, lambda: counted(deployment)["hits"])


def test_the_engine_publishes_the_predicted_blocks_of_a_completion_and_no_others(deployment, chat):
    keys = completions_repeat_whole(chat)
    held = {}
    for truth in histories(deployment, TINY):
        held |= truth.roots()
    roots = {held[key] for key in keys}
    assert {key for key, root in held.items() if root in roots} == keys


def test_a_different_image_never_hits_past_the_text_before_it(deployment):
    for number in range(3):
        text = f"Round {number}: the picture below is described in one sentence, whatever it shows. " * 6
        first, other = (
            Case(f"{number}{c}", {"messages": [user(text, image_part(picture(224, 224, seed=500 + number * 2 + c)))]})
            for c in range(2)
        )
        wait_until_published(deployment, send(deployment, first))
        seen = send(deployment, other)
        before = seen.before_image
        assert seen.overlap == before > 0
        assert seen.cached == before * BLOCK


def test_concurrent_identical_requests_eviction_and_restore_leave_index_and_engines_equal(deployment, record):
    cases = [
        Case(
            str(n),
            {"messages": [user(f"Volume {n} of the chronicle. " * 12, image_part(picture(448, 448, seed=900 + n)))]},
        )
        for n in range(24)
    ]
    for _ in range(2):  # more than both caches hold: the second pass stores again what the first one lost
        for start in range(0, len(cases), 4):
            batch = cases[start : start + 4]
            # Answers that grow side by side fill equal blocks: one physical copy for each request.
            threads = [threading.Thread(target=send, args=(deployment, case, 48)) for case in batch for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    truths = histories(deployment, TINY)
    compared, evicted = sum(len(truth.keys()) for truth in truths), sum(truth.removed for truth in truths)
    copies = sum(truth.most_copies for truth in truths)
    record(f"routing {TINY}: keys held at the end, removals seen", (compared, evicted))
    assert evicted > 50
    assert copies > len(deployment.state()["workers"])  # some block had two physical copies at once


def test_bench_reports_the_hits_that_the_engines_count_and_kv_has_more_of_them(deployment, tmp_path, record):
    ratios = {}
    for policy in ("roundRobin", "kv"):
        asked, file = questions(deployment, policy), tmp_path / f"{policy}.json"
        before = counted(deployment)
        options = ("--policy", policy, "--salt", policy, *MIX, "--json", str(file))
        done = deployment.mmrouter("bench", deployment.url, *options)
        assert done.returncode == 0, done.stdout + done.stderr
        result = msgspec.json.decode(file.read_bytes(), type=Result)
        assert (result.answered, result.routing.events, result.routing.decisions) == (36, "on", {"exact": 36})
        counts = counted(deployment) - before - asked
        assert (result.prompt_tokens, sum(row.cached for row in result.rows)) == (counts["queries"], counts["hits"])
        assert result.hit_ratio == counts["hits"] / counts["queries"] > 0
        ratios[policy] = result.hit_ratio
    record(f"bench {TINY}: hit ratio, equal to the engines' counters", ratios)
    assert ratios["kv"] >= ratios["roundRobin"]
    files = (str(tmp_path / f"{policy}.json") for policy in ratios)
    compared = deployment.mmrouter("bench", next(files), "--against", next(files))
    assert compared.returncode == 0, compared.stderr
    assert "second against first" in compared.stdout
