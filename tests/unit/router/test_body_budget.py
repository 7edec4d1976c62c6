"""The budget of bodies: never exceeded but by a single request, shared fairly, and yielded by slow bodies first."""

import asyncio
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.router.rig import Clock

from mmrouter_router.core.errors import RequestError
from mmrouter_router.http.body_budget import STALLED_SECONDS, BodyBudget, BodyReservation
from mmrouter_router.http.hot_request import HotRequest


class Bodies:
    """A budget of 100 bytes, a clock, and the bodies that were refused."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.budget = BodyBudget(100, self.clock)
        self.refused: list[str] = []

    def body(self, tenant: str, name: str = "") -> BodyReservation:
        def refuse(error: RequestError) -> None:
            assert (error.status, error.code) == (429, "router_full")
            self.refused.append(name or tenant)

        body = BodyReservation(self.budget, refuse)
        body.tenant = tenant
        return body

    def grown(self, tenant: str, size: int, name: str = "") -> BodyReservation:
        body = self.body(tenant, name)
        body.grow(size)
        return body


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 80), st.booleans(), st.floats(0, 3)), max_size=60))
def test_budget_is_exceeded_by_a_single_request_only(steps: list[tuple[int, int, bool, float]]) -> None:
    bodies, held = Bodies(), dict[int, BodyReservation]()
    for who, size, complete, passed in steps:
        bodies.clock.now += passed
        if size == 0:
            if who in held:
                held.pop(who).release()
            continue
        body = held.setdefault(who, bodies.body(f"tenant-{who % 3}", str(who)))
        try:
            body.grow(size * 2)
        except RequestError:
            assert bodies.budget.used + size * 2 > bodies.budget.limit
        if complete:
            body.complete()
        for name in bodies.refused:
            held.pop(int(name), body).release()
        bodies.refused.clear()
        assert bodies.budget.used == sum(one.size for one in held.values()) == sum(bodies.budget.held.values())
        assert bodies.budget.used <= bodies.budget.limit or sum(one.size > 0 for one in held.values()) == 1
    for one in held.values():
        one.release()
        one.release()
    assert (bodies.budget.used, bodies.budget.incomplete, dict(bodies.budget.held)) == (0, set(), {})


def test_an_announced_body_holds_nothing() -> None:
    bodies = Bodies()
    for _ in range(17):
        bodies.body("a").expect(64)
    bodies.grown("b", 60)


def test_an_announced_body_without_space_is_refused_before_it_arrives() -> None:
    bodies = Bodies()
    bodies.grown("a", 60).complete()
    with pytest.raises(RequestError):
        bodies.body("a").expect(60)


def test_a_tenant_within_its_share_is_served_at_the_cost_of_the_slowest_body_above_its_own() -> None:
    bodies = Bodies()
    bodies.grown("greedy", 30, "slow")
    bodies.clock.now += 10
    bodies.grown("greedy", 30, "fast")
    bodies.grown("greedy", 30, "whole").complete()
    bodies.grown("modest", 30)
    assert bodies.refused == ["slow"]
    assert bodies.budget.held == {"greedy": 60, "modest": 30}


def test_a_tenant_above_its_share_is_refused_and_disturbs_none() -> None:
    bodies = Bodies()
    bodies.grown("greedy", 60)
    bodies.grown("modest", 30)
    with pytest.raises(RequestError):
        bodies.grown("greedy", 30)
    assert bodies.refused == []


def test_a_stalled_body_gives_way_to_another_one_of_its_tenant() -> None:
    bodies = Bodies()
    bodies.grown("only", 60, "stalled")
    with pytest.raises(RequestError):
        bodies.grown("only", 60)
    bodies.clock.now += STALLED_SECONDS
    bodies.grown("only", 60)
    assert bodies.refused == ["stalled"]


def test_a_whole_body_never_gives_way() -> None:
    bodies = Bodies()
    bodies.grown("greedy", 90).complete()
    bodies.clock.now += 60
    with pytest.raises(RequestError):
        bodies.grown("modest", 30)


@given(st.lists(st.binary(min_size=1, max_size=9), max_size=50))
async def test_a_body_is_its_chunks_whatever_they_are(chunks: list[bytes]) -> None:
    request = hot_request()
    for chunk in chunks:
        request.feed(chunk)
    request.feed(None)
    assert await request.body(1000, Bodies().body("a")) == b"".join(chunks)


def test_a_body_of_tiny_chunks_takes_little_more_memory_than_its_bytes() -> None:
    request, count = hot_request(), 100_000
    tracemalloc.start()
    try:
        for number in range(count):
            request.feed(number.to_bytes(2, "big", signed=False) if number < 65536 else b"ab")
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert request.size == 2 * count
    assert used < 2 * request.size


async def test_others_are_served_while_the_chunks_of_a_large_body_are_joined() -> None:
    request, budget = hot_request(), BodyBudget(1 << 30)
    for number in range(256):
        request.feed(bytes([number]) * (1 << 17))
    request.feed(None)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    serving = asyncio.create_task(other())
    body = await request.body(1 << 30, BodyReservation(budget, refuse=request.refuse_body))
    serving.cancel()
    assert body == b"".join(bytes([number]) * (1 << 17) for number in range(256))
    assert turns >= 16


def hot_request() -> HotRequest:
    """A request whose body has no announced length, at no connection."""
    connection: Any = SimpleNamespace(transport=None, flow=SimpleNamespace(resume_reading=lambda: None))
    return HotRequest(connection, "/v1/chat/completions", [], keep_alive=True, chunked=True)
