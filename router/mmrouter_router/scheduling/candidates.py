"""The candidates of a request: the engines that may be used, kept in step with the fleet.

A change mostly concerns one worker: its rows are replaced in the columns of its group, and all others stay.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from mmrouter_router.fleet.workers import Fleet, KeyForm, Worker
from mmrouter_router.scheduling.candidate_columns import CandidateGroup, CandidateRow

Eligibility = Literal["verified", "degraded", "waiting", "pending", "refused", "unsynced"]
"""How a worker may be used: ``verified`` with its overlap, ``degraded`` without; ``waiting`` (for readiness gates) and
``pending`` (for the canary) as a last resort; ``refused`` not at all, ``unsynced`` as a last resort while it serves."""


class NoWorkerError(Exception):
    """No worker can take the request now; the message says why."""


@dataclass(slots=True)
class Standing:
    """How a worker may be used, and its candidates; valid for one version of it, until a time of the fleet's clock."""

    version: int
    eligibility: Eligibility
    usable: bool  # not only as a last resort
    able: bool  # at least as a last resort
    until: float
    form: KeyForm
    rows: list[CandidateRow]


@dataclass(slots=True)
class Roster:
    """The standings of some workers by pod uid, and the groups of those that may be used, for one version of the fleet.

    ``last_resort``: no worker is usable otherwise. ``until``: before it no standing changes by time alone.
    """

    version: int
    standings: dict[str, Standing]
    groups: dict[KeyForm, CandidateGroup]
    last_resort: bool
    until: float


class CandidateGroups:
    """The groups of candidates by the roles of their pods and by the engine that they exchange KV blocks with."""

    def __init__(self, fleet: Fleet, standing: Callable[[Worker], Standing]) -> None:
        self._fleet, self._standing_of = fleet, standing
        self._rosters: dict[tuple[frozenset[str], str | None], Roster] = {}
        self._standings: dict[str, Standing] = {}  # by pod uid: most workers are as before when one changes

    def of(self, exclude: Collection[str], roles: frozenset[str], partner: Worker | None) -> Sequence[CandidateGroup]:
        """Return the candidates, without the pod uids in ``exclude``. Raises :class:`NoWorkerError`."""
        key = roles, None if partner is None else partner.member.compatibility
        if exclude:
            return tuple(self._build(exclude, *key).groups.values())
        roster = self._rosters.pop(key, None)
        if roster is None or self._fleet.now() >= roster.until or not self._update(roster, *key):
            roster = self._build((), *key)
            # Others that are too old to be updated are of no more use.
            known = self._fleet.changed_since
            self._rosters = {key: old for key, old in self._rosters.items() if known(old.version) is not None}
        self._rosters[key] = roster
        return tuple(roster.groups.values())

    def _update(self, roster: Roster, roles: Collection[str], compatibility: str | None) -> bool:
        """Bring a roster up to date; return whether that was possible."""
        if roster.version == self._fleet.version:
            return True
        changed = self._fleet.changed_since(roster.version)
        if changed is None or roster.last_resort:
            return False
        gone, come = defaultdict[KeyForm, list[CandidateRow]](list), defaultdict[KeyForm, list[CandidateRow]](list)
        for uid in changed:
            before, after = roster.standings.pop(uid, None), None
            worker = self._fleet.workers.get(uid)
            if worker is None:
                self._standings.pop(uid, None)
            elif _belongs(worker, roles, compatibility):
                after = roster.standings[uid] = self._standing(uid, worker)
                roster.until = min(roster.until, after.until)
            if before is not None and before.usable:
                gone[before.form] += before.rows
            if after is not None and after.usable:
                come[after.form] += after.rows
        for form in gone.keys() | come.keys():
            group = roster.groups.pop(form, None)
            if group is not None:
                group = group.replaced(gone[form], come[form])
            elif come[form]:
                group = CandidateGroup.of(self._fleet, form, come[form])
            if group is not None:
                roster.groups[form] = group
        roster.version = self._fleet.version
        return bool(roster.groups)

    def _build(self, exclude: Collection[str], roles: Collection[str], compatibility: str | None) -> Roster:
        workers = self._fleet.workers
        if len(self._standings) > len(workers):
            self._standings = {uid: known for uid, known in self._standings.items() if uid in workers}
        standings, excluded = dict[str, Standing](), 0
        for uid, worker in workers.items():
            if not _belongs(worker, roles, compatibility):
                continue
            if uid in exclude:
                excluded += 1
                continue
            standings[uid] = self._standing(uid, worker)
        usable = [standing for standing in standings.values() if standing.usable]
        # The last resort: an engine whose sidecar is away still answers, without overlap.
        chosen = usable or [standing for standing in standings.values() if standing.able]
        groups = dict[KeyForm, CandidateGroup]()
        for form in dict.fromkeys(standing.form for standing in chosen):
            rows = list(chain.from_iterable([standing.rows for standing in chosen if standing.form == form]))
            if rows:
                groups[form] = CandidateGroup.of(self._fleet, form, rows)
        if not groups:
            counted = Counter(standing.eligibility for standing in standings.values())
            # Clients read it, so it names no pod; `mmrouter status` does.
            states = [f"{count} {state}" for state, count in counted.items()]
            states += [f"{excluded} failed or not allowed for this request"] if excluded else []
            raise NoWorkerError(", ".join(states) or "none is known")
        until = min([standing.until for standing in standings.values()])
        return Roster(self._fleet.version, standings, groups, not usable, until)

    def _standing(self, uid: str, worker: Worker) -> Standing:
        known = self._standings.get(uid)
        if known is None or known.version != worker.version or known.until <= self._fleet.now():
            known = self._standings[uid] = self._standing_of(worker)
        return known


def _belongs(worker: Worker, roles: Collection[str], compatibility: str | None) -> bool:
    member = worker.member
    return member.role in roles and (compatibility is None or member.compatibility == compatibility)
