"""Leases of prefilled blocks: until when a decode engine may be sent to them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrouter_lib.engines.vllm.stage_requests import RECENT, BlockLeases, lease_seconds

NIXL = "NixlConnector"


@pytest.mark.parametrize(
    ("connector", "seconds"),
    [
        ({}, 30),
        ({"kv_connector": NIXL}, 30),
        ({"kv_connector": NIXL, "kv_connector_extra_config": {"kv_lease_duration": 6}}, 6),
        ({"kv_connector": NIXL, "kv_connector_extra_config": {"kv_lease_duration": "six"}}, None),
        ({"kv_connector": "MooncakeConnector"}, None),
    ],
)
def test_the_lease_is_the_connectors(connector, seconds):
    assert lease_seconds(connector) == seconds


def test_an_unknown_lease_has_no_deadline():
    assert BlockLeases(None).deadline("e", {"remote_blocks_expiry_time": 5.0}, 1.0) is None


@pytest.mark.parametrize("params", [{}, {"remote_blocks_expiry_time": None}, {"remote_blocks_expiry_time": "soon"}])
def test_without_a_named_time_the_lease_begins_with_the_answer(params):
    assert BlockLeases(30.0).deadline("e", params, 100.0) == 100 + 25


times = st.floats(0, 1e6)


answered = st.lists(st.tuples(times, st.floats(0, 100)), min_size=1, max_size=RECENT)


@given(answered, st.floats(-1e6, 1e6), st.floats(1, 500))
def test_a_named_time_holds_whatever_the_engines_clock_and_however_late_the_answer(answers, offset, lease):
    """Once one answer came without a delay, the deadline is exact; before, it is late by at most the delay."""
    leases = BlockLeases(lease)
    least = min(delay for _, delay in answers)
    for ended, delay in sorted(answers, key=lambda answer: answer[1]):
        params = {"remote_blocks_expiry_time": ended + lease + offset}
        deadline = leases.deadline("engine", params, ended + delay)
        assert deadline == pytest.approx(ended + least + lease * 5 / 6, abs=1e-3)
    assert leases.deadline("another", {}, 0.0) == pytest.approx(lease * 5 / 6)


def test_a_clock_that_stopped_for_a_while_counts_again_after_some_answers():
    leases = BlockLeases(30.0)
    expiry = lambda stopped: {"remote_blocks_expiry_time": 130.0 - stopped}  # noqa: E731
    assert leases.deadline("e", expiry(0.0), 100.0) == 125
    assert leases.deadline("e", expiry(60.0), 100.0) == 65
    for _ in range(RECENT):
        deadline = leases.deadline("e", expiry(60.0), 100.0)
    assert deadline == 125
