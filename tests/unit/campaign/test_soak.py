"""Sizes over time: growth is found, noise is none, and some virtual hours of a deployment are flat."""

import logging
import random
from dataclasses import replace

import pytest
from campaign.soak.flatness import MIN_SAMPLES, growth, is_flat
from campaign.soak.month import PLAN, Month
from hypothesis import given
from hypothesis import strategies as st

from mmrouter_router.fleet.workers import Fleet

HOURS, SAMPLES = 2.0, 12


@given(st.integers(0, 2**32), st.integers(MIN_SAMPLES, 100), st.floats(1, 1e6))
def test_a_size_with_bursts_and_a_warm_up_is_flat(seed, count, size):
    dice = random.Random(seed)
    warming = [size * n / count for n in range(count // 2)]
    steady = [size * dice.uniform(0.99, 1.01) for _ in range(count - count // 2)]
    steady[dice.randrange(len(steady))] *= 5 if len(steady) > 5 else 1
    assert is_flat([*warming, *steady], share=0.05, least=0.0)


@given(st.integers(MIN_SAMPLES, 200), st.floats(0.01, 10), st.floats(0, 1e5))
def test_growth_is_that_of_a_quarter_of_the_run(count, slope, size):
    samples = [size + slope * n for n in range(4 * (count // 4))]
    assert growth(samples) == pytest.approx(slope * len(samples) / 4, rel=0.02, abs=slope)
    assert not is_flat(samples, share=0.0, least=0.2 * slope * len(samples))


def test_too_few_samples_say_nothing():
    assert is_flat([float(n) for n in range(MIN_SAMPLES - 1)], share=0.0, least=0.0)


@pytest.fixture
def lived(tmp_path, caplog):
    """Lives some hours with faults ten times as frequent as in a month, and returns what is not flat."""
    caplog.set_level(logging.CRITICAL)

    def live() -> Month:
        month = Month("hours", tmp_path, replace(PLAN, faults=1 / 360), images=500)
        month.live(HOURS / 24, SAMPLES)
        return month

    return live


def test_hours_of_a_deployment_leave_every_size_within_its_bound(lived):
    month = lived()
    assert month.problems() == []
    assert month.world.counts.total() - month.world.counts["decisions"] > 5, "there were faults"
    assert month.sizes.sentinels[-1] == 500


def test_a_router_that_keeps_every_frame_is_found(lived, monkeypatch):
    kept, take = [], Fleet.on_published

    def keep(self, worker, frame):
        kept.extend(object() for _ in range(20))
        return take(self, worker, frame)

    monkeypatch.setattr(Fleet, "on_published", keep)
    assert any("memory grows" in problem for problem in lived().problems())
