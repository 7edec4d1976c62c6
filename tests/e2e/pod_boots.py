"""How the project's pods came up, those that were replaced among them: a watch sees them for as long as a run lasts."""

import json
import threading
from contextlib import suppress
from typing import Any

from cluster.access import Access

from mmrouter_cli.status.pod_boot import waits_for

Object = dict[str, Any]

SELECTOR = "app.kubernetes.io/part-of=mmrouter"
PAUSE_SECONDS = 0.5
"""Between two watches: a test may have left the API server ended."""


class Boots:
    """Keeps each pod as it was when it was Ready for the first time; one that never was, as it was last."""

    def __init__(self, cluster: Access) -> None:
        self._cluster = cluster
        self._pods: dict[str, Object] = {}
        self._ended = threading.Event()
        threading.Thread(target=self._follow, name="boots", daemon=True).start()

    def of(self, namespace: str) -> list[Object]:
        """Return the pods that a namespace has or had, the oldest first."""
        found = [pod for pod in self._pods.copy().values() if pod["metadata"]["namespace"] == namespace]
        return sorted(found, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))

    def end(self) -> None:
        """Begin no other watch. The one that is open ends with the cluster's client."""
        self._ended.set()

    def _follow(self) -> None:
        options = {"watch": "true", "labelSelector": SELECTOR}
        while not self._ended.is_set():
            # Whatever ends a watch, the next one begins with all pods that there are.
            with suppress(Exception), self._cluster.http.stream("GET", "/api/v1/pods", params=options) as answer:
                for line in answer.iter_lines():
                    event = json.loads(line)
                    if event["type"] in {"ADDED", "MODIFIED"}:
                        self._see(event["object"])
            self._ended.wait(PAUSE_SECONDS)

    def _see(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        if uid not in self._pods or waits_for(self._pods[uid]):
            self._pods[uid] = pod
