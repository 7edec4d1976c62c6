"""kopf's watch of the MMRouterDeployments, and a comparison with the server that finds what it missed.

kopf keeps no state in the cluster here: raw event handlers need no annotations, peering, posted events or finalizers. A
kopf watch that is re-established lists what exists and does not report what was deleted meanwhile, and it may fail
silently. One listing of metadata now and then finds both, and tells at start when the cache is filled.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import kopf
from kubernetes.aio.client.configuration import Configuration

from mmrouter_operator.cluster.cache import WatchCache
from mmrouter_operator.cluster.client import ApiError, KubernetesCluster
from mmrouter_operator.cluster.connection import kopf_credentials
from mmrouter_operator.cluster.operator_kinds import KINDS
from mmrouter_operator.cluster.watches import WatchError
from mmrouter_operator.model.kinds import RESOURCE
from mmrouter_operator.model.snapshot import Key

log = logging.getLogger(__name__)

INTERVAL, SUSPICIOUS, FIRST = 300.0, 30.0, 0.2
"""Seconds between comparisons: usually, after one that found a difference, and until the cache is filled."""
LONGEST_PAUSE = 10.0
"""Most seconds between tries while the server does not answer."""
TOLERATED = 3
"""Comparisons in a row that may miss the same resource before the watch counts as dead."""


class _EndlessBackoff:
    """kopf's pauses between tries of one request, in seconds: an outage of any length is survived.

    Not a list, because kopf repeats without an end what has no length.
    """

    def __iter__(self) -> Iterator[float]:
        yield from (0.2, 0.5, 1, 2, 5)
        while True:
            yield 10.0


def kopf_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    # No watches of namespaces and CRDs, and no rights for them.
    settings.scanning.disabled = True
    settings.networking.error_backoffs = _EndlessBackoff()
    settings.networking.request_timeout = 30.0
    settings.networking.connect_timeout = 5.0
    settings.watching.connect_timeout = 5.0
    # The server ends every watch after this time: one without an end may be dead without notice.
    settings.watching.server_timeout = 600
    settings.watching.chunk_size = 500
    settings.queueing.idle_timeout = 0.1
    return settings


class ResourceWatch:
    """Watches the resources in ``namespaces`` (none: in all). ``changed`` is called with changed keys.

    kopf's own supervision waits five seconds after a failure and then cancels every task that was started after its
    own, the leader election among them. Therefore its tasks are supervised by :meth:`ended`.
    """

    def __init__(
        self,
        configuration: Configuration,
        cache: WatchCache,
        comparison: "Comparison",
        namespaces: Sequence[str],
        changed: Callable[[Key], None],
        *,
        identity: str,
    ) -> None:
        self._cache, self._comparison, self._changed = cache, comparison, changed
        self._namespaces, self._identity = namespaces, identity
        self._registry = kopf.OperatorRegistry()
        self._stop = asyncio.Event()
        self._tasks: Collection[asyncio.Task[None]] = ()
        self._older: set[asyncio.Task[Any]] = set()

        async def connect(**_: Any) -> kopf.ConnectionInfo:
            return await kopf_credentials(configuration)

        kopf.on.login(registry=self._registry)(connect)
        group, _, version = KINDS[RESOURCE].api.partition("/")
        kopf.on.event(group, version, KINDS[RESOURCE].plural, registry=self._registry)(self._on_event)

    async def start(self) -> None:
        """Start kopf's tasks. kopf installs its own signal handlers here."""
        self._older = asyncio.all_tasks()
        self._tasks = await kopf.spawn_tasks(
            registry=self._registry,
            settings=kopf_settings(),
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            # kopf's default is the user's name, and a container's user has none.
            identity=cast(Any, self._identity),
            stop_flag=self._stop,
        )

    async def ended(self) -> None:
        """Wait until one of kopf's tasks ends, then raise :class:`WatchError`."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        failure = next((e for task in done if not task.cancelled() and (e := task.exception())), None)
        raise WatchError(f"the watch of {RESOURCE} ended: {failure or 'no reason was given'}") from failure

    async def stop(self, seconds: float) -> None:
        """Stop kopf's tasks within ``seconds``. Every other task that was started after them must have ended."""
        self._stop.set()
        ours = asyncio.all_tasks().difference(self._tasks)
        # `ended` has reported failures already.
        with contextlib.suppress(Exception):
            await asyncio.wait_for(kopf.run_tasks(self._tasks, ignored=ours), seconds)
        # A task that failed leaves its watch behind. Pause waiters end with their watch; if a waiter is cancelled
        # first, its watch takes that for a pause, swallows its own cancellation, and never ends.
        left = asyncio.all_tasks() - self._older - {asyncio.current_task()}
        if watches := [task for task in left if not task.get_name().startswith("pause-waiter")]:
            for task in watches:
                task.cancel()
            await asyncio.wait(watches, timeout=seconds)

    async def _on_event(self, event: Mapping[str, Any], **_: Any) -> None:
        obj = event["object"]
        if event["type"] == "DELETED":
            keys = self._cache.remove(RESOURCE, obj["metadata"]["uid"], obj["metadata"]["resourceVersion"])
        else:
            keys = self._cache.put(RESOURCE, obj)
        for key in keys:
            self._changed(key)
        if event["type"] is None:
            self._comparison.hurry()  # a list: the watch began, or began anew and missed deletions


class Comparison:
    """Compares the cached resources with the server's."""

    def __init__(
        self, cluster: KubernetesCluster, cache: WatchCache, namespaces: Sequence[str], changed: Callable[[Key], None]
    ) -> None:
        self._cluster, self._cache, self._namespaces, self._changed = cluster, cache, namespaces, changed
        self._unseen: dict[str, int] = {}  # uid -> comparisons in a row in which the cache did not have it
        self._wanted = asyncio.Event()
        self.filled = asyncio.Event()
        """Set once the cache has had everything that the server has."""
        self.trouble = f"{RESOURCE} was not listed yet"
        """Why the cache does not count as filled, or why the last comparison failed; empty if neither."""

    @property
    def watch_is_dead(self) -> bool:
        return self.filled.is_set() and any(times >= TOLERATED for times in self._unseen.values())

    def hurry(self) -> None:
        """Compare now: the watch may have missed something. Until the cache is filled, that is done anyway."""
        if self.filled.is_set():
            self._wanted.set()

    async def run(self) -> None:
        failures, logged = 0, ""
        while True:
            self._wanted.clear()
            try:
                await self.compare()
                failures, logged = 0, ""
            except ApiError:
                failures += 1
                if self.trouble != logged:
                    log.warning("the cache could not be compared with the server: %s", self.trouble)
                logged = self.trouble
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause(failures)):
                    await self._wanted.wait()

    def _pause(self, failures: int) -> float:
        if not self.filled.is_set():
            return min(LONGEST_PAUSE, FIRST * 2.0 ** min(failures, 10))
        return SUSPICIOUS if self._unseen or failures else INTERVAL * random.uniform(0.8, 1.2)

    async def compare(self) -> None:
        """Compare once. Raises ``ApiError`` if the resources cannot be listed; :attr:`trouble` then says why."""
        known = set(self._cache.uids(RESOURCE))  # before the list: what is known here and not listed is gone
        listed: set[str] = set()
        for namespace in self._namespaces:
            try:
                objects = await self._cluster.list(RESOURCE, namespace, "")
            except ApiError as error:
                self.trouble = f"{RESOURCE} cannot be listed in {namespace or 'all namespaces'}: {error}"
                raise
            listed |= {obj["metadata"]["uid"] for obj in objects}
        for uid in known - listed:
            for key in self._cache.remove(RESOURCE, uid):
                log.info("deleted without an event", extra={"namespace": key[0], "object": key[1]})
                self._changed(key)
        unseen = listed - set(self._cache.uids(RESOURCE))
        self._unseen = {uid: self._unseen.get(uid, 0) + 1 for uid in unseen}
        self.trouble = f"the watch has not shown every {RESOURCE} yet" if unseen else ""
        if not unseen:
            self.filled.set()
