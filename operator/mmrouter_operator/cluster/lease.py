"""Leader election by a Lease, and for how long this process surely holds it.

Clocks of different machines are never compared. Another replica's lease counts as expired when its record has not
changed for its duration *on our clock*; our own is valid from before the renewal was sent. So a holder stops writing
``duration - deadline`` seconds before another replica may take over, whatever its clock says and however long it was
suspended.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from mmrouter_operator.cluster.client import AlreadyExists, ApiError, Conflict, KubernetesCluster, NotFound, Object
from mmrouter_operator.cluster.operator_kinds import KINDS
from mmrouter_operator.model.kinds import Ref

log = logging.getLogger(__name__)


def boot_time() -> float:
    """Return seconds of a clock that is never set and does not stop while the machine is suspended."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


@dataclass(frozen=True, slots=True)
class LeaseTiming:
    """Seconds. A holder renews every ``retry``, writes for ``deadline`` after a renewal, and loses after ``duration``.

    Raises ``ValueError`` if a holder could write while another replica takes over.
    """

    duration: float = 15.0
    deadline: float = 10.0
    retry: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.retry < self.deadline < self.duration:
            raise ValueError("a lease needs retry < deadline < duration")
        if self.duration != int(self.duration):
            raise ValueError("a lease lasts whole seconds")


@dataclass(slots=True)
class Observed:
    """The record of the Lease, and since when this process has observed it unchanged."""

    record: tuple[str, str]
    """Holder and resource version."""
    duration: float
    since: float


class LeaderElection:
    """Acquires and renews the lease ``name`` in ``namespace``."""

    def __init__(
        self,
        cluster: KubernetesCluster,
        *,
        namespace: str,
        name: str,
        identity: str,
        timing: LeaseTiming,
        clock: Callable[[], float] = boot_time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._cluster = cluster
        self._ref = Ref(KINDS["Lease"].api, "Lease", namespace, name)
        self._identity = identity
        self._timing = timing
        self._clock = clock
        self._sleep = sleep
        self._observed: Observed | None = None
        self._valid_until = float("-inf")
        self._stopping = False
        self._held: Object | None = None
        """The Lease as our last write left it, so that a renewal needs no read."""

    def left(self) -> float:
        """Seconds for which the lease is surely ours; not more than 0 when it is not."""
        return self._valid_until - self._clock()

    def valid(self) -> bool:
        return self.left() > 0

    async def run(self, *, gained: Callable[[], None], lost: Callable[[], None]) -> None:
        """Acquire the lease and renew it until cancelled; calls ``gained`` and ``lost`` at every change."""
        leading = False
        while True:
            if not self._stopping:
                await self.attempt()
            if self.valid() != leading:
                leading = not leading
                log.info("%s the lease %s/%s", "took" if leading else "lost", self._ref.namespace, self._ref.name)
                (gained if leading else lost)()
            # A holder that cannot renew wakes up when its lease runs out, to stop its work at once.
            await self._sleep(min(self._timing.retry, max(self.left(), 0.05)) if leading else self._timing.retry)

    async def release(self) -> None:
        """Stop writing and let another replica take over at once. Best effort: otherwise the lease expires."""
        self._stopping = True
        self._valid_until = float("-inf")
        # One that was not renewed in time is released too: others wait for its whole duration.
        if self._observed is None or self._observed.record[0] != self._identity:
            return
        try:
            try:
                await self._give_up()
            except Conflict:  # a renewal that was under way came between
                await self._give_up()
        except ApiError as error:
            log.warning("the lease was not released: %s", error)

    async def _give_up(self) -> None:
        lease = await self._cluster.get(self._ref)
        if lease and lease["spec"].get("holderIdentity") == self._identity:
            # The API requires a positive duration.
            lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _timestamp()}
            await self._cluster.replace(lease)

    async def attempt(self) -> None:
        started = self._clock()
        try:
            async with asyncio.timeout(self._timing.deadline):
                held = await self._take()
        except (AlreadyExists, Conflict, NotFound):
            self._held = None
            return
        except (ApiError, TimeoutError) as error:
            self._held = None
            log.warning("the lease could not be read or renewed: %s", error or "no answer")
            return
        if held and not self._stopping:
            self._valid_until = started + self._timing.deadline
        elif not held:
            self._valid_until = float("-inf")

    async def _take(self) -> bool:
        if self._held is not None and self.valid():
            try:
                return await self._write(self._held)
            except Conflict:
                self._held = None
        lease = await self._cluster.get(self._ref)
        if lease is None:
            created = {
                "apiVersion": self._ref.api,
                "kind": "Lease",
                "metadata": {"name": self._ref.name, "namespace": self._ref.namespace},
                "spec": self._spec({}),
            }
            self._held = await self._cluster.create(created)
            self._observe(self._held)
            return True
        observed = self._observe(lease)
        # Free to take: without a holder, its own, or not renewed for its duration.
        if observed.record[0] not in ("", self._identity) and self._clock() < observed.since + observed.duration:
            return False
        return await self._write(lease)

    async def _write(self, lease: Object) -> bool:
        written = await self._cluster.replace({**lease, "spec": self._spec(lease.get("spec") or {})})
        self._held = written
        self._observe(written)
        return True

    def _observe(self, lease: dict[str, Any]) -> Observed:
        spec = lease.get("spec") or {}
        record = (spec.get("holderIdentity") or "", lease["metadata"].get("resourceVersion", ""))
        if self._observed is None or self._observed.record != record:
            duration = float(spec.get("leaseDurationSeconds") or self._timing.duration)
            self._observed = Observed(record, duration, self._clock())
        return self._observed

    def _spec(self, before: dict[str, Any]) -> dict[str, Any]:
        now = _timestamp()
        same = before.get("holderIdentity") == self._identity
        transitions = int(before.get("leaseTransitions") or 0)
        return before | {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(self._timing.duration),
            "acquireTime": before.get("acquireTime") or now if same else now,
            "renewTime": now,
            "leaseTransitions": transitions if same or not before.get("holderIdentity") else transitions + 1,
        }


def _timestamp() -> str:
    # For display only; never compared.
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
