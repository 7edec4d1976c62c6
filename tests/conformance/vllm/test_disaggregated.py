"""A real encoder, prefill and decode engine: each stage uses what the previous one handed over, and routing is exact.

All are stock vLLM. Blocks travel by NIXL; embeddings travel as files in a shared folder, because vLLM's other
embedding connectors do not run on a CPU.
"""

import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from artefacts import Record
from conformance.conftest import Figure, Shrunk
from conformance.engine_process import BLOCK_SIZE, require_memory
from conformance.engines import REPOSITORY, History, deployed, pods, pool, resource
from local.rig import Deployment
from openai.types.chat import ChatCompletion
from scenarios import Chat
from waiting import wait_for

pytestmark = pytest.mark.proves("vllm", "encoder, prefill, decode", "qwen2_vl")
Messages = list[dict[str, Any]]

LONG = 128
"""Uncached tokens from which a prompt goes to the prefill engine."""
CACHE_BLOCKS = 290  # the longest context and little more
TOKENS, FAILED = "vllm:prompt_tokens_by_source_total", "vllm:nixl_num_failed_transfers_total"
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
VERY_LONG = "It tells of those who sail. " * 900
TRIES = 17
"""For a request that is to be caught while an engine computes it."""


@pytest.fixture(scope="module")
def deployment(vllm_env: Path, shrunk: Shrunk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    require_memory(engines=3)
    pools = [pool(role) for role in ("encoder", "prefill", "decode")]
    args = [f"--num-gpu-blocks-override={CACHE_BLOCKS}"]
    made = resource(
        shrunk(REPOSITORY), pools, args=args, minPrefillTokens=LONG, frontend={"MMROUTER_HANDOVER": "always"}
    )
    with deployed(vllm_env, tmp_path_factory.mktemp("disaggregated"), made) as deployment:
        yield deployment


def decided(deployment: Deployment, chat: Chat, messages: Messages) -> tuple[dict[str, Any], ChatCompletion]:
    raw = chat.client.chat.completions.with_raw_response.create(
        model="demo", messages=messages, max_tokens=8, temperature=0
    )
    return deployment.decision(raw), raw.parse()


def stages(decision: dict[str, Any]) -> dict[str, str]:
    return {note["stage"]: note["outcome"] for note in decision["chain"]}


def apart(
    deployment: Deployment, chat: Chat, ask: Callable[[Chat], Messages]
) -> tuple[Messages, dict[str, Any], ChatCompletion]:
    """Send a new prompt, which the prefill engine computes; return it, its decision and its answer."""
    messages = ask(fresh(chat))
    decision, answer = decided(deployment, chat, messages)
    assert stages(decision)["prefill"] == "done"
    return messages, decision, answer


def fresh(chat: Chat) -> Chat:
    return replace(chat, nonce=secrets.token_hex(8))


def long_text(chat: Chat) -> Messages:
    asked: Messages = chat.messages("The chronicle tells of a harbour and of those who sail from it. " * 8)
    return asked


def test_the_gate_passes(deployment: Deployment) -> None:
    deployment.assert_gate_passes()


def test_every_token_of_a_prompt_is_computed_once_by_the_prefill_engine_and_fetched(
    deployment: Deployment, chat: Chat, figure: Figure
) -> None:
    engines = pods(deployment)
    before: dict[tuple[str, str], float] = {}

    def counts() -> dict[tuple[str, str], float]:
        names = [
            (role, source) for role in ("prefill", "decode") for source in ("local_compute", "external_kv_transfer")
        ]
        return {(role, source): engines[role].value(TOKENS, source=source) for role, source in names}

    def noted(chat: Chat) -> Messages:
        before.update(counts())
        return long_text(chat)

    _, decision, answer = apart(deployment, chat, noted)
    assert stages(decision) == {"prefill": "done", "answer": "first_byte"}
    tokens = answer.usage.prompt_tokens if answer.usage else 0
    assert {name: count - before[name] for name, count in counts().items()} == {
        ("prefill", "local_compute"): tokens,
        ("prefill", "external_kv_transfer"): 0,
        ("decode", "local_compute"): 0,
        ("decode", "external_kv_transfer"): tokens,
    }
    assert engines["decode"].value(FAILED) == 0
    figure("tokens fetched", tokens)


def test_the_answer_does_not_depend_on_which_engines_encode_and_prefill(deployment: Deployment, chat: Chat) -> None:
    messages, decision, answer = apart(deployment, chat, lambda chat: chat.messages(chat.image("c"), "what?"))
    assert stages(decision) == {"encode": "done", "prefill": "done", "answer": "first_byte"}
    assert answer.usage is not None
    # Without our identity the engine treats it as another image, with no embedding and no blocks.
    alone = pods(deployment)["prefill"].ask({"model": "demo", "messages": messages, "max_tokens": 8, "temperature": 0})
    assert alone.json()["choices"][0]["message"]["content"] == answer.choices[0].message.content
    assert alone.json()["usage"]["prompt_tokens_details"]["cached_tokens"] < answer.usage.prompt_tokens - BLOCK_SIZE


def test_images_that_swap_places_share_the_text_before_them_and_no_block_of_theirs(
    deployment: Deployment, chat: Chat
) -> None:
    # Long enough for the last image to lie in complete blocks, so that a repeat needs no encoder.
    question = "What is to be seen in these two pictures, and in which of them is more of it? " * 4
    a, b = chat.image("a"), chat.image("b")
    asked, decision, _ = apart(deployment, chat, lambda chat: chat.messages(a, b, question))
    encode = decision["chain"][0]
    assert (encode["stage"], encode["outcome"]) in {("encode", "done"), ("encode", "held")}
    text, first, second, last = asked[0]["content"]
    swapped, answer = decided(deployment, chat, [{"role": "user", "content": [text, second, first, last]}])
    assert swapped["exactness"] == "exact"
    assert swapped["overlap"] <= swapped["images"][0]["offset"] // BLOCK_SIZE
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) <= swapped["images"][0]["offset"]


def test_a_short_prompt_and_a_cached_one_are_computed_where_they_are_decoded(
    deployment: Deployment, chat: Chat
) -> None:
    short, _ = decided(deployment, chat, [{"role": "user", "content": "What is a harbour?"}])
    assert stages(short) == {"prefill": "short", "answer": "first_byte"}
    messages, first, _ = apart(deployment, chat, long_text)
    decode = pods(deployment)["decode"].uid
    published = partial(deployment.keys, decode)
    wait_for(lambda: set(first["keys"]) <= set(published()["keys"]["0"]), 10, "the decode engine's blocks are known")
    again, answer = decided(deployment, chat, messages)
    assert stages(again) == {"prefill": "short", "answer": "first_byte"}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens >= answer.usage.prompt_tokens - BLOCK_SIZE


def test_the_index_equals_the_blocks_of_both_engines_including_fetched_ones(
    deployment: Deployment, figure: Figure
) -> None:
    engines = pods(deployment)
    held = {}
    for role in ("prefill", "decode"):
        engine, truth = engines[role], History(deployment, engines[role].ip, REPOSITORY)
        wait_for(
            lambda e=engine, t=truth: t.keys() == set(deployment.keys(e.uid)["keys"]["0"]),
            10,
            f"the frontend and the {role} engine agree",
        )
        held[role] = truth.keys()
    assert held["decode"]
    assert held["prefill"]
    figure("blocks compared", sum(map(len, held.values())))
    figure("mismatches", 0)


# The remaining tests end engines, so they run last and in this order.


def test_a_prefill_engine_that_is_killed_while_it_computes_costs_no_request_and_no_block_of_the_decode_engine(
    deployment: Deployment, chat: Chat, record: Record
) -> None:
    engines = pods(deployment)
    prefill, decode = engines["prefill"], engines["decode"]
    question = {"model": "demo", "max_tokens": 4, "temperature": 0}
    asked = {**question, "messages": fresh(chat).messages("It tells of those who sail. " * 120), "max_tokens": 1}
    left = prefill.ask({**asked, "kv_transfer_params": REMOTE_DECODE}).raise_for_status().json()
    found: list[tuple[dict[str, Any], ChatCompletion]] = []

    def computing() -> bool:
        return any(worker["uid"] == prefill.uid and worker["in_flight"] for worker in deployment.state()["workers"])

    def caught() -> bool:
        """Send a long prompt and kill the prefill engine while it computes; return whether it had the prompt."""
        found.clear()
        messages = fresh(chat).messages(VERY_LONG)
        sending = threading.Thread(target=lambda: found.append(decided(deployment, chat, messages)))
        sending.start()
        while sending.is_alive() and not computing():
            pass
        prefill.signal(signal.SIGSTOP)  # freezes the requests in flight
        hit = computing()
        prefill.signal(signal.SIGKILL if hit else signal.SIGCONT)
        sending.join()
        return hit

    assert any(caught() for _ in range(TRIES))
    ((decision, answer),) = found
    assert stages(decision)["prefill"] == "engine_lost"
    assert (answer.usage and answer.usage.completion_tokens) == 8
    # Case 64, for blocks: more reads fail than the cache has blocks, and each prompt is still computed.
    failed = decode.value(FAILED)
    blocks = left["usage"]["prompt_tokens"] // BLOCK_SIZE * 100 // 120
    for number in range(CACHE_BLOCKS // blocks + 3):
        # Not longer than the prompt of the parameters: asking for more blocks ends the engine (0.32).
        messages = fresh(chat).messages("It tells of those who sail. " * 100)
        request = {**question, "messages": messages, "kv_transfer_params": left["kv_transfer_params"]}
        answered = decode.ask(request)
        assert answered.status_code == 200, (number, answered.text)
    assert decode.value("vllm:kv_cache_usage_perc") == decode.value("vllm:num_requests_running") == 0
    record("disaggregated: reads of blocks that failed", decode.value(FAILED) - failed)
    assert (decode.value(FAILED) - failed) * blocks > CACHE_BLOCKS


def test_without_a_decode_engine_the_prefill_engine_answers_with_what_the_encoder_made(
    deployment: Deployment, chat: Chat
) -> None:
    # The router lists ready pods only.
    wait_for(lambda: "prefill" in pods(deployment) and deployment.settled(), 300, "the prefill engine is back")
    pods(deployment)["decode"].signal(signal.SIGKILL)

    def simpler() -> tuple[dict[str, Any], Messages, ChatCompletion] | None:
        other = fresh(chat)
        messages = other.messages(other.image("d"), "what?")
        decision, answer = decided(deployment, chat, messages)
        return (decision, messages, answer) if "no_decode" in decision["degraded"] else None

    decision, messages, answer = wait_for(simpler, 30, "a request is served without the decode engine")
    assert decision["form"] == "encode-whole"
    outcomes = stages(decision)  # includes the attempt on the killed engine
    assert (outcomes["encode"], outcomes["answer"]) == ("done", "first_byte")
    alone = pods(deployment)["prefill"].ask({"model": "demo", "messages": messages, "max_tokens": 8, "temperature": 0})
    assert alone.json()["choices"][0]["message"]["content"] == answer.choices[0].message.content
