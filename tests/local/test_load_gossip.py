"""Two frontends and real sidecars: what one has under way at an engine, the other counts."""

from typing import Any

import httpx
from local.rig import Deployment
from waiting import wait_for

TOKENS = 12_000
"""24 seconds of tokens: the answer outlasts the test."""


def under_way(demo: Deployment, number: int) -> dict[str, tuple[int, int]]:
    """Return engine -> requests that a frontend has there itself, and those of other frontends."""
    workers: list[dict[str, Any]] = demo.state(number)["workers"]
    return {worker["name"]: (worker["in_flight"], worker["in_flight_elsewhere"]) for worker in workers}


def test_a_frontend_counts_what_the_other_one_has_under_way_and_that_it_has_ended(demo: Deployment) -> None:
    wait_for(lambda: not any(any(seen) for n in (0, 1) for seen in under_way(demo, n).values()), 30, "nothing runs")
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Tell of the sea."}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{demo.url}/v1/chat/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines)
        (here,) = [number for number in (0, 1) if any(own for own, _ in under_way(demo, number).values())]
        (engine,) = [name for name, (own, _) in under_way(demo, here).items() if own]
        wait_for(lambda: under_way(demo, 1 - here)[engine] == (0, 1), 10, "the other frontend counts it")
        assert under_way(demo, here)[engine] == (1, 0), "a frontend does not receive its own counts"
    wait_for(lambda: not any(under_way(demo, 1 - here)[engine]), 10, "and that it has ended")
