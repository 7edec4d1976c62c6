"""A prepared request and the fleet -> a decision (stages index and schedule of docs/architecture.md)."""

import math
import random
import time
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

from mmrouter_lib.api import MMRouterDeployment, block_size_of
from mmrouter_router.core.types import Exactness, Scope
from mmrouter_router.fleet.admission import is_let_in
from mmrouter_router.fleet.rank_load import Usage
from mmrouter_router.fleet.workers import Fleet, Target, Worker
from mmrouter_router.request.prepare import Prepared
from mmrouter_router.scheduling.candidates import Group
from mmrouter_router.scheduling.pipeline_form import proves
from mmrouter_router.scheduling.scoring import WEIGHTS, Choice, Policy, Table, Weights, choose
from mmrouter_router.telemetry.tracing import Value

Standing = Literal["verified", "degraded", "waiting", "pending", "refused", "unsynced"]
"""What a worker may be used for: with its overlap, without it, only where nobody else is (``waiting`` for its gates,
``pending`` its proof), or not at all."""

WORKERS = frozenset({"worker"})
"""The role of engines that serve a request whole; other roles are placed where a chain of engines asks for them."""
PARTNERS: Final = {"prefill": "decode", "decode": "prefill"}
"""Role -> the role of the engine without which it answers nobody (SGLang)."""


@dataclass
class Decision:
    """A choice, where it leads and how exactly it was made."""

    target: Target
    choice: Choice
    policy: Policy
    exactness: Exactness
    reasons: tuple[str, ...]
    at: float = field(default_factory=time.time)
    keys: "array[int]" = field(default_factory=lambda: array("Q"))  # of the prompt, at the target's block size

    def span_attributes(self) -> dict[str, Value]:
        """Return the decision as attributes of a span. Reasons without their fields, which are the client's words."""
        winner = self.choice.winner
        return {
            "mmrouter.worker": winner.name,
            "mmrouter.pool": winner.pool,
            "mmrouter.policy": self.policy,
            "mmrouter.exactness": self.exactness,
            "mmrouter.causes": sorted({reason.split(":")[0] for reason in self.reasons}),
            "mmrouter.overlap_blocks": winner.overlap,
            "mmrouter.prompt_blocks": winner.blocks,
            "mmrouter.candidates": len(self.choice.candidates),
            "mmrouter.reason": self.choice.reason,
        }


class NoWorkerError(Exception):
    """Nobody can take the request now; the message says what is missing."""


class FullError(NoWorkerError):
    """Those who could take it have as many requests without a first byte as this router lets wait there."""


class Placer:
    """Chooses a worker for a request and keeps count of what this router has in flight."""

    def __init__(
        self,
        deployment: MMRouterDeployment,
        fleet: Fleet,
        weights: Weights = WEIGHTS,
        *,
        changed: Callable[[Worker, int], None] = lambda worker, rank: None,
    ) -> None:
        """``changed`` is told of every rank on which a request of this router begins, is answered or ends."""
        self._changed = changed
        self._fleet = fleet
        self._weights = weights
        encoders = any(pool.role == "encoder" for pool in deployment.spec.pools)
        self._visual = 0.0 if encoders else weights.visual  # where they are, engines encode nothing
        self._policy: Policy = deployment.spec.routing.policy
        self._overlap_weight = float(deployment.spec.routing.overlap_weight)
        self._verification = deployment.spec.verification
        self._max_queued = deployment.spec.routing.max_queued_requests
        self._engine = deployment.spec.engine.type
        self._block_sizes = {pool.name: block_size_of(deployment, pool) for pool in deployment.spec.pools}
        self._turns: Counter[frozenset[str]] = Counter()  # by roles: each choice of a request takes turns of its own
        self._known: dict[tuple[frozenset[str], str | None], tuple[Sequence[Group], float | None]] = {}
        self._version = -1  # of the fleet, when the groups were worked out

    def standing(self, worker: Worker) -> Standing:
        """The table of docs/architecture.md for roles ``worker`` and ``prefill``."""
        if not worker.routable:
            return "unsynced"
        now, seconds = self._fleet.now(), self._verification.timeout_seconds
        if worker.canary == "True" or not proves(worker.member.role):
            if not is_let_in(worker, now, seconds):
                return "waiting"
            # Where nothing can be proved there is nothing to be wrong about, and nothing that it is chosen for.
            return "verified" if worker.canary == "True" else "degraded"
        if worker.canary == "Unknown" and now - worker.since < seconds:
            return "pending"
        if self._verification.on_failure == "Refuse":
            return "refused"
        return "degraded" if is_let_in(worker, now, seconds) else "waiting"

    def block_size(self, worker: Worker) -> int:
        """What the engine says of itself, else what the resource says of its pool."""
        said = worker.beat.block_size if worker.beat else 0
        return said or self._block_sizes.get(worker.member.pool, 0)

    def place(
        self,
        prepared: Prepared,
        *,
        exclude: Collection[str] = (),
        policy: Policy | None = None,
        dry_run: bool = False,
        roles: Collection[str] = WORKERS,
        partner: Worker | None = None,
    ) -> Decision:
        """Choose among the engines of these roles that may serve, pod uids in ``exclude`` left out.

        ``partner``: an engine that the chosen one has to exchange KV blocks with. ``dry_run``: nothing is sent, so the
        queues of engines may be full. Raises :class:`NoWorkerError`.
        """
        kind = frozenset(roles)
        groups = self._groups(exclude, kind, partner)
        if not dry_run:
            groups = [room for group in groups if (room := group.room(self._max_queued)) is not None]
            if not groups:
                raise FullError(f"{self._max_queued} requests wait for a first byte at each engine that could take it")
        policy = policy or self._policy
        if prepared.exactness == "affinity" and policy == "kv":
            policy = "consistentHash"
        keys = [prepared.keys(group.size, group.scope) for group in groups]
        choice = choose(
            Table.joined(
                [
                    group.table(known, len(prepared.ids), prepared.spans, self._visual)
                    for group, known in zip(groups, keys, strict=True)
                ]
            ),
            policy=policy,
            overlap_weight=self._overlap_weight,
            fingerprint=prepared.fingerprint,
            turn=self._turns[kind],
            weights=self._weights,
        )
        if not dry_run:
            self._turns[kind] += 1
        number, place = 0, choice.place
        while place >= len(groups[number].targets):
            place -= len(groups[number].targets)
            number += 1
        chosen = groups[number].targets[place]
        exactness, reasons = prepared.exactness_for(chosen.worker.scope)
        if exactness != "affinity" and not choice.winner.scored:
            exactness, reasons = "affinity", (*reasons, "unverified:worker")
        return Decision(chosen, choice, policy, exactness, reasons, keys=keys[number])

    def begin(self, decision: Decision) -> "Booking":
        """Count a request against the chosen worker until the booking ends."""
        target, winner = decision.target, decision.choice.winner
        usage = self._fleet.usage(target.worker, target.rank)
        hit = winner.overlap + winner.coming if winner.scored else 0
        told = partial(self._changed, target.worker, target.rank)
        return Booking(usage, decision.keys[hit:], winner.encode, float(winner.blocks), told)

    def able(self, worker: Worker) -> bool:
        """Whether a request may go there at all."""
        standing = self.standing(worker)
        return standing not in ("refused", "unsynced") or (standing == "unsynced" and worker.serving)

    def partner(self, worker: Worker) -> Target | None:
        """Return an engine that can answer together with this prefill or decode engine, where there is one.

        Any of the proved ones, else any: one that hangs must not keep all the others from being proved.
        """
        role = PARTNERS[worker.member.role]
        found = [
            Target(other, rank, self.block_size(other))
            for other in self._fleet
            if other.member.role == role
            and other.member.compatibility == worker.member.compatibility
            and other.routable
            for rank in range(other.ranks)
        ]
        proved = [one for one in found if one.worker.canary == "True"]
        return random.choice(proved or found) if found else None

    def _groups(self, exclude: Collection[str], roles: frozenset[str], partner: Worker | None) -> Sequence[Group]:
        """Return who may serve. Raises :class:`NoWorkerError`."""
        if exclude:
            return self._grouped(exclude, roles, partner)[0]
        fleet, who = self._fleet, (roles, None if partner is None else partner.member.compatibility)
        if self._version != fleet.version:
            self._known.clear()
        known = self._known.get(who)
        if known is None or (known[1] is not None and fleet.now() >= known[1]):
            known = self._known[who] = self._grouped((), roles, partner)
            self._version = fleet.version
        return known[0]

    def _grouped(
        self, exclude: Collection[str], roles: Collection[str], partner: Worker | None
    ) -> tuple[Sequence[Group], float | None]:
        """Return the groups of what may serve, and until when this is so if only the clock goes on."""
        usable: list[tuple[Worker, Standing]] = []
        pending: list[tuple[Worker, Standing]] = []
        others: list[tuple[Worker, Standing]] = []
        until = math.inf
        for worker in self._fleet:
            if partner is not None and worker.member.compatibility != partner.member.compatibility:
                continue
            if worker.member.role in roles and worker.member.uid not in exclude:
                standing = self.standing(worker)
                if standing in ("verified", "degraded"):
                    usable.append((worker, standing))
                elif standing in ("waiting", "pending") or (standing == "unsynced" and worker.serving):
                    # An engine whose sidecar is away still answers: better without overlap than not at all.
                    pending.append((worker, standing))
                else:
                    others.append((worker, standing))
                if standing in ("waiting", "pending"):
                    until = min(until, worker.since + self._verification.timeout_seconds)
        rows: dict[tuple[int, Scope | None], list[tuple[Target, bool]]] = {}
        for worker, standing in usable or pending:
            size = self.block_size(worker)
            if size > 0:
                group = rows.setdefault((size, worker.scope), [])
                proved = standing != "unsynced" and worker.canary == "True"
                group += [(Target(worker, rank, size), proved) for rank in range(worker.ranks)]
        if not rows:
            found = ", ".join(f"{w.member.name} {s}" for w, s in (*usable, *pending, *others)) or "no worker is known"
            raise NoWorkerError(f"no worker can take the request ({found})")
        groups = [Group.of(self._fleet, *shared, group) for shared, group in rows.items()]
        return groups, None if math.isinf(until) else until


class Booking:
    """What one request occupies on its worker; ``answered`` and ``end`` may be called any number of times."""

    def __init__(
        self, usage: Usage, fresh: "array[int]", encode: float, active: float, changed: Callable[[], None]
    ) -> None:
        """``fresh``: keys of the blocks that the worker has to compute for it; the others in blocks.

        ``changed`` is called when the usage is not what it was.
        """
        self._usage, self._fresh, self._encode, self._active = usage, fresh, encode, active
        self._changed = changed
        usage.begin(fresh, encode, active)
        self._open = self._waits = True
        changed()

    def answered(self) -> None:
        """The first byte came, or another engine has computed the prompt: nothing is left to prefill."""
        if self._waits:
            self._waits = False
            self._usage.answered()
        if self._fresh or self._encode:
            self._usage.computed(self._fresh, self._encode)
            self._fresh, self._encode = self._fresh[:0], 0.0
            self._changed()

    def end(self) -> None:
        """The request is over."""
        if self._open:
            self._open = False
            self.answered()
            self._usage.end(self._active)
            self._changed()
