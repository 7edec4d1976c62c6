"""SGLang's image identity, recomputed; proved against a running 0.5.23.

The engine overwrites an image's placeholder tokens by *sentinels*, a function of the image's item hash
(docs/engine-facts/sglang.md#sentinels). The item hash follows from the processed pixels, which only the engine has, or
on the *artifact path* from the encoded bytes and a fingerprint of the processor
(docs/engine-facts/sglang.md#artifact-identity).
"""

import hashlib
import json
import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from mmrouter_lib.engines.base.release_order import is_before

SENTINEL_BASE: Final = 1_000_000  # lowest sentinel; vocabularies end below
WIDE_SENTINELS: Final = 4  # number of sentinels of one image, cycled over each of its runs

_WIDE_TAG = b"sglang-mm-wide-pad-v1"
_FEATURE_TAG = b"multimodal-feature-v1"
_LOW_62 = (1 << 62) - 1
_U64 = (1 << 64) - 1


def legacy_sentinels(version: str) -> bool:
    """Whether an engine release writes one 30-bit sentinel per image instead of four of 62 bits.

    The first release known to write four is 0.5.23.
    """
    return is_before((0, 5, 23), version)


def sentinels(item_hash: int, *, legacy: bool) -> tuple[int, ...]:
    """Return the values that replace an image's placeholder tokens, in the order in which they cycle in each run.

    Only the low 64 bits of ``item_hash`` count for the wide form (four values), all of them for the older one (one).
    """
    if legacy:
        return (SENTINEL_BASE + item_hash % (1 << 30),)
    digest = hashlib.sha256(_WIDE_TAG + (item_hash & _U64).to_bytes(8, "big")).digest()
    return tuple(SENTINEL_BASE + (word & _LOW_62) for word in struct.unpack(">4Q", digest))


def run_ids(values: Sequence[int], length: int) -> "array[int]":
    """Return the ids of one run of ``length`` tokens: the sentinels cycled from its start, as ``array('Q')``."""
    return (array("Q", values) * (length // len(values) + 1))[:length]


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """The engine settings that enter an image's hash on the artifact path.

    Defaults are those of an engine on CPU without options. ``/server_info`` and ``/model_info`` report all fields but
    ``transformers`` and ``wrapper_class``.
    """

    transformers: str
    processor_class: str  # Python path of SGLang's processor
    wrapper_class: str  # Python path of the Hugging Face processor that it wraps
    model_type: str
    architectures: tuple[str, ...] | None
    revision: str | None = None  # the --revision flag, of model and processor
    disable_fast_image_processor: bool = False
    mm_process_config: dict[str, Any] = {}
    gpu_image_decode: bool = True
    image_processor_backend: str = "auto"
    feature_transport: str = "cpu"

    def digest(self) -> str:
        """Return the fingerprint as the engine writes it: ``sha256:`` and 64 hex digits. Raises ``ValueError``."""
        config = self.mm_process_config
        processor = {
            "wrapper_class": self.wrapper_class,
            "gpu_image_decode": self.gpu_image_decode,
            "image_processor_backend": self.image_processor_backend,
            "feature_transport": self.feature_transport,
            "wrapped_processor": None,
        }
        settings = {
            "transformers": self.transformers,
            "processor_class": self.processor_class,
            "model_type": self.model_type,
            "architectures": None if self.architectures is None else list(self.architectures),
            "model_revision": self.revision,
            "processor_revision": self.revision,
            "disable_fast_image_processor": self.disable_fast_image_processor,
            "mm_process_config": config,
            "processor": processor | {f"{kind}_config": config.get(kind, {}) for kind in ("image", "video", "audio")},
            "extra": {},
        }
        return "sha256:" + hashlib.sha256(canonical_json(settings)).hexdigest()


def artifact_hash_of(sha256_hex: str, fingerprint: Fingerprint | str, options: Mapping[str, Any]) -> int:
    """Return the item hash (u64) that the artifact path gives to an image.

    ``sha256_hex`` is of the encoded bytes that the engine gets, ``options`` per-image request options: those that are
    set, except ``detail: auto``. ``fingerprint`` may be given as its digest, so that it is computed once per engine.
    Raises ``ValueError`` for an option that has no canonical form.
    """
    named = {
        "content_digest": f"sha256:{sha256_hex}",
        "modality": "image",
        "processor_fingerprint": fingerprint if isinstance(fingerprint, str) else fingerprint.digest(),
        "preprocess_kwargs": dict(options),
    }
    key = hashlib.sha256(canonical_json(named)).digest()
    parts = (_FEATURE_TAG, key, b"\0")
    framed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return int.from_bytes(hashlib.sha256(framed).digest()[:8], "big")


def canonical_json(value: Any) -> bytes:
    """Return the engine's form of JSON-like data, in which every value names its type. Raises ``ValueError``."""
    return compact_json(_typed(value)).encode()


def _typed(value: Any) -> dict[str, Any]:
    match value:
        case None:
            return {"type": "none"}
        case bool():
            return {"type": "bool", "value": value}
        case int():
            return {"type": "int", "value": str(value)}
        case float():
            return {"type": "float64", "bits": struct.pack("!d", value).hex()}
        case str():
            return {"type": "str", "value": value}
        case Mapping():
            pairs = [[_typed(name), _typed(item)] for name, item in value.items()]
            return {"type": "mapping", "items": sorted(pairs, key=lambda pair: compact_json(pair[0]))}
        case list():
            return {"type": "list", "items": [_typed(item) for item in value]}
        case _:
            raise ValueError(f"{type(value).__name__} has no canonical form")


def compact_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
