"""The sentinels of a deployment: per scope what is predicted, what was learned, and what proved or refuted it.

State only; no I/O. Three kinds of evidence come in:

* a **sighting** from the feed names a place and sentinels. Values that a fingerprint predicts for the canary's pictures
  prove that fingerprint, wherever they stand; values at a place of ours teach the image that was asked for there.
* an **observation** is what an engine made of an image in a request of the router's own, under a text that nobody else
  has. It is beyond doubt, whoever else uses the engine.
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
from mmrouter_router.sentinels.align import Aligner, Asked, Lesson, Place
from mmrouter_router.sentinels.provider import Plan, Provider, plan
from mmrouter_router.sentinels.table import Table, Values

Event = Literal["calibrated", "proven", "learned", "ambiguous", "demoted"]

BLIND_SECONDS = 60.0
"""How long after a request that was not aligned (another router's, an unmodelled one) sightings may still be of it."""
MAX_LINES = 4_096
MAX_SCOPES = 32
"""Scopes that are remembered, so that engines which come back after a rollout are known again."""
MAX_DIGESTS = 4_096


class Line(NamedTuple):
    """Where an engine's events come from: pod uid, epoch, rank."""

    uid: str
    epoch: int
    rank: int


@dataclass(slots=True)
class _State:
    plan: Plan
    table: Table
    fingerprint: str = ""  # digest of the proven one; empty while none is
    why: str = ""
    demoted: bool = False
    expected: dict[Values, tuple[str, bytes]] = field(default_factory=dict)  # of known pictures: fingerprint, identity
    lines: OrderedDict[Line, Aligner] = field(default_factory=OrderedDict)


class Sentinels:
    """Everything that one router knows of its engines' sentinels."""

    def __init__(
        self,
        *,
        count: Callable[[Event], None] = lambda event: None,
        clock: Callable[[], float] = time.monotonic,
        pictures: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        """``pictures``: (identity, encoded bytes) of images that every router's canary sends."""
        self._count, self._clock = count, clock
        self._pictures = [(identity, sha256_of(data)) for identity, data in pictures]
        self._digests: OrderedDict[bytes, str] = OrderedDict()  # identity -> SHA-256 of the encoded bytes
        self._states: OrderedDict[Scope, _State] = OrderedDict()
        self._blind_until = clock() + BLIND_SECONDS

    def describe(self, scope: Scope, version: str, facts: Mapping[str, str]) -> None:
        """Take what an engine of the scope says of itself; a scope's engines all say the same."""
        if scope in self._states:
            self._states.move_to_end(scope)
            return
        chosen = plan(version, facts)
        state = self._states[scope] = _State(chosen, Table(), why=chosen.why)
        for candidate in chosen.candidates:
            digest = candidate.digest()
            for identity, sha256 in self._pictures:
                state.expected.setdefault(_predict(sha256, digest), (digest, identity))
        if len(self._states) > MAX_SCOPES:
            self._states.popitem(last=False)

    def provider(self, scope: Scope) -> tuple[Provider, str]:
        """Which provider a scope's identities come from, and why."""
        state = self._states.get(scope)
        if state is None:
            return "learned", "the engine has not said what it is"
        if state.fingerprint:
            return "artifact", state.why
        if state.plan.candidates and not state.demoted:
            return "learned", "no fingerprint is proven yet"
        return "learned", state.why

    def wants_digest(self, identity: bytes) -> bool:
        """Whether an image's sentinels may have to be predicted for some scope and its digest is not known.

        A large image takes milliseconds to hash, so whoever has the time gives its digest (:meth:`digested`) before
        :meth:`values` is asked, which hashes what was not given.
        """
        return identity not in self._digests and any(
            state.plan.candidates and not state.demoted and state.table.get(identity) is None
            for state in self._states.values()
        )

    def digested(self, identity: bytes, sha256: str) -> None:
        """Take an image's :func:`sha256_of`."""
        self._digests[identity] = sha256
        if len(self._digests) > MAX_DIGESTS:
            self._digests.popitem(last=False)

    def values(self, scope: Scope, identity: bytes, data: bytes) -> Values | None:
        """Return the sentinels of an image (``data``: its encoded bytes), ``None`` while they are not known."""
        state = self._states.get(scope)
        if state is None:
            return None
        known = state.table.get(identity)
        if known is not None:
            return known.values
        if not state.fingerprint:
            return None
        values = _predict(self._sha256(identity, data), state.fingerprint)
        state.table.put(identity, values, proven=False)
        return values

    def unsettle(self) -> None:
        """Images reach engines that this router does not align: for a while sightings prove nothing about places."""
        self._blind_until = self._clock() + BLIND_SECONDS

    def asked(self, scope: Scope, line: Line, request: Asked) -> None:
        """Note a request with images before it is sent."""
        state = self._states.get(scope)
        if state is None:
            return
        known = [state.table.get(span.identity) for span in request.spans]
        if not all(one is not None and one.proven for one in known):  # else it teaches nothing
            aligner = self._aligner(state, line)
            self._learn(state, aligner.ask(request), aligner)

    def sighted(self, scope: Scope, line: Line, place: Place, values: Values, length: int, *, live: bool) -> None:
        """Take a sighting. ``live``: it was published just now, not remembered from before."""
        state = self._states.get(scope)
        if state is None or not values:
            return
        expected = state.expected.get(values)
        if expected is not None and not state.demoted:
            self._calibrate(state, *expected, values)
            return
        aligner = self._aligner(state, line)
        trusted = live and self._clock() >= self._blind_until and not aligner.lost
        lessons = aligner.sight(place, values, length, trusted=trusted)
        self._learn(state, lessons, aligner)
        if trusted and not lessons and aligner.ambiguous(place) and not state.table.owned(values):
            self._count("ambiguous")

    def observed(self, scope: Scope, identity: bytes, data: bytes, values: Values) -> None:
        """Take what an engine of the scope made of an image, beyond doubt."""
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
            self._demote(state, "no known fingerprint predicts what the engine made of an image")
        self._learn(state, [Lesson(identity, values)])

    def _sha256(self, identity: bytes, data: bytes) -> str:
        return self._digests.get(identity) or sha256_of(data)

    def _calibrate(self, state: _State, digest: str, identity: bytes, values: Values) -> None:
        if not state.fingerprint:
            state.fingerprint = digest
            self._count("calibrated")
        state.table.put(identity, values, proven=True)

    def _learn(self, state: _State, lessons: Sequence[Lesson], aligner: Aligner | None = None) -> None:
        while lessons:
            for identity, values in lessons:
                self._prove(state, identity, values)
            lessons = aligner.follow() if aligner is not None else ()

    def _prove(self, state: _State, identity: bytes, values: Values) -> None:
        known = state.table.get(identity)
        if known is not None and known.values == values:
            if not known.proven:
                state.table.put(identity, values, proven=True)
                self._count("proven")
            return
        if known is not None and not known.proven:
            self._demote(state, "the engine made something else of an image than its bytes predict")
        state.table.put(identity, values, proven=True)
        self._count("learned")

    def _demote(self, state: _State, why: str) -> None:
        state.fingerprint, state.why, state.demoted = "", why, True
        state.table.forget_predictions()
        state.lines.clear()  # their places were computed with predictions
        self.unsettle()
        self._count("demoted")

    def _aligner(self, state: _State, line: Line) -> Aligner:
        aligner = state.lines.get(line)
        if aligner is None:
            aligner = state.lines[line] = Aligner(state.table)
            for old in [old for old in state.lines if (old.uid, old.rank) == (line.uid, line.rank) and old != line]:
                del state.lines[old]  # an epoch that has ended
            if len(state.lines) > MAX_LINES:
                state.lines.popitem(last=False)
        elif aligner.lost:
            # Forget all of it and be blind until whatever was on its way has come.
            aligner = state.lines[line] = Aligner(state.table)
            self.unsettle()
        return aligner


def _predict(sha256: str, fingerprint: str) -> Values:
    return sentinels(artifact_hash_of(sha256, fingerprint, {}), legacy=False)


def sha256_of(data: bytes) -> str:
    """Return the digest of encoded bytes that predictions start from, in hex."""
    return hashlib.sha256(data).hexdigest()
