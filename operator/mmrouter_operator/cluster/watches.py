"""kopf: watches, and nothing else. Every handler brings the cache up to date and enqueues keys.

No state of kopf's own: raw events and indexes write nothing to the cluster, no peering, no posting, no finalizer.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import kopf

from mmrouter_operator.cluster.cache import Cache
from mmrouter_operator.cluster.cache_audit import Audit
from mmrouter_operator.model.refs import CHILDREN, KINDS, MANAGED_BY, RESOURCE
from mmrouter_operator.model.snapshot import Key

WATCHED = (RESOURCE, *CHILDREN, "Pod")
"""Watched in every cluster; optional children join where their API is served."""


class _Patience:
    """Pauses between kopf's tries of one request, in seconds, without an end: an outage is waited out, however long.

    Not a list on purpose: kopf takes something without a length as endless.
    """

    def __iter__(self) -> Iterator[float]:
        yield from (0.2, 0.5, 1, 2, 5)
        while True:
            yield 10.0


class _NoDiff(kopf.DiffBaseStorage):
    """Remembers nothing and compares nothing: kopf would copy every body of every event for handlers we do not have."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> Any:
        return None

    def store(self, **_: Any) -> None:
        return None


def settings_for(kinds: Sequence[str]) -> kopf.OperatorSettings:
    """Return kopf's settings for watching these kinds."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    # No watches of namespaces and CRDs, and no rights for them.
    settings.scanning.disabled = True
    settings.networking.error_backoffs = _Patience()
    settings.networking.request_timeout = 30.0
    settings.networking.connect_timeout = 5.0
    settings.watching.connect_timeout = 5.0
    # A watch that lives for ever may be silently dead; the server ends it, and bookmarks prove life before that.
    settings.watching.server_timeout = 600
    settings.watching.chunk_size = 500
    settings.queueing.idle_timeout = 0.1
    settings.persistence.diffbase_storage = _NoDiff()
    for kind in kinds:
        if kind != RESOURCE:
            settings.watching.label_selectors[_selector(kind)] = MANAGED_BY
    return settings


def registry_for(
    kinds: Sequence[str],
    cache: Cache,
    changed: Callable[[Key], None],
    audit: Audit,
    login: Callable[[], Awaitable[kopf.ConnectionInfo]],
) -> kopf.OperatorRegistry:
    """Return the handlers. ``changed`` is called for every deployment that looks different.

    ``audit`` is hurried when a watch began anew.
    """
    registry = kopf.OperatorRegistry()

    async def connect(**_: Any) -> kopf.ConnectionInfo:
        return await login()

    kopf.on.login(registry=registry)(connect)
    for kind in kinds:
        fill, watch = _handlers(kind, cache, changed, audit)
        # kopf calls indexes of every listed object first, and events only when all kinds are listed.
        kopf.index(*_selector(kind), id=f"fill-{kind}", registry=registry)(fill)
        kopf.on.event(*_selector(kind), id=f"watch-{kind}", registry=registry)(watch)
    return registry


def _handlers(kind: str, cache: Cache, changed: Callable[[Key], None], audit: Audit) -> tuple[Any, Any]:
    async def fill(body: Mapping[str, Any], **_: Any) -> None:
        for key in cache.put(kind, body):
            changed(key)

    async def watch(event: Mapping[str, Any], **_: Any) -> None:
        if event["type"] == "DELETED":
            metadata = event["object"]["metadata"]
            for key in cache.remove(kind, metadata["uid"], metadata["resourceVersion"]):
                changed(key)
        elif event["type"] is None and audit.filled.is_set():
            # Listed again, not told: the watch broke, and what went away meanwhile is not in the list.
            audit.soon()

    return fill, watch


def _selector(kind: str) -> tuple[str, str] | tuple[str, str, str]:
    found = KINDS[kind]
    if not found.group:
        return found.api_version, found.plural
    return found.group, found.api_version.partition("/")[2], found.plural
