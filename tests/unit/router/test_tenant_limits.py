"""Limits per tenant: shared by routers, bounded in memory, and stated correctly in the headers of answers."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.router.rig import Clock, resource

from mmrouter_router.admission.tenant_limits import (
    LONGEST_RETRY,
    SHORTEST_RETRY,
    SWEEP_ABOVE,
    TenantAdmission,
    mean_after,
    retry_seconds,
)
from mmrouter_router.core.errors import RequestError


class Limits:
    """Admission by these fields of ``frontend.tenants``, with a clock of its own and a number of routers."""

    def __init__(self, **tenants: object) -> None:
        self.clock, self.routers = Clock(), 1
        frontend = {"replicas": 1, "apiKeys": {"secret": {"name": "k"}}, "tenants": tenants}
        self.admission = TenantAdmission(
            resource(frontend=frontend).spec.frontend.tenants, lambda: self.routers, self.clock
        )

    def ask(self, tenant: str = "red") -> RequestError | None:
        """Return why a request that ends at once is refused."""
        try:
            with self.admission.admit(tenant):
                return None
        except RequestError as error:
            return error


@given(st.integers(1, 300), st.integers(1, 5), st.lists(st.floats(0, 10), max_size=100))
def test_a_client_that_waits_as_retry_after_says_is_admitted(limit: int, routers: int, pauses: list[float]) -> None:
    limits = Limits(default={"requestsPerMinute": limit})
    limits.routers = routers
    for pause in pauses:
        limits.clock.now += pause
        while (error := limits.ask()) is None:
            pass
        assert (error.status, error.code, error.type) == (429, "rate_limited", "rate_limit_error")
        assert error.headers["x-ratelimit-remaining-requests"] == "0"
        limits.clock.now += int(error.headers["Retry-After"])
        assert limits.ask() is None


@given(st.integers(1, 300), st.integers(0, 400))
def test_headers_say_what_is_left_and_when_all_of_it_is_back(limit: int, asked: int) -> None:
    limits = Limits(default={"requestsPerMinute": limit})
    for _ in range(min(asked, limit - 1)):
        assert limits.ask() is None
    with limits.admission.admit("red") as permit:
        headers = {name.decode(): value.decode() for name, value in permit.headers}
    assert headers["x-ratelimit-limit-requests"] == str(limit)
    left = int(headers["x-ratelimit-remaining-requests"])
    assert [limits.ask() is None for _ in range(left + 1)] == [True] * left + [False]
    limits = Limits(default={"requestsPerMinute": limit})
    for _ in range(limit):
        permit = limits.admission.admit("red")
    (reset,) = [value for name, value in permit.headers if name == b"x-ratelimit-reset-requests"]
    limits.clock.now += int(reset.removesuffix(b"s"))
    assert [limits.ask() is None for _ in range(limit + 1)] == [True] * limit + [False]


def test_limits_of_all_routers_together_are_the_tenants():
    for routers in (1, 2, 3, 7):
        admitted, running = 0, 0
        for _ in range(routers):
            limits = Limits(default={"concurrency": 20})
            limits.routers = routers
            with contextlib.ExitStack() as open_requests:
                while (error := limits.ask()) is None:
                    open_requests.enter_context(limits.admission.admit("red"))
                    running += 1
                assert error.code == "concurrency_limited"
            limits = Limits(default={"requestsPerMinute": 100})
            limits.routers = routers
            while limits.ask() is None:
                admitted += 1
        assert 100 - routers < admitted <= 100
        assert 20 - routers < running <= 20


def test_a_router_that_appears_takes_its_part_at_once():
    limits = Limits(default={"concurrency": 4})
    with limits.admission.admit("red"), limits.admission.admit("red"):
        limits.routers = 2
        error = limits.ask()
        assert error is not None
        assert (error.code, error.headers) == ("concurrency_limited", {"Retry-After": "1"})
        limits.routers = 1
        assert limits.ask() is None


@given(st.lists(st.floats(0, 1000), max_size=40), st.integers(0, 100))
def test_the_time_to_retry_is_bounded_and_within_what_requests_took(durations, running):
    mean = None
    for seconds in durations:
        mean = mean_after(mean, seconds)
    seconds = retry_seconds(mean, running)
    assert SHORTEST_RETRY <= seconds <= LONGEST_RETRY
    if durations:
        assert min(durations) - 1e-9 <= mean <= max(durations) + 1e-9
        assert seconds >= min(LONGEST_RETRY, min(durations) / max(1, running) - 1e-9)
        assert seconds <= max(SHORTEST_RETRY, max(durations) / max(1, running) + 1)


def test_a_refused_client_reads_when_one_of_its_own_requests_ends():
    """Red and green have four requests under way; red's take 40 s each, so one ends every 10 s."""
    limits = Limits(default={"concurrency": 4})
    for _ in range(2):
        with contextlib.ExitStack() as running:
            permits = [running.enter_context(limits.admission.admit("red")) for _ in range(4)]
            for _ in range(4):
                running.enter_context(limits.admission.admit("green"))
            seconds = [limits.ask(tenant).headers["Retry-After"] for tenant in ("red", "green")]
            limits.clock.now += 40
            for permit in permits:
                permit.answered(limits.clock.now)
    assert seconds == ["10", "1"]
    with limits.admission.admit("red") as permit:
        assert permit.retry_seconds == 30, "it has no other request under way, and the bound is 30 s"


def test_tenants_do_not_use_each_others_limits_and_named_ones_have_their_own():
    limits = Limits(
        default={"requestsPerMinute": 1}, named=[{"name": "blue", "requestsPerMinute": 2}, {"name": "free"}]
    )
    for tenant, admitted in (("red", 1), ("green", 1), ("blue", 2)):
        assert [limits.ask(tenant) is None for _ in range(3)] == [True] * admitted + [False] * (3 - admitted)
    assert all(limits.ask("free") is None for _ in range(1000))
    with limits.admission.admit("free") as permit:
        assert permit.headers == []


def test_a_refusal_for_concurrency_costs_nothing_of_the_rate():
    limits = Limits(default={"requestsPerMinute": 2, "concurrency": 1})
    with limits.admission.admit("red"):
        for _ in range(5):
            error = limits.ask()
            assert error is not None
            assert error.code == "concurrency_limited"
    assert limits.ask() is None
    error = limits.ask()
    assert error is not None
    assert error.code == "rate_limited"


def test_a_request_that_fails_gives_its_place_back():
    limits = Limits(default={"concurrency": 1})
    with pytest.raises(ZeroDivisionError), limits.admission.admit("red"):
        raise ZeroDivisionError
    assert limits.ask() is None


def test_forgetting_idle_tenants_changes_no_decision():
    """More tenants than are remembered: the busy ones keep their state whatever others come and go."""
    limits = Limits(default={"requestsPerMinute": 1, "concurrency": 1})
    limits.admission.admit("runs").__enter__()
    for number in range(5 * SWEEP_ABOVE):
        if number % 100 == 0:
            limits.clock.now += 1.0
            busy, at = f"busy-{number}", limits.clock.now
            assert limits.ask(busy) is None
        limits.clock.now += 0.01
        assert limits.ask(f"tenant-{number}") is None
        assert (limits.ask(busy) is None) == (limits.clock.now - at >= 60)
        assert getattr(limits.ask("runs"), "code", "") == "concurrency_limited"
