"""Sentinels of a deployment, per scope: predictions, learned values, and the evidence for and against them. No I/O.

* a **sighting** from the feed names a place and sentinels. Values that a fingerprint predicts for the canary's images
  prove that fingerprint, at any place; values at the place of a sent request teach the image that it has there.
* an **observation** is what an engine made of an image in a probe request, under a text that is unique to it. It is
  conclusive, whatever other requests the engine serves.
* a **prediction** that an observation contradicts demotes the scope to learning, for good.

On the *artifact path* sentinels follow from the encoded bytes and a fingerprint of the engine's processor
(docs/engine-facts/sglang.md#identity-per-family), which includes a transformers version that engines do not report:
likely ones become candidates. On every other path they follow from pixels that only the engine has, and are learned.
"""

import hashlib
import itertools
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from mmrouter_lib.engines.sglang.identity import Fingerprint, artifact_hash_of, legacy_sentinels, sentinels
from mmrouter_router.sentinels.align import Aligner, LearnedImage, Place, SentRequest
from mmrouter_router.sentinels.table import Scope, SentinelTable, Values

Event = Literal["calibrated", "proven", "learned", "ambiguous", "demoted"]

BLIND_SECONDS = 60.0  # after a request that was not aligned, in which sightings may still stem from it
MAX_RANKS = 4_096
MAX_SCOPES = 32  # scopes that are kept, so that a rolled back engine release finds its sentinels again
MAX_DIGESTS = 4_096

Provider = Literal["artifact", "learned"]

ALWAYS_ARTIFACT = frozenset({"qwen3_vl", "qwen3_vl_moe"})
ARTIFACT_WITH_CACHE = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "paddleocr_vl"})
"""With ``--mm-preprocess-cache-size-mb`` above 0."""

_PROCESSOR = "sglang.srt.multimodal.processors.qwen_vl.QwenVLImageProcessor"
_PROCESSORS = {"paddleocr_vl": "sglang.srt.multimodal.processors.paddleocr_vlm.PaddleOCRVLImageProcessor"}
"""Model type -> the engine's processor, where it is not that of Qwen-VL."""
_WRAPPERS = {
    "qwen2_vl": "transformers.models.qwen2_vl.processing_qwen2_vl.Qwen2VLProcessor",
    "qwen2_5_vl": "transformers.models.qwen2_5_vl.processing_qwen2_5_vl.Qwen2_5_VLProcessor",
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        "transformers.models.qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor",
    ),
    "paddleocr_vl": "transformers.models.paddleocr_vl.processing_paddleocr_vl.PaddleOCRVLProcessor",
}
_TRANSFORMERS = {
    "0.5.22": (5, 19, 0),
    "0.5.23": (5, 19, 0),
}  # engine version -> the transformers release that it was observed with
_NEAR, _PATCHES = 6, 4  # minor releases to either side that are candidates, nearest first, and patch releases of each
_TRANSPORTS = ("cpu", "cuda_ipc")


class FingerprintPlan(NamedTuple):
    """Fingerprints to try for an engine; empty where its sentinels cannot be predicted, ``why`` gives the reason.

    ``legacy``: it writes one sentinel per image.
    """

    candidates: tuple[Fingerprint, ...]
    why: str
    legacy: bool = False


def plan_fingerprints(version: str, facts: Mapping[str, str]) -> FingerprintPlan:
    """Return the candidates. ``facts`` are the heartbeat's: the engine's own names, values as JSON texts."""
    model_type = str(_fact(facts, "model_type") or "")
    if legacy_sentinels(version) and version not in _TRANSFORMERS:
        return FingerprintPlan((), f"release {version} hashes pixels")
    if _fact(facts, "language_only") is True:
        return FingerprintPlan((), "an engine beside encoders hashes their embeddings")
    if model_type in ARTIFACT_WITH_CACHE:
        megabytes = _fact(facts, "mm_preprocess_cache_size_mb")
        if not isinstance(megabytes, int | float) or isinstance(megabytes, bool) or not megabytes:
            return FingerprintPlan((), f"{model_type} without a preprocessing cache hashes pixels")
    elif model_type not in ALWAYS_ARTIFACT:
        return FingerprintPlan((), f"model type {model_type or 'unknown'} hashes pixels, or what is not modelled")
    architectures = _fact(facts, "architectures")
    config = _fact(facts, "mm_process_config")
    reported = _fact(facts, "mm_feature_transport")
    transports = sorted(_TRANSPORTS, key=lambda name: name != reported)
    revision = _fact(facts, "revision")
    candidates = tuple(
        Fingerprint(
            transformers=release,
            processor_class=_PROCESSORS.get(model_type, _PROCESSOR),
            wrapper_class=_WRAPPERS[model_type],
            model_type=model_type,
            architectures=tuple(map(str, architectures)) if isinstance(architectures, list) else None,
            revision=str(revision) if revision else None,
            disable_fast_image_processor=_fact(facts, "disable_fast_image_processor") is True,
            mm_process_config=config if isinstance(config, dict) else {},
            image_processor_backend=str(_fact(facts, "image_processor_backend") or "auto"),
            feature_transport=transport,
        )
        for transport, release in itertools.product(transports, _releases(version))
    )
    return FingerprintPlan(candidates, "the encoded bytes decide", legacy_sentinels(version))


def _releases(version: str) -> Iterator[str]:
    major, minor, patch = _TRANSFORMERS.get(version) or next(reversed(_TRANSFORMERS.values()))
    yield f"{major}.{minor}.{patch}"
    for step in range(_NEAR + 1):
        for near in sorted({minor - step, minor + step}):
            for other in range(_PATCHES):
                if near >= 0 and (near, other) != (minor, patch):
                    yield f"{major}.{near}.{other}"


def _fact(facts: Mapping[str, str], name: str) -> Any:
    raw = facts.get(name)
    if raw is None:
        return None
    try:
        return json.loads(raw)
    except ValueError:
        return raw


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
        if scope in self._states:
            self._states.move_to_end(scope)
            return
        chosen = plan_fingerprints(version, facts)
        state = self._states[scope] = _ScopeState(chosen, SentinelTable(), why=chosen.why)
        for candidate in chosen.candidates:
            digest = candidate.digest()
            for identity, sha256 in self._probe_images:
                state.expected.setdefault(_predict(sha256, digest, chosen.legacy), (digest, identity))
        if len(self._states) > MAX_SCOPES:
            self._states.popitem(last=False)

    def provider(self, scope: Scope) -> tuple[Provider, str]:
        state = self._states.get(scope)
        if state is None:
            return "learned", "the engine has not reported its version"
        if state.fingerprint:
            return "artifact", state.why
        if state.plan.candidates and not state.demoted:
            return "learned", "no fingerprint is proven yet"
        return "learned", state.why

    def wants_digest(self, identity: bytes) -> bool:
        """Whether some scope may predict an image whose digest is missing; callers hash it off the event loop."""
        return identity not in self._digests and any(
            state.plan.candidates and not state.demoted and state.table.get(identity) is None
            for state in self._states.values()
        )

    def set_digest(self, identity: bytes, sha256: str) -> None:
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
        values = _predict(self._sha256(identity, data), state.fingerprint, state.plan.legacy)
        state.table.put(identity, values, proven=False)
        return values

    def suspend_alignment(self) -> None:
        """Ignore sightings for :data:`BLIND_SECONDS`: engines got images that this router did not align."""
        self._blind_until = self._clock() + BLIND_SECONDS

    def on_request(self, scope: Scope, source: RankEpoch, request: SentRequest) -> None:
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
        state = self._states.get(scope)
        if state is None:
            return
        if not state.fingerprint and not state.demoted and state.plan.candidates:
            sha256 = self._sha256(identity, data)
            for candidate in state.plan.candidates:
                digest = candidate.digest()
                if _predict(sha256, digest, state.plan.legacy) == values:
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


def _predict(sha256: str, fingerprint: str, legacy: bool) -> Values:
    return sentinels(artifact_hash_of(sha256, fingerprint, {}), legacy=legacy)


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
