"""Linear cost models of encoders, and request ids."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ulid import ULID

from mmrouter_lib.engines.base.accelerator_settings import DEVICES
from mmrouter_router.core.linear_cost import WINDOW, Line, Rate, guess
from mmrouter_router.core.request_ids import RequestIds

WRONG = Line(0.005, 0.001)


def noisy(rnd, line, tokens, wild=0.0):
    return line.seconds(tokens) * rnd.uniform(0.9, 1.1) * (rnd.uniform(3, 50) if rnd.random() < wild else 1)


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.floats(300, 50_000), st.floats(0, 0.03))
def test_fit_tolerates_outliers(seed, speed, overhead):
    rnd, line = random.Random(seed), Line(overhead, 1 / speed)
    rate = Rate(WRONG)
    sizes = [rnd.choice((4, 64, 256, 576, 800, 1196, 1280)) for _ in range(WINDOW)]
    wild = set(rnd.sample(range(WINDOW), WINDOW // 8))
    for number, tokens in enumerate(sizes):
        rate.observe(tokens, noisy(rnd, line, tokens, wild=number in wild))
    for tokens in (576, 1280):
        assert rate.line.seconds(tokens) == pytest.approx(line.seconds(tokens), rel=0.25)


def test_first_image_replaces_the_guess():
    rate = Rate(WRONG)
    rate.observe(1000, 0.1005)
    assert rate.line.seconds(1000) == pytest.approx(0.1005)


def test_images_of_one_size_scale_the_line():
    rate = Rate(Line(0.01, 0.001))
    for _ in range(WINDOW):
        rate.observe(500, 0.051)
    assert rate.line == Line(pytest.approx(0.001), pytest.approx(0.0001))


def test_changed_rate_is_learned_within_a_window():
    rnd, rate = random.Random(1), Rate(WRONG)
    for line in (Line(0.002, 0.0001), Line(0.002, 0.0005)):
        for _ in range(WINDOW):
            tokens = rnd.randint(50, 1200)
            rate.observe(tokens, noisy(rnd, line, tokens))
        assert rate.line.per_token == pytest.approx(line.per_token, rel=0.15)


def test_first_measurement_after_a_reset_counts_alone():
    rate = Rate(WRONG)
    for tokens in range(100, 1000, 20):
        rate.observe(tokens, tokens / 10_000)
    rate.forget()
    rate.observe(1000, 1.0)
    assert rate.line.seconds(1000) == pytest.approx(1.0)


def test_images_of_one_batch_are_one_measurement():
    rate = Rate(Line(0.0, 0.001))
    for _ in range(WINDOW):
        rate.observe(400, 0.2, at_once=2)
        rate.observe(400, 0.0, at_once=2)
    assert rate.line.seconds(800, images=2) == pytest.approx(0.2)


def test_zero_durations_are_ignored_and_negative_ones_refused():
    rate = Rate(WRONG)
    rate.observe(400, 0.0)
    assert rate.line == WRONG
    with pytest.raises(ValueError, match="took -1"):
        rate.observe(400, -1)


def test_every_accelerator_has_an_initial_guess():
    slowest = guess("something new")
    assert all(guess(kind).per_token <= slowest.per_token for kind in DEVICES)
    assert guess("cpu") == slowest
    assert guess("nvidia").per_token == pytest.approx(slowest.per_token / 8)


def test_request_id_is_a_prefixed_ulid_of_now():
    ids = RequestIds("r-1-")
    before = time.time_ns() // 1_000_000
    name = ids()
    assert name.startswith("r-1-")
    assert before <= ULID.from_str(name.removeprefix("r-1-")).milliseconds <= time.time_ns() // 1_000_000
    assert str(ULID.from_str(name.removeprefix("r-1-"))) == name.removeprefix("r-1-")


def test_request_ids_are_unique():
    ids = RequestIds("")
    assert len({ids()[-16:] for _ in range(2000)}) == 2000
