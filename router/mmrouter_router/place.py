"""A prepared request and the fleet -> a decision (stages index and schedule of docs/architecture.md)."""

import random
import time
from array import array
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from mmrouter.api import MMRouterDeployment, block_size_of
from mmrouter.blocks import Span
from mmrouter_router.chain import proves
from mmrouter_router.fleet import Fleet, Target, Usage, Worker
from mmrouter_router.prepare import Prepared
from mmrouter_router.schedule import WEIGHTS, Candidate, Choice, Exactness, Policy, Weights, choose
from mmrouter_router.sentinels import Scope

Standing = Literal["verified", "degraded", "pending", "refused", "unsynced"]
"""What a worker may be used for: with its overlap, without it, only where nobody else is, or not at all."""

WORKERS = frozenset({"worker"})
"""The role of engines that serve a request whole; other roles are placed where a chain of engines asks for them."""
PARTNERS: Final = {"prefill": "decode", "decode": "prefill"}
"""Role -> the role of the engine without which it answers nobody (SGLang)."""
_IDLE = Usage()


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


class NoWorkerError(Exception):
    """Nobody can take the request now; the message says what is missing."""


class FullError(NoWorkerError):
    """Those who could take it have as many requests without a first byte as this router lets wait there."""


class Placer:
    """Chooses a worker for a request and keeps count of what this router has in flight."""

    def __init__(self, deployment: MMRouterDeployment, fleet: Fleet, weights: Weights = WEIGHTS) -> None:
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

    def standing(self, worker: Worker) -> Standing:
        """The table of docs/architecture.md for roles ``worker`` and ``prefill``."""
        if not worker.routable:
            return "unsynced"
        if worker.canary == "True":
            return "verified"
        if not proves(worker.member.role):
            return "degraded"  # there is nothing that it could be wrong about, and nothing that it is chosen for
        waited = self._fleet.now() - worker.since
        if worker.canary == "Unknown" and waited < self._verification.timeout_seconds:
            return "pending"
        return "degraded" if self._verification.on_failure == "Degrade" else "refused"

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
        queued = None if dry_run else self._max_queued
        targets, kind = self._targets(exclude, roles, partner, queued), frozenset(roles)
        policy = policy or self._policy
        if prepared.exactness == "affinity" and policy == "kv":
            policy = "consistentHash"
        rows: list[Candidate] = []
        known: dict[tuple[int, Scope | None], array[int]] = {}
        for (size, scope), group in targets.items():
            keys = known[size, scope] = prepared.keys(size, scope)
            overlap = self._fleet.overlap(keys, len(prepared.ids), [target for target, _ in group])
            rows += self._candidates(group, overlap, keys, prepared.spans)
        choice = choose(
            rows,
            policy=policy,
            overlap_weight=self._overlap_weight,
            fingerprint=prepared.fingerprint,
            turn=self._turns[kind],
            weights=self._weights,
        )
        if not dry_run:
            self._turns[kind] += 1
        ordered = (target for group in targets.values() for target, _ in group)
        chosen = next(target for target, row in zip(ordered, rows, strict=True) if row is choice.winner)
        exactness, reasons = prepared.exactness_for(chosen.worker.scope)
        if exactness != "affinity" and not choice.winner.scored:
            exactness, reasons = "affinity", (*reasons, "unverified:worker")
        keys = known[chosen.block_size, chosen.worker.scope]
        return Decision(chosen, choice, policy, exactness, reasons, keys=keys)

    def begin(self, decision: Decision) -> "Booking":
        """Count a request against the chosen worker until the booking ends."""
        target, winner = decision.target, decision.choice.winner
        usage = target.worker.usage.setdefault(target.rank, Usage())
        hit = winner.overlap + winner.coming if winner.scored else 0
        return Booking(usage, decision.keys[hit:], winner.encode, float(winner.blocks))

    def able(self, worker: Worker) -> bool:
        """Whether a request may go there at all."""
        standing = self.standing(worker)
        return standing in ("verified", "degraded", "pending") or (standing == "unsynced" and worker.serving)

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

    def _targets(
        self, exclude: Collection[str], roles: Collection[str], partner: Worker | None, max_queued: int | None
    ) -> dict[tuple[int, Scope | None], list[tuple[Target, Standing]]]:
        """Return (block size, scope) -> what may serve at it; one pass, because it is once per request and worker.

        ``max_queued``: requests that may wait at one rank, if that is of interest.
        """
        usable: list[tuple[Worker, Standing]] = []
        pending: list[tuple[Worker, Standing]] = []
        others: list[tuple[Worker, Standing]] = []
        for worker in self._fleet:
            if partner is not None and worker.member.compatibility != partner.member.compatibility:
                continue
            if worker.member.role in roles and worker.member.uid not in exclude:
                standing = self.standing(worker)
                if standing in ("verified", "degraded"):
                    usable.append((worker, standing))
                elif standing == "pending" or (standing == "unsynced" and worker.serving):
                    # An engine whose sidecar is away still answers: better without overlap than not at all.
                    pending.append((worker, standing))
                else:
                    others.append((worker, standing))
        targets: dict[tuple[int, Scope | None], list[tuple[Target, Standing]]] = {}
        full = 0
        for worker, standing in usable or pending:
            size = self.block_size(worker)
            if size > 0:
                for rank in range(worker.ranks):
                    if max_queued is not None and worker.usage.get(rank, _IDLE).unanswered >= max_queued:
                        full += 1
                    else:
                        group = targets.setdefault((size, worker.scope), [])
                        group.append((Target(worker, rank, size), standing))
        if full and not targets:
            raise FullError(f"{max_queued} requests wait for a first byte at each engine that could take it")
        if not targets:
            found = ", ".join(f"{w.member.name} {s}" for w, s in (*usable, *pending, *others)) or "no worker is known"
            raise NoWorkerError(f"no worker can take the request ({found})")
        return targets

    def _candidates(
        self,
        group: Sequence[tuple[Target, Standing]],
        overlaps: dict[int, int],
        keys: "array[int]",
        spans: Sequence[Span],
    ) -> list[Candidate]:
        """Return a row per target of one block size; one loop with few calls, because it grows with the fleet."""
        rows: list[Candidate] = []
        blocks, held, visual = len(keys), self._fleet.index.held, self._visual if spans else 0.0
        for (worker, rank, size), standing in group:
            slot, member, scored = worker.slots.get(rank), worker.member, standing == "verified"
            usage, beat = worker.usage.get(rank, _IDLE), worker.beat
            overlap = overlaps.get(slot, 0) if slot is not None else 0
            hit, promised = overlap if scored else 0, usage.promised
            if promised and scored:
                while hit < blocks and keys[hit] in promised:
                    hit += 1
            row = Candidate(  # in the order of its fields: naming them takes longer
                f"{beat.worker if beat else member.uid}#{rank}",
                member.name,
                member.pool,
                overlap,
                blocks,
                len(promised) + usage.encode,
                usage.active,
                worker.waiting.get(rank, 0.0) * blocks if worker.waiting else 0.0,
                held(slot) if slot is not None else 0,
                scored,
                hit - overlap if scored else 0,
                visual * _to_encode(spans, hit * size) / size if visual else 0.0,
            )
            rows.append(row)
        return rows


def _to_encode(spans: Sequence[Span], hit: int) -> int:
    """Return the visual tokens of images that do not end within the first ``hit`` tokens: one is encoded whole."""
    return sum([span.length for span in spans if span.offset + span.length > hit])


class Booking:
    """What one request occupies on its worker; ``answered`` and ``end`` may be called any number of times."""

    def __init__(self, usage: Usage, fresh: "array[int]", encode: float, active: float) -> None:
        """``fresh``: keys of the blocks that the worker has to compute for it; the others in blocks."""
        self._usage, self._fresh, self._encode, self._active = usage, fresh, encode, active
        usage.requests += 1
        usage.unanswered += 1
        usage.promised.update(fresh)
        usage.encode += encode
        usage.active += active
        self._open = self._waits = True

    def answered(self) -> None:
        """The first byte came, or another engine has computed the prompt: nothing is left to prefill."""
        if self._waits:
            self._waits = False
            self._usage.unanswered -= 1
        if self._fresh or self._encode:
            self._usage.promised.difference_update(self._fresh)
            self._usage.encode -= self._encode
            self._fresh, self._encode = self._fresh[:0], 0.0

    def end(self) -> None:
        """The request is over."""
        if self._open:
            self._open = False
            self.answered()
            self._usage.requests -= 1
            self._usage.active -= self._active
            if not self._usage.requests:
                self._usage.encode = 0.0  # sums of fractions do not end at 0 by themselves
