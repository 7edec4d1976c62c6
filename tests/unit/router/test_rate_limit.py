"""The rate limit never exceeds its rate, and states correctly when to retry and what is left."""

import math

from hypothesis import example, given
from hypothesis import strategies as st

from mmrouter_router.admission.rate_limit import PERIOD, decide

RATES = st.floats(0.05, 5000)
PAUSES = st.lists(st.one_of(st.just(0.0), st.floats(0, 0.1), st.floats(0, 200)), max_size=200)
START = 1e6  # a monotonic clock of a machine that has been up for days


def capacity(rate: float) -> float:
    return max(1.0, rate)


@given(RATES, PAUSES)
def test_no_interval_admits_more_than_a_full_bucket_and_what_flows_into_it(rate: float, pauses: list[float]) -> None:
    now, full_at, admitted = START, 0.0, list[float]()
    for pause in pauses:
        now += pause
        decision = decide(rate, full_at, now)
        full_at = decision.full_at
        if not decision.wait:
            admitted.append(now)
        for count, began in enumerate(reversed(admitted), 1):
            assert count <= capacity(rate) + (now - began) * rate / PERIOD + 0.01


@given(RATES, PAUSES)
def test_what_is_refused_is_admitted_after_the_wait_and_not_long_before(rate: float, pauses: list[float]) -> None:
    now, full_at = START, 0.0
    for pause in pauses:
        now += pause
        decision = decide(rate, full_at, now)
        full_at = decision.full_at
        if decision.wait:
            assert decide(rate, full_at, now + decision.wait).wait == 0
            assert decide(rate, full_at, now + decision.wait * 0.99 - 0.001).wait > 0
            assert decision.wait <= PERIOD / rate + 0.001, "one request's part of the bucket is always enough"


@given(RATES, PAUSES)
@example(1549.0, [])
def test_remaining_is_what_is_admitted_now_and_a_full_bucket_is_reached_when_it_says(
    rate: float, pauses: list[float]
) -> None:
    now, full_at = START, 0.0
    for pause in pauses:
        now += pause
        decision = decide(rate, full_at, now)
        full_at = decision.full_at
    decision = decide(rate, full_at, now)
    state, left = decision.full_at, 0
    while not (following := decide(rate, state, now)).wait:
        state, left = following.full_at, left + 1
    assert left == decision.remaining
    assert decide(rate, state, max(now, state)).remaining == math.floor(capacity(rate) + 1e-4) - 1
