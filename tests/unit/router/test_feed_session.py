"""A feed over time: unanswered requests are repeated, and an index that may be outdated is not used."""

import pytest

from mmrouter_lib.block_keys import pack_keys
from mmrouter_lib.feed import Delta, Heartbeat, ReplayPart, ReplayRequest, SnapshotPart, SnapshotRequest
from mmrouter_router.fleet.feed_session import ANSWER_SECONDS, CHECK_SECONDS, STALE_SECONDS, FeedSession
from mmrouter_router.fleet.workers import Fleet, Member
from mmrouter_router.telemetry.metrics import Metrics


class Followed:
    """A session whose sidecar sends what a test says, on a clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.fleet = Fleet(Metrics(), clock=lambda: self.now)
        self.worker = self.fleet.join(Member("pod-1", "pod-1", "", "worker", "worker"))
        self.session = FeedSession(self.worker, self.fleet)
        self.session.opened()
        (request,) = self.beat(0)
        self.session.on_reply(self.snapshot(request.id, 0))
        assert self.worker.routable

    def beat(self, seq: int):
        return self.session.on_published(Heartbeat("pod-1/a", 1, seq, "vllm", "up", "", 16, "m", "main", {}))

    def snapshot(self, number: int, seq: int) -> SnapshotPart:
        return SnapshotPart(number, "pod-1/a", 1, seq, 0, 0, "GPU", pack_keys([1]), True)

    def pass_time(self, seconds: float, *, beats: int | None = None):
        """Let time pass with its checks, and with heartbeats of a number; return the requests."""
        requests = []
        for _ in range(round(seconds / CHECK_SECONDS)):
            self.now += CHECK_SECONDS
            if beats is not None:
                requests += self.beat(beats)
            requests += self.session.check()
        return requests


@pytest.fixture
def followed() -> Followed:
    return Followed()


def test_a_silent_sidecar_is_stale_and_is_resynced_when_it_is_back(followed):
    assert followed.pass_time(STALE_SECONDS) == []
    assert followed.worker.routable
    followed.pass_time(CHECK_SECONDS)
    assert not followed.worker.routable
    (request,) = followed.beat(0)
    followed.session.on_reply(followed.snapshot(request.id, 0))
    assert followed.worker.routable


def test_a_gap_that_stays_open_makes_the_index_stale_though_heartbeats_arrive(followed):
    asked = followed.session.on_published(Delta(1, 2, 0.0, 0, 0, "GPU", b"", pack_keys([1])))
    assert asked == [ReplayRequest(asked[0].id, 1, 1)]
    assert followed.worker.routable, "a replay is requested first"
    again = followed.pass_time(ANSWER_SECONDS + CHECK_SECONDS, beats=2)
    assert [type(request) for request in again] == [SnapshotRequest]
    assert not followed.worker.routable
    followed.session.on_reply(followed.snapshot(again[-1].id, 2))
    assert followed.worker.routable


def test_an_unanswered_request_is_repeated_until_it_is_answered(followed):
    followed.session.opened()
    asked = followed.pass_time(4 * (ANSWER_SECONDS + CHECK_SECONDS), beats=0)
    assert [type(request) for request in asked] == [SnapshotRequest] * 4
    assert len({request.id for request in asked}) == 4
    followed.session.on_reply(followed.snapshot(asked[0].id, 0))
    assert not followed.worker.routable, "an answer to an older request is stale"
    followed.session.on_reply(followed.snapshot(asked[-1].id, 0))
    assert followed.worker.routable
    assert followed.pass_time(10, beats=0) == []


def test_an_answer_to_an_older_request_does_not_end_the_wait_for_the_newest(followed):
    """A repeated answer arrives after the next request, whose own answer is lost."""
    (first,) = followed.session.on_published(Delta(1, 2, 0.0, 0, 0, "GPU", b"", pack_keys([1])))
    followed.session.on_published(Delta(1, 4, 0.0, 0, 0, "GPU", b"", pack_keys([1])))
    answer = ReplayPart(first.id, (Delta(1, 1, 0.0, 0, 0, "GPU", b"", b""),), last=True)
    assert [type(request) for request in followed.session.on_reply(answer)] == [ReplayRequest]
    assert followed.session.on_reply(answer) == []
    again = followed.pass_time(ANSWER_SECONDS + CHECK_SECONDS, beats=4)
    assert [type(request) for request in again] == [SnapshotRequest]
    assert not followed.worker.routable
