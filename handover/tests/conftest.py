"""Fixtures of both packages' tests; the hypothesis profile is that of tests/unit."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from handover.tests.support import Clock, shared_root

if not os.environ.get("CI"):
    settings.register_profile(
        "inner-loop", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("inner-loop")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def root() -> Iterator[Path]:
    with shared_root() as folder:
        yield folder
