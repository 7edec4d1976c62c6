"""The ten scenarios of the field's gate on local processes: what is sent again is an exact whole hit.

And what one frontend has under way at an engine, the other counts.
"""

import httpx
import pytest
from local.rig import Deployment, metric
from scenarios import (
    SCENARIOS,
    Chat,
    Folder,
    Scenario,
    completions_repeat_whole,
    several_prompts_and_an_echo_repeat_whole,
    title,
)
from waiting import wait_for

from mmrouter_lib.engines.base.launch import HTTP_PORT


@pytest.mark.parametrize("scenario", SCENARIOS, ids=title)
def test_scenario(scenario: Scenario, chat: Chat, web: Folder) -> None:
    scenario(chat, web)


def test_completions_repeat_whole(chat: Chat) -> None:
    completions_repeat_whole(chat)


def test_each_of_several_prompts_finds_its_own_blocks_and_an_echo_reads_the_cache(
    settled: Deployment, chat: Chat
) -> None:
    def hits() -> float:
        return sum(metric(each["ip"], "vllm:prefix_cache_hits_total", HTTP_PORT) for each in settled.state()["workers"])

    several_prompts_and_an_echo_repeat_whole(chat, hits)


def test_streamed_answers_carry_usage_and_end_with_done(chat: Chat) -> None:
    a = chat.image("a")
    chat.send(a, "what?")
    messages, options = chat.messages(a, "what?"), {"include_usage": True}
    chunks = list(
        chat.client.chat.completions.create(
            model="demo", messages=messages, max_tokens=6, stream=True, stream_options=options
        )
    )
    assert sum(bool(c.choices and c.choices[0].delta.content) for c in chunks) >= 1
    usage = chunks[-1].usage
    assert usage.prompt_tokens_details.cached_tokens >= usage.prompt_tokens - 32


def under_way(demo: Deployment, number: int) -> dict[str, tuple[int, int]]:
    """Return engine -> requests that a frontend has there itself, and those of other frontends."""
    workers = demo.state(number)["workers"]
    return {worker["name"]: (worker["in_flight"], worker["in_flight_elsewhere"]) for worker in workers}


def test_a_frontend_counts_what_the_other_one_has_under_way_and_that_it_has_ended(demo: Deployment) -> None:
    wait_for(lambda: not any(any(seen) for n in (0, 1) for seen in under_way(demo, n).values()), 30, "nothing runs")
    messages = [{"role": "user", "content": "Tell of the sea."}]
    # 24 seconds of tokens: the answer outlasts the test.
    body = {"model": "demo", "messages": messages, "max_tokens": 12_000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{demo.url}/v1/chat/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines)
        (here,) = [number for number in (0, 1) if any(own for own, _ in under_way(demo, number).values())]
        (engine,) = [name for name, (own, _) in under_way(demo, here).items() if own]
        wait_for(lambda: under_way(demo, 1 - here)[engine] == (0, 1), 10, "the other frontend counts it")
        assert under_way(demo, here)[engine] == (1, 0), "a frontend does not receive its own counts"
    wait_for(lambda: not any(under_way(demo, 1 - here)[engine]), 10, "and that it has ended")
