"""Sentinels of a deployment, per scope: predictions, learned values, and the evidence for and against them. No I/O.

Three kinds of evidence:

* a **sighting** from the feed names a place and sentinels. Values that a fingerprint predicts for the canary's images
  prove that fingerprint, at any place; values at the place of a sent request teach the image that it has there.
* an **observation** is what an engine made of an image in a probe request, under a text that is unique to it. It is
  conclusive, whatever other requests the engine serves.
* a **prediction** that an observation contradicts demotes the scope to learning, for good.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from mmrouter_lib.engines.sglang.identity import artifact_hash_of, sentinels
from mmrouter_router.core.types import Scope
from mmrouter_router.sentinels.align import Aligner, LearnedImage, Place, SentRequest
from mmrouter_router.sentinels.processor_fingerprints import FingerprintPlan, Provider, plan_fingerprints
from mmrouter_router.sentinels.table import SentinelTable, Values

Event = Literal["calibrated", "proven", "learned", "ambiguous", "demoted"]

BLIND_SECONDS = 60.0
"""How long after a request that was not aligned (another router's, an unmodelled one) sightings may still be of it."""
MAX_RANKS = 4_096
MAX_SCOPES = 32
"""Scopes that are kept, so that a rolled back engine release finds its sentinels again."""
MAX_DIGESTS = 4_096


class RankEpoch(NamedTuple):
    """Source of an engine's events."""

    uid: str
    epoch: int
    rank: int


@dataclass(slots=True)
class _ScopeState:
    plan: FingerprintPlan
    table: SentinelTable
    fingerprint: str = ""  # digest of the proven one; empty while none is
    why: str = ""
    demoted: bool = False
    expected: dict[Values, tuple[str, bytes]] = field(default_factory=dict)  # of probe images: fingerprint, identity
    aligners: OrderedDict[RankEpoch, Aligner] = field(default_factory=OrderedDict)


class SentinelStore:
    """Sentinels of all scopes, as one router knows them."""

    def __init__(
        self,
        *,
        count: Callable[[Event], None] = lambda event: None,
        clock: Callable[[], float] = time.monotonic,
        probe_images: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        """``probe_images``: (identity, encoded bytes) of images that every router's canary sends."""
        self._count, self._clock = count, clock
        self._probe_images = [(identity, sha256_of(data)) for identity, data in probe_images]
        self._digests: OrderedDict[bytes, str] = OrderedDict()  # identity -> SHA-256 of the encoded bytes
        self._states: OrderedDict[Scope, _ScopeState] = OrderedDict()
        self._blind_until = clock() + BLIND_SECONDS

    def describe(self, scope: Scope, version: str, facts: Mapping[str, str]) -> None:
        """Set a scope's engine version and facts, which are equal for all its engines."""
        if scope in self._states:
            self._states.move_to_end(scope)
            return
        chosen = plan_fingerprints(version, facts)
        state = self._states[scope] = _ScopeState(chosen, SentinelTable(), why=chosen.why)
        for candidate in chosen.candidates:
            digest = candidate.digest()
            for identity, sha256 in self._probe_images:
                state.expected.setdefault(_predict(sha256, digest), (digest, identity))
        if len(self._states) > MAX_SCOPES:
            self._states.popitem(last=False)

    def provider(self, scope: Scope) -> tuple[Provider, str]:
        """Return the provider of a scope's sentinels and the reason."""
        state = self._states.get(scope)
        if state is None:
            return "learned", "the engine has not reported its version"
        if state.fingerprint:
            return "artifact", state.why
        if state.plan.candidates and not state.demoted:
            return "learned", "no fingerprint is proven yet"
        return "learned", state.why

    def wants_digest(self, identity: bytes) -> bool:
        """Whether some scope may need a prediction for an image whose digest is missing.

        Hashing a large image takes milliseconds, so the caller provides the digest (:meth:`set_digest`) off the event
        loop; :meth:`values` computes missing ones.
        """
        return identity not in self._digests and any(
            state.plan.candidates and not state.demoted and state.table.get(identity) is None
            for state in self._states.values()
        )

    def set_digest(self, identity: bytes, sha256: str) -> None:
        """Set an image's :func:`sha256_of`."""
        self._digests[identity] = sha256
        if len(self._digests) > MAX_DIGESTS:
            self._digests.popitem(last=False)

    def values(self, scope: Scope, identity: bytes, data: bytes) -> Values | None:
        """Return the sentinels of an image (``data``: its encoded bytes), ``None`` while they are not known."""
        state = self._states.get(scope)
        if state is None:
            return None
        entry = state.table.get(identity)
        if entry is not None:
            return entry.values
        if not state.fingerprint:
            return None
        values = _predict(self._sha256(identity, data), state.fingerprint)
        state.table.put(identity, values, proven=False)
        return values

    def suspend_alignment(self) -> None:
        """Ignore sightings for :data:`BLIND_SECONDS`: engines got images that this router did not align."""
        self._blind_until = self._clock() + BLIND_SECONDS

    def on_request(self, scope: Scope, source: RankEpoch, request: SentRequest) -> None:
        """Record a request with images before it is sent."""
        state = self._states.get(scope)
        if state is None:
            return
        proven = [state.table.is_proven(span.identity) for span in request.spans]  # marks all of them as used
        if not all(proven):
            aligner = self._aligner(state, source)
            self._learn(state, aligner.add_request(request), aligner)

    def on_sighting(
        self, scope: Scope, source: RankEpoch, place: Place, values: Values, length: int, *, live: bool
    ) -> None:
        """Apply a sighting. ``live``: from the stream, not recalled from the sidecar's memory."""
        state = self._states.get(scope)
        if state is None or not values:
            return
        expected = state.expected.get(values)
        if expected is not None and not state.demoted:
            self._calibrate(state, *expected, values)
            return
        aligner = self._aligner(state, source)
        trusted = live and self._clock() >= self._blind_until and not aligner.lost
        learned = aligner.add_sighting(place, values, length, trusted=trusted)
        self._learn(state, learned, aligner)
        if trusted and not learned and aligner.ambiguous(place) and not state.table.owned(values):
            self._count("ambiguous")

    def on_observed(self, scope: Scope, identity: bytes, data: bytes, values: Values) -> None:
        """Apply the sentinels that an engine of the scope used for an image of a probe request."""
        state = self._states.get(scope)
        if state is None:
            return
        if not state.fingerprint and not state.demoted and state.plan.candidates:
            sha256 = self._sha256(identity, data)
            for candidate in state.plan.candidates:
                digest = candidate.digest()
                if _predict(sha256, digest) == values:
                    self._calibrate(state, digest, identity, values)
                    return
            self._demote(state, "no candidate fingerprint predicts the sentinels that the engine used")
        self._learn(state, [LearnedImage(identity, values)])

    def _sha256(self, identity: bytes, data: bytes) -> str:
        return self._digests.get(identity) or sha256_of(data)

    def _calibrate(self, state: _ScopeState, digest: str, identity: bytes, values: Values) -> None:
        if not state.fingerprint:
            state.fingerprint = digest
            self._count("calibrated")
        state.table.put(identity, values, proven=True)

    def _learn(self, state: _ScopeState, learned: Sequence[LearnedImage], aligner: Aligner | None = None) -> None:
        while learned:
            for identity, values in learned:
                self._prove(state, identity, values)
            learned = aligner.resolve() if aligner is not None else ()

    def _prove(self, state: _ScopeState, identity: bytes, values: Values) -> None:
        entry = state.table.get(identity)
        if entry is not None and entry.values == values:
            if not entry.proven:
                state.table.put(identity, values, proven=True)
                self._count("proven")
            return
        if entry is not None and not entry.proven:
            self._demote(state, "the engine used other sentinels for an image than its bytes predict")
        state.table.put(identity, values, proven=True)
        self._count("learned")

    def _demote(self, state: _ScopeState, why: str) -> None:
        state.fingerprint, state.why, state.demoted = "", why, True
        state.table.forget_predictions()
        state.aligners.clear()  # their places were computed with predictions
        self.suspend_alignment()
        self._count("demoted")

    def _aligner(self, state: _ScopeState, source: RankEpoch) -> Aligner:
        aligners = state.aligners
        aligner = aligners.get(source)
        if aligner is None:
            aligner = aligners[source] = Aligner(state.table)
            for old in [old for old in aligners if (old.uid, old.rank) == (source.uid, source.rank) and old != source]:
                del aligners[old]  # an epoch that has ended
            if len(aligners) > MAX_RANKS:
                aligners.popitem(last=False)
        elif aligner.lost:
            # Start over, and ignore sightings of requests that are still under way.
            aligner = aligners[source] = Aligner(state.table)
            self.suspend_alignment()
        return aligner


def _predict(sha256: str, fingerprint: str) -> Values:
    return sentinels(artifact_hash_of(sha256, fingerprint, {}), legacy=False)


def sha256_of(data: bytes) -> str:
    """Return the digest of an image's encoded bytes, in hex, from which predictions start."""
    return hashlib.sha256(data).hexdigest()
