"""Writes the children of one deployment: what changed, in order, and nothing that is somebody else's."""

import asyncio
import logging
from collections.abc import Awaitable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmrouter_operator.boot_clock import boot_time
from mmrouter_operator.cluster.cache import Cache, content_of
from mmrouter_operator.cluster.client import ApiError, Cluster, Refused
from mmrouter_operator.metrics import Metrics
from mmrouter_operator.model.problems import CHILD_CONTESTED, CHILD_NAME_TAKEN, CHILD_REFUSED, Problem
from mmrouter_operator.model.refs import Ref
from mmrouter_operator.model.snapshot import ChildView, Key
from mmrouter_operator.render.common import DEPLOYMENT_LABEL

log = logging.getLogger(__name__)

_WAVES: Mapping[str, int] = {
    "ControllerRevision": 0,
    "ServiceAccount": 1,
    "Role": 1,
    "ConfigMap": 1,
    "Secret": 1,
    "Service": 1,
    "NetworkPolicy": 1,
    "PodDisruptionBudget": 1,
    "RoleBinding": 2,
    "Deployment": 3,
}
"""What must be there before what: renderings are kept before they are used, pods find what they mount; others last."""
_LAST_WAVE = 4

_GUARDS = frozenset({"ServiceAccount", "NetworkPolicy"})
"""Kinds without which no new pod is made: it would run open, or under an account that somebody else gave rights to."""
_GIVEN_TO_PODS = _GUARDS | {"ControllerRevision", "ConfigMap", "Secret", "Service", "Role", "RoleBinding", "Deployment"}
"""Kinds that have to be written before what they replace may go."""

REFUSED_FOR = 60.0
"""Seconds for which the same refused manifest is not sent again."""
PATIENCE = 120.0
"""Seconds without drift after which a child is no longer contested."""
IMMEDIATE_REPAIRS = 10
LONGEST_PAUSE = 60.0


@dataclass(slots=True)
class _Applied:
    """What this process last did to a child. ``content`` is the live object's digest after it."""

    wanted: str
    content: str = ""
    refusal: str = ""
    refused_at: float = 0.0
    repairs: int = 0
    repaired_at: float = float("-inf")

    def pause(self, now: float) -> float:
        """Seconds to leave a contested child alone; the first repairs are immediate."""
        beyond = self.repairs - IMMEDIATE_REPAIRS
        return max(0.0, self.repaired_at + min(LONGEST_PAUSE, 2.0**beyond) - now) if beyond >= 0 else 0.0

    def contested_for(self, now: float) -> float:
        """Seconds for which the child still counts as contested, 0 for one that does not.

        The repairs themselves do not end it: the other writer is not gone because its last write was taken back.
        """
        return max(0.0, self.repaired_at + PATIENCE - now) if self.repairs >= IMMEDIATE_REPAIRS else 0.0


@dataclass(slots=True)
class Written:
    """What came of it. ``again_in``: seconds until something that was put off is due.

    ``progressed``: something is there now, or as it should be, that was not before, and not because somebody undid it.
    """

    problems: list[Problem]
    repaired: list[Ref]
    created: list[Ref]
    again_in: float | None = None
    failures: list[tuple[Ref, ApiError]] = field(default_factory=list)
    progressed: bool = False

    def lacks(self, kinds: Container[str]) -> bool:
        """Whether a child of one of these kinds could not be written. A contested one is there."""
        return any(problem.kind in kinds and problem.reason != CHILD_CONTESTED for problem in self.problems)

    @property
    def replaced(self) -> bool:
        """Whether everything that pods need is written, so that what it replaces may be deleted."""
        return not self.failures and not self.lacks(_GIVEN_TO_PODS)

    def later(self, seconds: float) -> None:
        """Come back in so many seconds, or earlier."""
        self.again_in = seconds if self.again_in is None else min(self.again_in, seconds)


class Children:
    """Remembers, by deployment, what was applied, so that what did not change is not sent."""

    def __init__(self, cluster: Cluster, cache: Cache, metrics: Metrics) -> None:
        self._cluster = cluster
        self._cache = cache
        self._metrics = metrics
        self._applied: dict[Key, dict[tuple[str, str], _Applied]] = {}

    def forget(self, key: Key) -> None:
        """A deployment is gone."""
        self._applied.pop(key, None)

    async def write(self, key: Key, owner: str, manifests: Sequence[dict[str, Any]]) -> Written:
        """Apply what changed; ``owner`` is the resource's uid.

        What fails and may pass by itself is in the result; what builds on it is not tried then. A Deployment that does
        not exist yet waits for the policies and accounts of its pods also where these are refused.
        """
        written = Written([], [], [])
        waves: dict[int, list[dict[str, Any]]] = {}
        for manifest in manifests:
            waves.setdefault(_WAVES.get(manifest["kind"], _LAST_WAVE), []).append(manifest)
        for _, wave in sorted(waves.items()):
            sent = wave
            if written.lacks(_GUARDS):
                there = self._cache.children(key)
                sent = [m for m in wave if m["kind"] != "Deployment" or ("Deployment", m["metadata"]["name"]) in there]
            await _together(self._one(key, owner, manifest, written) for manifest in sent)
            if written.failures:
                break
        return written

    async def prune(self, key: Key, doomed: Mapping[Ref, str], written: Written) -> None:
        """Delete children that are rendered no more, each of exactly this uid."""

        async def delete(ref: Ref, uid: str) -> None:
            try:
                await self._cluster.delete(ref, uid)
            except ApiError as error:
                self._metrics.applied(ref.kind, type(error).__name__)
                written.failures.append((ref, error))
                return
            self._metrics.applied(ref.kind, "deleted")
            self._applied.get(key, {}).pop((ref.kind, ref.name), None)

        await _together(delete(ref, uid) for ref, uid in doomed.items())

    async def _one(self, key: Key, owner: str, manifest: dict[str, Any], written: Written) -> None:
        ref = Ref.of(manifest)
        place = (ref.kind, ref.name)
        seen = self._cache.children(key).get(place)
        before = self._cache.content(key, *place)
        wanted = content_of(manifest)
        now = boot_time()
        last = self._applied.setdefault(key, {}).get(place)
        if last is not None and last.wanted == wanted:
            if last.refusal and now < last.refused_at + REFUSED_FOR:
                written.problems.append(Problem(CHILD_REFUSED, *place, last.refusal))
                written.later(last.refused_at + REFUSED_FOR - now)
                return
            if before and before == last.content:
                _tell_contested(ref, last, now, written)
                return
            if (pause := last.pause(now)) > 0:
                _tell_contested(ref, last, now, written)
                written.later(pause)
                return
        try:
            is_taken = await self._taken(ref, owner, seen)
        except ApiError as error:
            written.failures.append((ref, error))
            return
        if is_taken:
            message = f"{ref.kind} {ref.name} exists and is not this resource's"
            written.problems.append(Problem(CHILD_NAME_TAKEN, *place, message))
            written.later(REFUSED_FOR)
            return
        done = _Applied(wanted)
        if last is not None and now < last.repaired_at + PATIENCE:
            done.repairs, done.repaired_at = last.repairs, last.repaired_at
        try:
            live = await self._send(manifest, seen)
        except Refused as error:
            self._metrics.applied(ref.kind, "Refused")
            done.refusal, done.refused_at = f"{ref.kind} {ref.name}: {error}", now
            self._applied[key][place] = done
            written.problems.append(Problem(CHILD_REFUSED, *place, done.refusal))
            written.later(REFUSED_FOR)
            return
        except ApiError as error:
            self._metrics.applied(ref.kind, type(error).__name__)
            written.failures.append((ref, error))
            return
        self._metrics.applied(ref.kind, "applied")
        done.content = content_of(live)
        if last is not None and last.wanted == wanted and not last.refusal and done.content != before:
            # Nothing was asked for that was not there before: somebody had changed or deleted it.
            self._metrics.drift_repaired(ref.kind)
            written.repaired.append(ref)
            done.repairs += 1
            done.repaired_at = now
            log.info("taken back", extra={"namespace": key[0], "object": key[1], "kind": ref.kind, "child": ref.name})
        else:
            written.progressed |= done.content != before
            if seen is None:
                written.created.append(ref)
        _tell_contested(ref, done, now, written)
        self._applied[key][place] = done
        self._cache.put(ref.kind, live)

    async def _send(self, manifest: dict[str, Any], seen: ChildView | None) -> dict[str, Any]:
        try:
            return await self._cluster.apply(manifest)
        except Refused as error:
            if seen is None or error.status != 422:
                raise
        # Apply leaves what others put into a list beside ours, and both together may be invalid: the same port name
        # twice, for one. A merge takes the whole list back; after it, applying is valid if anything is.
        await self._cluster.merge(manifest)
        return await self._cluster.apply(manifest)

    async def _taken(self, ref: Ref, owner: str, seen: ChildView | None) -> bool:
        """Whether the object is controlled by somebody else, or by nobody and without our labels."""
        if seen is not None:
            return seen.owner not in ("", owner)
        live = await self._cluster.get(ref)
        if live is None:
            return False
        return taken(live, owner)


def _tell_contested(ref: Ref, last: _Applied, now: float, written: Written) -> None:
    if (left := last.contested_for(now)) > 0:
        said = f"{ref.kind} {ref.name} was changed by others {last.repairs} times and is taken back with growing pauses"
        written.problems.append(Problem(CHILD_CONTESTED, ref.kind, ref.name, said))
        written.later(left)


def taken(live: Mapping[str, Any], owner: str) -> bool:
    """Whether a live object belongs to somebody else than the resource ``owner``.

    One without a controller is ours if it bears our label: somebody took the reference off, or orphaned it.
    """
    metadata = live["metadata"]
    controllers = [item["uid"] for item in metadata.get("ownerReferences") or [] if item.get("controller")]
    if controllers:
        return owner not in controllers
    return DEPLOYMENT_LABEL not in (metadata.get("labels") or {})


async def _together(calls: Iterable[Awaitable[None]]) -> None:
    """Await all, whatever comes of each; then raise the first failure."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
