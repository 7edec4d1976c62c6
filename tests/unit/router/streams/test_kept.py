"""What is kept of a stream: whole events, within bounds, up to a failure that the engine reports."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrouter_router.streams.kept import STEP, KeptBytes, KeptStream

EVENTS = [b'data: {"n": %d}\n\n' % n for n in range(9)]
FAILURES = {
    "error": b'data: {"error": {"message": "EngineCore encountered an issue", "code": 500}}\n\n',
    "unavailable": b'data: {"error":{"message":"draining","code":503}}\n\n',
    "unreadable": b'data: {"error": "boom"}\n\n',
    "abort": b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"abort"}]}\n\n',
}
REQUEST_ERROR = b'data: {"error": {"message": "the grammar is wrong", "code": 400}}\n\n'


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_only_whole_events_pass_whatever_the_pieces(sizes):
    stream, kept, passed = b"".join(EVENTS), KeptStream(KeptBytes()), b""
    while stream:
        size = sizes[len(stream) % len(sizes)]
        passed += kept.take(stream[:size])
        stream = stream[size:]
        assert passed == b"".join(EVENTS[: passed.count(b"\n\n")])
    assert passed == kept.events() == b"".join(EVENTS)


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_events_from_a_failure_on_do_not_pass(failure):
    kept = KeptStream(KeptBytes())
    assert kept.take(EVENTS[0] + failure + EVENTS[1] + b"data: [DONE]\n\n") == EVENTS[0]
    assert (kept.failed, kept.complete, kept.take(EVENTS[2])) == (True, False, b"")
    assert kept.events() == EVENTS[0]


def test_an_error_of_the_request_passes():
    kept = KeptStream(KeptBytes())
    assert kept.take(REQUEST_ERROR + b"data: [DONE]\n\n") == REQUEST_ERROR + b"data: [DONE]\n\n"
    assert (kept.failed, kept.complete) == (False, True)


def test_text_that_looks_like_a_failure_passes():
    text = b'data: {"choices":[{"delta":{"content":"data: {\\"error\\": \\"finish_reason\\":\\"abort\\""}}]}\n\n'
    kept = KeptStream(KeptBytes())
    assert (kept.take(text), kept.failed) == (text, False)


def test_a_stream_above_its_bound_is_not_kept():
    shared = KeptBytes()
    kept = KeptStream(shared, limit=2 * STEP)
    events = EVENTS * (3 * STEP // len(EVENTS[0]))
    assert b"".join(map(kept.take, events)) == b"".join(events)
    assert (kept.events(), shared.used) == (None, 0)


def test_the_bound_of_all_streams_is_given_back():
    shared = KeptBytes(limit=2 * STEP)
    first, second = KeptStream(shared), KeptStream(shared)
    first.take(EVENTS[0] + EVENTS[1])
    assert STEP < shared.used < shared.limit
    second.take(EVENTS[0])
    assert (first.events(), second.events()) == (EVENTS[0] + EVENTS[1], None)
    first.release()
    assert shared.used == 0
