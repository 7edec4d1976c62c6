"""Fixtures of tests that write to a table of objects and see it through the watch cache."""

import pytest
from unit.operator.fake_cluster import Table

from mmrouter_operator.cluster.cache import WatchCache


@pytest.fixture
def cache() -> WatchCache:
    return WatchCache()


@pytest.fixture
def table(cache: WatchCache) -> Table:
    return Table(cache)
