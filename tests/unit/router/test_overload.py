"""Overload protection: bounded queues of engines and a bounded total size of request bodies."""

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.router.rig import BLOCK, IDS, KEYS, Rig, deployment, prepared
from unit.router.test_app import heard, member, router, value

from mmrouter_router.core.errors import RequestError
from mmrouter_router.fleet.membership import Membership
from mmrouter_router.http.body_budget import BodyBudget, BodyReservation
from mmrouter_router.request.engine_request import CHAT
from mmrouter_router.scheduling.placer import Booking, Placer, QueueFullError


class Queued(Rig):
    """A rig with queues of two requests per engine."""

    def __init__(self) -> None:
        super().__init__()
        resource = deployment()
        routing = resource.spec.routing.model_copy(update={"max_queued_requests": 2})
        spec = resource.spec.model_copy(update={"routing": routing})
        self.placer = Placer(resource.model_copy(update={"spec": spec}), self.fleet)

    def send(self) -> Booking:
        return self.placer.begin(self.placer.place(prepared()))


def test_full_queue_is_skipped_and_all_full_queues_refuse():
    rig = Queued()
    holder, other = rig.worker("holder", KEYS), rig.worker("other")
    first = [rig.send() for _ in range(4)]
    assert (holder.usage[0].requests, other.usage[0].requests) == (2, 2)
    with pytest.raises(QueueFullError, match="2 requests wait"):
        rig.send()
    first[0].answered()
    first[0].answered()
    rig.send()
    with pytest.raises(QueueFullError):
        rig.send()
    for booking in first:
        booking.end()
    assert holder.usage[0].unanswered + other.usage[0].unanswered == 1


def test_queues_are_per_rank():
    rig = Queued()
    worker = rig.worker("a", ranks=2)
    for _ in range(4):
        rig.send()
    assert {rank: usage.unanswered for rank, usage in worker.usage.items()} == {0: 2, 1: 2}
    with pytest.raises(QueueFullError):
        rig.send()


def test_unverified_engines_do_not_take_overflow():
    rig = Queued()
    rig.worker("a")
    rig.worker("pending", canary="")
    rig.send(), rig.send()
    with pytest.raises(QueueFullError):
        rig.send()


def test_dry_run_ignores_full_queues():
    rig = Queued()
    rig.worker("a", KEYS)
    rig.send(), rig.send()
    assert rig.placer.place(prepared(), dry_run=True).choice.winner.overlap == len(IDS) // BLOCK


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 80)), max_size=60))
def test_body_budget_is_exceeded_by_a_single_request_only(steps):
    room, held = BodyBudget(100), {}
    for who, size in steps:
        if size == 0:
            if who in held:
                held.pop(who).release()
            continue
        try:
            held.setdefault(who, BodyReservation(room)).grow(size * 2)
        except RequestError:
            assert room.used + size * 2 > room.limit
        assert room.used == sum(one.size for one in held.values())
        assert room.used <= room.limit or sum(one.size > 0 for one in held.values()) == 1
    for one in held.values():
        one.release()
        one.release()
    assert room.used == 0


@pytest.mark.parametrize("declared", [True, False])
async def test_body_beyond_the_budget_is_a_counted_429_with_retry_after(declared):
    async with router() as r:
        other = BodyReservation(r.chat.body_budget)
        other.grow(r.chat.body_budget.limit)
        transport = httpx.ASGITransport(r.client_app())

        async def pieces():
            yield b'{"model": "t", '
            if declared:
                pytest.fail("what is refused is not read")
            yield b'"messages": []}'

        headers = {"content-length": "30"} if declared else {}
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            answer = await client.post(CHAT, content=pieces(), headers=headers)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.json()["error"]["code"] == "router_full"
        assert value(r, "overload_refusals_total", reason="router_full") == 1
        assert r.chat.body_budget.used == r.chat.body_budget.limit, "what it had taken is given back"
        other.release()
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            answer = await client.post(CHAT, json={"model": "t", "messages": [{"role": "user", "content": "x"}]})
        assert answer.status_code == 503, "there is no engine"
        assert r.chat.body_budget.used == 0


async def test_full_queues_are_a_counted_429_with_retry_after():
    async with router() as r:
        r.apply_membership(Membership((member("a"),)))
        heard(r, "uid-a")
        r.placer._max_queued = 1
        booking = r.placer.begin(r.placer.place(prepared()))
        transport = httpx.ASGITransport(r.client_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            answer = await client.post(CHAT, json={"model": "t", "messages": [{"role": "user", "content": "x"}]})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.json()["error"]["code"] == "queue_full"
        assert value(r, "overload_refusals_total", reason="queue_full") == 1
        booking.end()
