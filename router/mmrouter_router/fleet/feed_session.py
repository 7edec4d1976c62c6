"""One worker's feed without its sockets: how frames, and missing frames, change the index. Uses the fleet's clock."""

from mmrouter_lib import feed
from mmrouter_router.fleet.workers import Fleet, SyncRequest, Worker

ANSWER_SECONDS = 2.0  # how long a snapshot or replay may take before it is requested again
STALE_SECONDS = 2.0  # the index is stale after four missing heartbeats of 0.5 s each
CHECK_SECONDS = STALE_SECONDS / 4  # between calls of :meth:`FeedSession.check`


class FeedSession:
    """Every method returns the requests that the sidecar must get, in order."""

    def __init__(self, worker: Worker, fleet: Fleet) -> None:
        self._worker, self._fleet = worker, fleet
        self._requested_at: float | None = None

    def opened(self) -> list[SyncRequest]:
        """Start the session: the index counts as stale until a snapshot arrives."""
        return self._requested(self._fleet.feed_connected(self._worker))

    def on_published(self, frame: feed.Published) -> list[SyncRequest]:
        requests = self._fleet.on_published(self._worker, frame)
        return self._requested(requests) if requests else requests

    def on_reply(self, frame: feed.Reply) -> list[SyncRequest]:
        requests = self._fleet.on_reply(self._worker, frame)
        if not self._worker.sync.request_id:  # an answer to an older request does not end the wait for the newest
            self._requested_at = None
        return self._requested(requests)

    def check(self) -> list[SyncRequest]:
        """Repeat a request without an answer; mark the index of a silent sidecar stale, and resync it when it is back.

        Call it every :data:`CHECK_SECONDS`.
        """
        requests: list[SyncRequest] = []
        worker, now = self._worker, self._fleet.now()
        if self._requested_at is not None and now - self._requested_at > ANSWER_SECONDS:
            requests += self._requested(self._fleet.request_timed_out(worker))
        if worker.heartbeat_at and now - worker.heartbeat_at > STALE_SECONDS:
            self._fleet.mark_stale(worker)
        elif worker.heartbeat_at and not worker.sync.synced and self._requested_at is None:
            requests += self._requested(self._fleet.feed_connected(worker))
        return requests

    def _requested(self, requests: list[SyncRequest]) -> list[SyncRequest]:
        if requests:
            self._requested_at = self._fleet.now()
        return requests
