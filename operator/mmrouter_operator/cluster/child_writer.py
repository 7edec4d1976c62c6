"""Writes the children of one deployment: only what changed, in order, and no object of another owner."""

import asyncio
import logging
from collections.abc import Awaitable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmrouter_operator.cluster.cache import WatchCache, content_of
from mmrouter_operator.cluster.client import ApiError, KubernetesCluster, Refused
from mmrouter_operator.cluster.lease import boot_time
from mmrouter_operator.metrics import Metrics
from mmrouter_operator.model.kinds import DEPLOYMENT_LABEL, Ref
from mmrouter_operator.model.snapshot import CHILD_CONTESTED, CHILD_NAME_TAKEN, CHILD_REFUSED, ChildView, Key, Problem
from mmrouter_operator.render import CHILD_KINDS

log = logging.getLogger(__name__)

_BEFORE_PODS = frozenset(name for name, kind in CHILD_KINDS.items() if kind.guard == "creation")
"""Kinds without which no new pod may be created."""
_BEFORE_REMOVAL = frozenset(name for name, kind in CHILD_KINDS.items() if kind.guard != "none")
"""Kinds that must be written before the children that they replace are deleted."""

REFUSED_FOR = 60.0
"""Seconds for which the same refused manifest is not sent again."""
CONTESTED_SECONDS = 120.0
"""Seconds without drift after which a child is no longer contested."""
IMMEDIATE_REPAIRS = 10
LONGEST_PAUSE = 60.0


@dataclass(slots=True)
class _Applied:
    """The last write of a child by this process. ``content`` is the live object's digest after it."""

    wanted: str
    content: str = ""
    refusal: str = ""
    refused_at: float = 0.0
    repairs: int = 0
    repaired_at: float = float("-inf")

    def pause(self, now: float) -> float:
        """Seconds until a contested child is repaired again; the first repairs are immediate."""
        beyond = self.repairs - IMMEDIATE_REPAIRS
        return max(0.0, self.repaired_at + min(LONGEST_PAUSE, 2.0**beyond) - now) if beyond >= 0 else 0.0

    def contested_for(self, now: float) -> float:
        """Seconds for which the child still counts as contested; 0 if it does not.

        A repair does not end the contest: the other writer is still there.
        """
        return max(0.0, self.repaired_at + CONTESTED_SECONDS - now) if self.repairs >= IMMEDIATE_REPAIRS else 0.0


@dataclass(slots=True)
class WriteResult:
    """The result of writing children. ``again_in``: seconds until a postponed write is due.

    ``progressed``: a child was created or changed, repairs of drift excluded.
    """

    problems: list[Problem] = field(default_factory=list)
    repaired: list[Ref] = field(default_factory=list)
    again_in: float | None = None
    failures: list[tuple[Ref, ApiError]] = field(default_factory=list)
    progressed: bool = False

    def lacks(self, kinds: Container[str]) -> bool:
        """Whether a child of one of these kinds could not be written. A contested one exists."""
        return any(problem.kind in kinds and problem.reason != CHILD_CONTESTED for problem in self.problems)

    @property
    def may_prune(self) -> bool:
        """Whether everything that pods need is written, so that what it replaces may be deleted."""
        return not self.failures and not self.lacks(_BEFORE_REMOVAL)

    def retry_in(self, seconds: float) -> None:
        self.again_in = seconds if self.again_in is None else min(self.again_in, seconds)


class ChildWriter:
    """Applies children, and remembers by deployment what was applied: an unchanged child is not sent again."""

    def __init__(self, cluster: KubernetesCluster, cache: WatchCache, metrics: Metrics) -> None:
        self._cluster = cluster
        self._cache = cache
        self._metrics = metrics
        self._applied: dict[Key, dict[tuple[str, str], _Applied]] = {}

    def forget(self, key: Key) -> None:
        self._applied.pop(key, None)

    async def write(self, key: Key, owner: str, manifests: Sequence[dict[str, Any]], result: WriteResult) -> None:
        """Apply what changed; ``owner`` is the resource's uid.

        Failures are in the result; later waves are not written after one. A Deployment that does not exist yet is not
        created either while the policies or accounts of its pods are refused.
        """
        waves: dict[int, list[dict[str, Any]]] = {}
        for manifest in manifests:
            waves.setdefault(CHILD_KINDS[manifest["kind"]].wave, []).append(manifest)
        for _, wave in sorted(waves.items()):
            sent = wave
            if result.lacks(_BEFORE_PODS):
                live = self._cache.children(key)
                sent = [m for m in wave if m["kind"] != "Deployment" or ("Deployment", m["metadata"]["name"]) in live]
            await _run_all(self._write_one(key, owner, manifest, result) for manifest in sent)
            if result.failures:
                break

    async def prune(self, key: Key, surplus: Mapping[Ref, str], result: WriteResult) -> None:
        """Delete children that are no longer rendered, each by its uid."""

        async def delete(ref: Ref, uid: str) -> None:
            try:
                await self._cluster.delete(ref, uid)
            except ApiError as error:
                self._metrics.applies.labels(ref.kind, type(error).__name__).inc()
                result.failures.append((ref, error))
                return
            self._metrics.applies.labels(ref.kind, "deleted").inc()
            self._applied.get(key, {}).pop((ref.kind, ref.name), None)

        await _run_all(delete(ref, uid) for ref, uid in surplus.items())

    async def _write_one(self, key: Key, owner: str, manifest: dict[str, Any], result: WriteResult) -> None:
        ref = Ref.of(manifest)
        place = (ref.kind, ref.name)
        seen = self._cache.children(key).get(place)
        before = self._cache.content(key, *place)
        wanted = content_of(manifest)
        now = boot_time()
        last = self._applied.setdefault(key, {}).get(place)
        if last is not None and last.wanted == wanted:
            if last.refusal and now < last.refused_at + REFUSED_FOR:
                result.problems.append(Problem(CHILD_REFUSED, *place, last.refusal))
                result.retry_in(last.refused_at + REFUSED_FOR - now)
                return
            if before and before == last.content:
                _report_contested(ref, last, now, result)
                return
            if (pause := last.pause(now)) > 0:
                _report_contested(ref, last, now, result)
                result.retry_in(pause)
                return
        try:
            live = await self._cluster.get(ref) if seen is None else None
        except ApiError as error:
            result.failures.append((ref, error))
            return
        is_foreign = seen is not None and seen.owner not in ("", owner)
        if is_foreign or (live is not None and belongs_to_other(live, owner)):
            message = f"{ref.kind} {ref.name} exists and is not this resource's"
            result.problems.append(Problem(CHILD_NAME_TAKEN, *place, message))
            result.retry_in(REFUSED_FOR)
            return
        if seen is not None and CHILD_KINDS[ref.kind].fixed:
            return
        done = _Applied(wanted)
        if last is not None and now < last.repaired_at + CONTESTED_SECONDS:
            done.repairs, done.repaired_at = last.repairs, last.repaired_at
        try:
            live = await self._send(manifest, seen)
        except Refused as error:
            self._metrics.applies.labels(ref.kind, "Refused").inc()
            done.refusal, done.refused_at = f"{ref.kind} {ref.name}: {error}", now
            self._applied[key][place] = done
            result.problems.append(Problem(CHILD_REFUSED, *place, done.refusal))
            result.retry_in(REFUSED_FOR)
            return
        except ApiError as error:
            self._metrics.applies.labels(ref.kind, type(error).__name__).inc()
            result.failures.append((ref, error))
            return
        self._metrics.applies.labels(ref.kind, "applied").inc()
        done.content = content_of(live)
        if last is not None and last.wanted == wanted and not last.refusal and done.content != before:
            # The manifest is the same as before, so another writer changed or deleted the object.
            self._metrics.drift.labels(ref.kind).inc()
            result.repaired.append(ref)
            done.repairs += 1
            done.repaired_at = now
            log.info(
                "drift repaired", extra={"namespace": key[0], "object": key[1], "kind": ref.kind, "child": ref.name}
            )
        else:
            result.progressed |= done.content != before
        _report_contested(ref, done, now, result)
        self._applied[key][place] = done
        self._cache.put(ref.kind, live)

    async def _send(self, manifest: dict[str, Any], seen: ChildView | None) -> dict[str, Any]:
        try:
            return await self._cluster.apply(manifest)
        except Refused as error:
            if seen is None or error.status != 422:
                raise
        # Apply keeps list items of other managers beside ours, and together they may be invalid (two equal port names,
        # for example). A merge replaces the whole list, and the apply after it takes ownership again.
        await self._cluster.merge(manifest)
        return await self._cluster.apply(manifest)


def _report_contested(ref: Ref, last: _Applied, now: float, result: WriteResult) -> None:
    if (left := last.contested_for(now)) > 0:
        message = (
            f"{ref.kind} {ref.name} was changed by others {last.repairs} times and is taken back with growing pauses"
        )
        result.problems.append(Problem(CHILD_CONTESTED, ref.kind, ref.name, message))
        result.retry_in(left)


def belongs_to_other(live: Mapping[str, Any], owner: str) -> bool:
    """Whether a live object has another owner than the resource with the uid ``owner``.

    An object without a controller is ours if it has our label: its owner reference was removed, or it was orphaned.
    """
    metadata = live["metadata"]
    controllers = [item["uid"] for item in metadata.get("ownerReferences") or [] if item.get("controller")]
    if controllers:
        return owner not in controllers
    return DEPLOYMENT_LABEL not in (metadata.get("labels") or {})


async def _run_all(calls: Iterable[Awaitable[None]]) -> None:
    """Await all, also after a failure; then raise the first one."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
