"""Watches of children and pods: fills the cache with them and reports every deployment that changed."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kubernetes.aio.client.api_client import ApiClient

from mmrouter_kube.list_watch import ListWatch, RefusedError
from mmrouter_operator.cluster.cache import WatchCache
from mmrouter_operator.cluster.operator_kinds import KINDS
from mmrouter_operator.model.kinds import CHILD_SELECTOR
from mmrouter_operator.model.snapshot import Key

log = logging.getLogger(__name__)

_RETRIED = frozenset({401, 403, 404, 408, 410, 429})
"""Refusals (4xx) that may pass: a token is renewed, rights are granted, a version is listed again, the server
throttles, or it has just started and its authorizer and custom kinds are not loaded yet."""


class WatchError(Exception):
    """A kind can no longer be watched. The message says which one and why."""


class ChildWatches:
    """Watches of ``kinds`` in ``namespaces`` (an empty string: in all). ``changed`` is called with changed keys."""

    def __init__(
        self,
        connect: Callable[[], ApiClient],
        cache: WatchCache,
        kinds: Sequence[str],
        namespaces: Sequence[str],
        changed: Callable[[Key], None],
    ) -> None:
        self.listed = asyncio.Event()
        """Set once every kind has been listed."""
        self._listeners = [
            KindListener(kind, namespace, cache, changed, self._on_listed) for kind in kinds for namespace in namespaces
        ]
        self._watches = [ListWatch(connect, listener.path, CHILD_SELECTOR, listener) for listener in self._listeners]

    @property
    def trouble(self) -> str:
        """Why not every kind has been listed yet, in a sentence; empty if all have."""
        waiting = [listener for listener in self._listeners if not listener.complete]
        failed = next((listener.trouble for listener in waiting if listener.trouble), "")
        kinds = sorted({listener.kind for listener in waiting})
        return failed or (f"not listed yet: {', '.join(kinds)}" if kinds else "")

    async def run(self) -> None:
        """Watch until cancelled. Raises :class:`WatchError` when one of the kinds can no longer be watched."""
        tasks = [asyncio.create_task(watch.run()) for watch in self._watches]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _on_listed(self) -> None:
        if all(listener.complete for listener in self._listeners):
            self.listed.set()


class KindListener:
    """Puts one kind of one namespace into the cache; see ``mmrouter_kube.list_watch.Listener``."""

    def __init__(
        self,
        kind: str,
        namespace: str,
        cache: WatchCache,
        changed: Callable[[Key], None],
        on_listed: Callable[[], None],
    ) -> None:
        self.kind, self.namespace = kind, namespace
        self.complete = False
        """Whether it has been listed once."""
        self.trouble = ""
        """Why it cannot be listed or watched now, in a sentence."""
        self._cache, self._changed, self._on_listed = cache, changed, on_listed
        self._known: frozenset[str] = frozenset()

    def path(self) -> str:
        return KINDS[self.kind].path(self.namespace)

    def list_started(self) -> None:
        self._known = frozenset(self._cache.uids(self.kind, self.namespace))

    def listed(self, objects: Sequence[Mapping[str, Any]]) -> None:
        for obj in objects:
            self._report(self._cache.put(self.kind, obj))

    def list_complete(self, uids: frozenset[str]) -> None:
        for uid in self._known - uids:
            self._report(self._cache.remove(self.kind, uid))
        self._known = frozenset()
        if not self.complete:
            self.complete = True
            self._on_listed()

    def event(self, type: str, obj: Mapping[str, Any]) -> None:
        if type == "DELETED":
            metadata = obj["metadata"]
            self._report(self._cache.remove(self.kind, metadata["uid"], metadata["resourceVersion"]))
        else:
            self._report(self._cache.put(self.kind, obj))

    def connected(self) -> None:
        self.trouble = ""

    def failed(self, reason: str, error: Exception) -> None:
        """Log the first of several failures. Raises :class:`WatchError` for a refusal that repeating cannot cure."""
        what = "watched" if self.complete else "listed"
        sentence = f"{self.kind} cannot be {what} in {self.namespace or 'all namespaces'}: {error}"
        status = error.status if isinstance(error, RefusedError) else 0
        if 400 <= status < 500 and status not in _RETRIED:
            raise WatchError(sentence) from error
        if not self.trouble and reason != "expired":
            log.warning(sentence)
        self.trouble = sentence

    def _report(self, keys: tuple[Key, ...]) -> None:
        for key in keys:
            self._changed(key)
