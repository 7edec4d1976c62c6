"""Offline check of ``cached_tokens``: no answer claims a block that its engine had not cached when it began. Pure.

A claimed block was in the cache before the request was placed, or came while it waited, from another request. A block
that came during the request, and that no other request at the engine has, is one that the request computed itself.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from campaign.index.history import FOREVER, CacheChange, Name, Record, Unobserved


@dataclass(frozen=True, slots=True)
class Claim:
    """An answer that ended at ``ended`` said that ``cached`` of its prompt's tokens were."""

    request_id: str
    prompt_tokens: int
    cached: int
    ended: float  # seconds since 1970


@dataclass(frozen=True, slots=True)
class Placement:
    """A router sent a request to an engine. ``keys``: blocks of its prompt; ``tries``: attempts at all engines, after
    several of which it is not known when each began.
    """

    engine: str
    at: float
    keys: Sequence[Name]
    block_size: int
    tries: int = 1


@dataclass(slots=True)
class _Stay:
    may_from: float
    must_from: float
    until: float = FOREVER


@dataclass
class ClaimChecker:
    """``complete``: all placements are known; else a block may have come from a request that is not known. ``checked``:
    claims of which a placement is known; ``blocks``: those that they claimed.
    """

    complete: bool
    checked: int = 0
    blocks: int = 0

    def wrong(
        self, claims: Iterable[Claim], placements: Mapping[str, Sequence[Placement]], history: Iterable[Record]
    ) -> list[str]:
        """Return a sentence for each claim that is false at all engines where the request was."""
        self._stays: dict[tuple[str, Name], list[_Stay]] = {}
        self._unobserved: list[Unobserved] = []
        for record in history:
            self._take(record)
        answered = {claim.request_id: claim for claim in claims}
        self._ended = {request: claim.ended for request, claim in answered.items()}
        self._having: dict[tuple[str, Name], list[tuple[str, Placement]]] = {}
        for request, engines in placements.items():
            for placement in engines:
                for key in placement.keys:
                    self._having.setdefault((placement.engine, key), []).append((request, placement))
        found = []
        for request, claim in answered.items():
            reasons = [self._false(claim, placement) for placement in placements.get(request, ())]
            self.checked += bool(reasons)
            if reasons and all(reasons):
                found.append(f"{request} claims {claim.cached} cached tokens: {'; '.join(reasons)}")
        return found

    def _take(self, record: Record) -> None:
        if isinstance(record, Unobserved):
            self._unobserved.append(record)
        elif isinstance(record, CacheChange):
            for name in record.went:
                self._stays[record.engine, name][-1].until = record.at
            for name in record.came:
                self._stays.setdefault((record.engine, name), []).append(_Stay(record.after, record.at))

    def _false(self, claim: Claim, placement: Placement) -> str:
        """Return why a claim is false of the engine of a placement; empty: it may be true."""
        blocks = -(-claim.cached // placement.block_size)
        self.blocks += blocks
        if blocks > len(placement.keys):
            return f"the prompt has {len(placement.keys)} blocks"
        for number, key in enumerate(placement.keys[:blocks]):
            stays = self._stays.get((placement.engine, key), ())
            if not any(self._possible(stay, key, claim, placement) for stay in stays) and not any(
                gap.engine == placement.engine and gap.after <= claim.ended and placement.at <= gap.at
                for gap in self._unobserved
            ):
                return f"{placement.engine} could not hold block {number} ({self._known(key, claim, placement)})"
        return ""

    def _known(self, key: Name, claim: Claim, placement: Placement) -> str:
        """Return what is known of a block at an engine, in seconds since the request was placed."""
        since = placement.at
        stays = [
            f"from {stay.may_from - since:.3f}..{stay.must_from - since:.3f} to {stay.until - since:.3f}"
            for stay in self._stays.get((placement.engine, key), ())
        ]
        others = [
            f"{request} {other.at - since:.3f} to {self._ended.get(request, FOREVER) - since:.3f}"
            for request, other in self._having[placement.engine, key]
            if request != claim.request_id
        ]
        return f"ended {claim.ended - since:.3f}; cached {', '.join(stays)}; requests {', '.join(others)}"

    def _possible(self, stay: _Stay, key: Name, claim: Claim, placement: Placement) -> bool:
        """Whether a block was in the cache when the request was admitted, between its placement and its end."""
        if stay.until < placement.at or stay.may_from > claim.ended:
            return False
        if stay.must_from <= placement.at or not self.complete or placement.tries > 1:
            return True
        return any(
            request != claim.request_id
            and other.at <= stay.must_from
            and self._ended.get(request, FOREVER) >= stay.may_from
            for request, other in self._having[placement.engine, key]
        )
