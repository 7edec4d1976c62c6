"""Processor fingerprints from which an engine's sentinels can be predicted, by its version, model type and flags. Pure.

On the *artifact path* sentinels follow from the encoded bytes and a fingerprint of the processor
(docs/engine-facts/sglang.md#identity-per-family). The engine does not report its transformers version, which is part of
the fingerprint; likely versions become candidates, and an observed image proves one of them. On every other path the
sentinels follow from pixels that only the engine has, and are learned.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mmrouter_lib.engines.sglang.identity import Fingerprint, legacy_sentinels

Provider = Literal["artifact", "learned"]

ALWAYS_ARTIFACT = frozenset({"qwen3_vl", "qwen3_vl_moe"})
ARTIFACT_WITH_CACHE = frozenset({"qwen2_vl", "qwen2_5_vl"})
"""Model types that take the artifact path where ``--mm-preprocess-cache-size-mb`` is above 0."""

_PROCESSOR = "sglang.srt.multimodal.processors.qwen_vl.QwenVLImageProcessor"
_WRAPPERS = {
    "qwen2_vl": "transformers.models.qwen2_vl.processing_qwen2_vl.Qwen2VLProcessor",
    "qwen2_5_vl": "transformers.models.qwen2_5_vl.processing_qwen2_5_vl.Qwen2_5_VLProcessor",
    "qwen3_vl": "transformers.models.qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor",
    "qwen3_vl_moe": "transformers.models.qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor",
}
_TRANSFORMERS = {"0.5.23": (5, 19, 0)}
"""Engine version -> the transformers release that it was observed with."""
_NEAR, _PATCHES = 6, 4
"""Minor releases to either side that are candidates, nearest first, and patch releases of each."""
_TRANSPORTS = ("cpu", "cuda_ipc")


@dataclass(frozen=True, slots=True)
class FingerprintPlan:
    """Fingerprints to try for an engine; empty where its sentinels cannot be predicted, ``why`` gives the reason."""

    candidates: tuple[Fingerprint, ...]
    why: str


def plan_fingerprints(version: str, facts: Mapping[str, str]) -> FingerprintPlan:
    """Return the candidates. ``facts`` are the heartbeat's: the engine's own names, values as JSON texts."""
    model_type = str(_fact(facts, "model_type") or "")
    if legacy_sentinels(version):
        return FingerprintPlan((), f"release {version} hashes pixels")
    if _fact(facts, "language_only") is True:
        return FingerprintPlan((), "an engine beside encoders hashes their embeddings")
    if model_type in ARTIFACT_WITH_CACHE:
        if not _number(_fact(facts, "mm_preprocess_cache_size_mb")):
            return FingerprintPlan((), f"{model_type} without a preprocessing cache hashes pixels")
    elif model_type not in ALWAYS_ARTIFACT:
        return FingerprintPlan((), f"model type {model_type or 'unknown'} hashes pixels")
    architectures = _fact(facts, "architectures")
    config = _fact(facts, "mm_process_config")
    reported = _fact(facts, "mm_feature_transport")
    transports = sorted(_TRANSPORTS, key=lambda name: name != reported)
    revision = _fact(facts, "revision")
    candidates = tuple(
        Fingerprint(
            transformers=release,
            processor_class=_PROCESSOR,
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
    return FingerprintPlan(candidates, "the encoded bytes decide")


def _releases(version: str) -> Iterator[str]:
    """Yield transformers versions, most likely first."""
    major, minor, patch = _TRANSFORMERS.get(version) or next(reversed(_TRANSFORMERS.values()))
    yield f"{major}.{minor}.{patch}"
    for step in range(_NEAR + 1):
        for near in sorted({minor - step, minor + step}):
            for other in range(_PATCHES):
                if near >= 0 and (near, other) != (minor, patch):
                    yield f"{major}.{near}.{other}"


def _fact(facts: Mapping[str, str], name: str) -> Any:
    """Return a fact's value; text that is not JSON is returned as it is."""
    raw = facts.get(name)
    if raw is None:
        return None
    try:
        return json.loads(raw)
    except ValueError:
        return raw


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
