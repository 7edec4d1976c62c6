"""Place a prepared request on a worker, and book what it occupies there (docs/architecture.md)."""

import math
import random
import time
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from mmrouter_lib.api import MMRouterDeployment, block_size_of
from mmrouter_lib.engines import ADAPTERS
from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_router.fleet.rank_load import RankUsage
from mmrouter_router.fleet.workers import Fleet, Target, Worker
from mmrouter_router.intake.field_check import Exactness
from mmrouter_router.request.prepared import Prepared
from mmrouter_router.scheduling.candidate_columns import CandidateGroup, CandidateRow
from mmrouter_router.scheduling.candidates import CandidateGroups, Eligibility, NoWorkerError, Standing
from mmrouter_router.scheduling.disaggregation import canary_applies
from mmrouter_router.scheduling.scoring import WEIGHTS, CandidateTable, Choice, Policy, choose
from mmrouter_router.telemetry.tracing import Value

ANSWERING: Final = frozenset({"worker", "prefill", "decode"})  # each of them serves a route without stages
WORKERS = frozenset({"worker"})  # serve a request whole; other roles are placed for pipeline forms with stages
PARTNERS: Final = {"prefill": "decode", "decode": "prefill"}  # role -> the role of the other engine of a pair (SGLang)


@dataclass
class Decision:
    """A choice with its target and exactness."""

    target: Target
    choice: Choice
    policy: Policy
    exactness: Exactness
    reasons: tuple[str, ...]
    at: float = field(default_factory=time.time)
    fresh: "array[int]" = field(default_factory=lambda: array("Q"))  # keys of the blocks that the target computes

    def span_attributes(self) -> dict[str, Value]:
        """Return the attributes of a span. Reasons are cut to their causes, because the rest is the client's text."""
        winner = self.choice.winner
        return {
            "mmrouter.worker": winner.name,
            "mmrouter.pool": winner.pool,
            "mmrouter.policy": self.policy,
            "mmrouter.exactness": self.exactness,
            "mmrouter.causes": sorted({reason.split(":")[0] for reason in self.reasons}),
            "mmrouter.overlap_blocks": winner.overlap,
            "mmrouter.tier_blocks": winner.tier,
            "mmrouter.unproved_blocks": winner.unproved,
            "mmrouter.prompt_blocks": winner.blocks,
            "mmrouter.candidates": len(self.choice.candidates),
            "mmrouter.reason": self.choice.reason,
        }


class QueueFullError(NoWorkerError):
    """All workers that could take it have the maximum of requests without a first byte."""


class RouteNotServedError(NoWorkerError):
    """Every engine that runs has a list of routes without this one."""


class Placer:
    """Chooses a worker for a request and counts the requests in flight."""

    def __init__(
        self,
        deployment: MMRouterDeployment,
        fleet: Fleet,
        *,
        changed: Callable[[Worker, int], None] = lambda worker, rank: None,
    ) -> None:
        """``changed`` is called for every rank on which a request of this router begins, is answered or ends."""
        self._fleet, self._changed = fleet, changed
        self.answer_listeners: list[Callable[[], None]] = []  # called when a request no longer waits for a first byte
        encoders = any(pool.role == "encoder" for pool in deployment.spec.pools)
        self._visual = 0.0 if encoders else WEIGHTS.visual  # with encoders, engines encode nothing
        self._policy: Policy = deployment.spec.routing.policy
        self._overlap_weight = float(deployment.spec.routing.overlap_weight)
        self._verification = deployment.spec.verification
        self._max_queued = deployment.spec.routing.max_queued_requests
        self._block_sizes = {pool.name: block_size_of(deployment, pool) for pool in deployment.spec.pools}
        self._turns: Counter[frozenset[str]] = Counter()  # by roles: the choices of one request count separately
        self._groups = CandidateGroups(fleet, self._standing)

    def eligibility(self, worker: Worker) -> Eligibility:
        """Return how a worker may be used: the table of docs/architecture.md for ``worker`` and ``prefill``."""
        if not worker.routable:
            return "unsynced"
        now, seconds = self._fleet.now(), self._verification.timeout_seconds
        if worker.canary == "True" or not canary_applies(worker.member.role):
            if not worker.is_admitted(now, seconds):
                return "waiting"
            # A role without a canary has no predicted overlap either.
            return "verified" if worker.canary == "True" else "degraded"
        if worker.canary == "Unknown" and now - worker.since < seconds:
            return "pending"
        if self._verification.on_failure == "Refuse":
            return "refused"
        return "degraded" if worker.is_admitted(now, seconds) else "waiting"

    def block_size(self, worker: Worker) -> int:
        """Return the block size that the engine reports, else that of its pool's spec, else 0."""
        reported = worker.heartbeat.block_size if worker.heartbeat else 0
        return reported or self._block_sizes.get(worker.member.pool, 0)

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
        """Choose among the eligible engines of these roles, without the pod uids in ``exclude``.

        A LoRA adapter's request goes to engines that have loaded it, a stored response is continued by its engine.

        ``partner``: an engine that the chosen one exchanges KV blocks with. ``dry_run``: nothing is sent, so queues
        may be full. Raises :class:`NoWorkerError`.
        """
        if prepared.adapter or prepared.holder or prepared.pools:
            exclude = {*exclude, *(worker.member.uid for worker in self._fleet if not _may_answer(worker, prepared))}
        kind = frozenset(roles)
        groups = self.groups(exclude, kind, partner)
        if not dry_run:
            groups = [free for group in groups if (free := group.with_free_queue(self._max_queued)) is not None]
            if not groups:
                raise QueueFullError(f"{self._max_queued} requests wait for a first byte at each eligible engine")
        policy = policy or self._policy
        if policy == "kv" and (prepared.exactness == "affinity" or _all_are_older(groups, prepared.first_release)):
            policy = "consistentHash"
        looked_up = [self._look_up(group, prepared) for group in groups]
        table = CandidateTable.joined([CandidateTable.summed([each for _, each in tables]) for tables in looked_up])
        if policy == "roundRobin" and len(groups) == 1:
            table.ring = groups[0].ring
        choice = choose(
            table,
            policy=policy,
            overlap_weight=self._overlap_weight,
            fingerprint=prepared.fingerprint,
            turn=self._turns[kind],
            forced="stores the response that is continued" if prepared.holder else "",
        )
        if not dry_run:
            self._turns[kind] += 1
        number, row = 0, choice.row
        while row >= len(groups[number].targets):
            row -= len(groups[number].targets)
            number += 1
        chosen = groups[number].targets[row]
        exactness, reasons = prepared.exactness_for(chosen.worker.scope)
        if exactness != "affinity":
            exactness, reasons = _of_engine(prepared, chosen.worker, exactness, reasons)
        if exactness != "affinity" and not choice.winner.scored:
            exactness, reasons = "affinity", (*reasons, "unverified:worker")
        (keys, first), *others = looked_up[number]
        fresh = keys[(first[row] if others else choice.winner).hit :]
        for keys, candidates in others:
            fresh += keys[candidates[row].hit :]
        return Decision(chosen, choice, policy, exactness, reasons, fresh=fresh)

    def _look_up(self, group: CandidateGroup, prepared: Prepared) -> "list[tuple[array[int], CandidateTable]]":
        """Return the keys and the candidates of a group for each prompt of a request."""
        keys, proved = prepared.keys(*group.form), not prepared.hidden
        first = keys, group.table(keys, len(prepared.ids), prepared.spans, self._visual, proved=proved)
        others = zip(prepared.other_keys(*group.form), prepared.others, strict=True)
        return [first, *((keys, group.table(keys, len(ids), (), 0.0, proved=proved)) for keys, ids in others)]

    def begin(self, decision: Decision) -> "Booking":
        target, winner = decision.target, decision.choice.winner
        usage = self._fleet.usage(target.worker, target.rank)
        changed = partial(self._changed, target.worker, target.rank)
        return Booking(usage, decision.fresh, winner.encode, float(winner.blocks), changed, self.answer_listeners)

    def able(self, worker: Worker) -> bool:
        """Whether a worker may get requests, if only as a last resort."""
        return _able(worker, self.eligibility(worker))

    def without_route(self, path: str) -> set[str]:
        """Return the pods that do not serve a passed route. Raises :class:`RouteNotServedError` if no engine does."""
        running = [worker for worker in self._fleet if worker.heartbeat and worker.heartbeat.engine_state == "up"]
        if running and not any(_serves(worker, path) for worker in running):
            raise RouteNotServedError(path)
        return {worker.member.uid for worker in self._fleet if not _serves(worker, path)}

    def outside(self, allows: Callable[[str, int], bool]) -> set[str]:
        """Return the pods whose address a gateway does not allow. Raises :class:`NoWorkerError` for all."""
        outside = {worker.member.uid for worker in self._fleet if not allows(worker.member.ip, HTTP_PORT)}
        if outside and len(outside) == len(self._fleet.workers):
            raise NoWorkerError("the gateway allows none of the engines")
        return outside

    def partner(self, worker: Worker) -> Target | None:
        """Return an engine that can answer in a pair with this prefill or decode engine, or ``None``.

        It is a random verified one, else any random one: a hung engine must not block the verification of all others.
        """
        role = PARTNERS[worker.member.role]
        partners = [
            Target(other, rank, self.block_size(other))
            for other in self._fleet
            if other.member.role == role
            and other.member.compatibility == worker.member.compatibility
            and other.routable
            for rank in range(other.ranks)
        ]
        verified = [target for target in partners if target.worker.canary == "True"]
        return random.choice(verified or partners) if partners else None

    def groups(
        self, exclude: Collection[str], roles: frozenset[str], partner: Worker | None
    ) -> Sequence[CandidateGroup]:
        """Return the candidates. Raises :class:`NoWorkerError`."""
        return self._groups.of(exclude, roles, partner)

    def _standing(self, worker: Worker) -> "Standing":
        eligibility, size = self.eligibility(worker), self.block_size(worker)
        until = math.inf
        if eligibility in ("waiting", "pending"):
            until = worker.since + self._verification.timeout_seconds
        scored = eligibility != "unsynced" and worker.canary == "True"
        targets = [Target(worker, rank, size) for rank in range(worker.ranks)] if size > 0 else []
        rows = [CandidateRow.of(self._fleet, target, scored=scored) for target in targets]
        return Standing(
            worker.version,
            eligibility,
            eligibility in ("verified", "degraded"),
            _able(worker, eligibility),
            until,
            Target(worker, 0, size).key_form,
            rows,
        )


def _all_are_older(groups: Sequence[CandidateGroup], release: tuple[int, ...]) -> bool:
    """Whether no engine makes the prompt that is predicted, so that no key of it can match."""
    return bool(release) and all(target.worker.is_older(release) for group in groups for target in group.targets)


def _of_engine(
    prepared: Prepared, worker: Worker, exactness: Exactness, reasons: tuple[str, ...]
) -> tuple[Exactness, tuple[str, ...]]:
    """Return an exactness and its reasons, weakened by the engine's release and what is not known of its caches."""
    beat = worker.heartbeat
    engine = ADAPTERS.get(beat.engine) if beat is not None else None
    if (
        beat
        and engine
        and prepared.request
        and (why := engine.other_prompt(beat.engine_version, prepared.request.body))
    ):
        return "affinity", (*reasons, f"release:{why}")
    if worker.is_older(prepared.first_release):
        return "affinity", (*reasons, f"release:{prepared.request.prompt_field}")
    if prepared.may_have_states and beat is not None and not beat.all_groups:
        # An older sidecar, which leaves mamba groups out: the overlap may be too high.
        return "affinity", (*reasons, "old_feed:cache_groups")
    bounds = (*worker.layout.bounds, *prepared.hidden)
    if not worker.layout.whole and (prepared.spans or prepared.salt) and (beat is None or beat.has_aside):
        # Without full attention, an image or a salt that ended before the kept blocks is in no event.
        longest = max(map(len, (prepared.ids, *prepared.others)))
        bounds += ("window",) if worker.layout.tails[-1].tokens < longest else ()
    if beat is not None and beat.lower_media and not worker.lower_media:
        bounds += ("lower_tiers",)
    if bounds:
        return "bounded", (*reasons, *(f"cache_groups:{why}" for why in bounds))
    return exactness, reasons


def _may_answer(worker: Worker, prepared: Prepared) -> bool:
    if prepared.adapter and (worker.heartbeat is None or prepared.adapter not in worker.heartbeat.adapters):
        return False
    if prepared.holder:
        return worker.member.uid == prepared.holder
    return not prepared.pools or worker.member.pool in prepared.pools


def _serves(worker: Worker, path: str) -> bool:
    return worker.heartbeat is not None and path in worker.heartbeat.routes


def _able(worker: Worker, eligibility: Eligibility) -> bool:
    return eligibility != "refused" and (eligibility != "unsynced" or worker.serving)


class Booking:
    """Load of one request on its worker; ``answered`` and ``end`` are idempotent."""

    def __init__(
        self,
        usage: RankUsage,
        fresh: "array[int]",
        encode: float,
        active: float,
        changed: Callable[[], None],
        answer_listeners: Sequence[Callable[[], None]] = (),
    ) -> None:
        """``fresh``: keys of the blocks to compute there; ``encode`` and ``active`` are in blocks.

        ``changed`` is called after every change of the load, a listener once when the request leaves the queue.
        """
        self._answer_listeners = answer_listeners
        self._usage, self._fresh, self._encode, self._active, self._changed = usage, fresh, encode, active, changed
        usage.begin(fresh, encode, active)
        self._open = self._waits = True
        changed()

    def answered(self) -> None:
        """Release the prefill: the first byte came, or another engine has computed the prompt."""
        if self._waits:
            self._waits = False
            self._usage.answered()
            for listener in self._answer_listeners:
                listener()
        if self._fresh or self._encode:
            self._usage.computed(self._fresh, self._encode)
            self._fresh, self._encode = self._fresh[:0], 0.0
            self._changed()

    def end(self) -> None:
        if self._open:
            self._open = False
            self.answered()
            self._usage.end(self._active)
            self._changed()
