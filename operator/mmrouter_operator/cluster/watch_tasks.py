"""kopf's tasks, under our eyes: the operator learns at once when one of them ends, and why.

kopf's own supervision waits five seconds first and then cancels every task that began after its own, ours as well: the
leader would end without giving the lease back, and until then it would decide by caches that nobody fills.
"""

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from typing import Any, cast

import kopf

# Given to kopf by a parameter of its own, and the only way to learn which kinds it found: it merely logs the others.
from kopf._cogs.structs.references import Insights

from mmrouter_operator.model.refs import KINDS


class WatchError(Exception):
    """Nothing is watched any more, or not everything that has to be; the message says why."""


class Watching:
    """Watches ``kinds`` in ``namespaces`` (none: all of them) with the handlers of ``registry`` once started."""

    def __init__(
        self,
        kinds: Sequence[str],
        namespaces: Sequence[str],
        registry: kopf.OperatorRegistry,
        settings: kopf.OperatorSettings,
        *,
        identity: str,
    ) -> None:
        self._kinds = kinds
        self._namespaces = namespaces
        self._registry = registry
        self._settings = settings
        self._identity = identity
        self._insights = Insights()
        self._stop = asyncio.Event()
        self._parts: Collection[asyncio.Task[None]] = ()
        self._others: set[asyncio.Task[Any]] = set()
        """Tasks that were there before."""

    async def start(self) -> None:
        """Begin. kopf takes the signals for itself here."""
        self._others = asyncio.all_tasks()
        self._parts = await kopf.spawn_tasks(
            registry=self._registry,
            settings=self._settings,
            insights=self._insights,
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            # kopf's own default asks for the user's name, and a container's user has none.
            identity=cast(Any, self._identity),
            stop_flag=self._stop,
        )

    async def ended(self) -> None:
        """Wait until it watches no more; raises :class:`WatchError` then and never returns."""
        found = asyncio.create_task(self._insights.ready_resources.wait())
        try:
            done, _ = await asyncio.wait([*self._parts, found], return_when=asyncio.FIRST_COMPLETED)
            if done == {found}:
                # A kind that the server does not tell of at this moment is watched neither now nor later.
                if unknown := self._unknown():
                    raise WatchError(f"the server tells nothing of {', '.join(unknown)}")
                done, _ = await asyncio.wait(self._parts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            found.cancel()
        failure = next((e for task in done - {found} if not task.cancelled() and (e := task.exception())), None)
        raise WatchError(f"the watches ended: {failure or 'no reason was given'}") from failure

    async def stop(self, seconds: float) -> None:
        """End all of it, within so many seconds. To be called when no task but those of kopf and older ones run."""
        self._stop.set()
        ours = asyncio.all_tasks().difference(self._parts)
        # Whatever a part ended with was told by `ended`; here nothing but the end matters.
        with contextlib.suppress(Exception):
            await asyncio.wait_for(kopf.run_tasks(self._parts, ignored=ours), seconds)
        # One part that failed leaves its watches behind. Each ends its own waiter: a watch whose waiter is cancelled
        # before it takes that for a pause, swallows its own cancellation, and never ends.
        left = asyncio.all_tasks() - self._others - {asyncio.current_task()}
        if watches := [task for task in left if not task.get_name().startswith("pause-waiter")]:
            for task in watches:
                task.cancel()
            await asyncio.wait(watches, timeout=seconds)

    def _unknown(self) -> list[str]:
        watched = {(one.group, one.version, one.plural) for one in self._insights.watched_resources}
        places = {kind: KINDS[kind] for kind in self._kinds}
        return [
            kind
            for kind, place in places.items()
            if (place.group, place.api_version.rpartition("/")[2], place.plural) not in watched
        ]
