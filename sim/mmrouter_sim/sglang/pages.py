"""SGLang's pages: their digests from token ids, and the events about them (docs/engine-facts/sglang.md#event-frames).

    digest[i]  = SHA-256(digest[i-1] || words of page i)
    digest[-1] = nothing, or SHA-256 of a tag and the cache salt

Images are in the ids themselves, as sentinels made from the item hash. Nothing here comes from the router's library,
so that engine and router cannot agree merely by calling the same function.
"""

import hashlib
import json
import struct
import uuid
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mmrouter_sim.core.events import BlockRemoved, Dialect, Event
from mmrouter_sim.core.requests import Adapter, Request

VERSION = "0.5.23"
"""The release whose behaviour is simulated."""
TRANSFORMERS = "5.19.0"
"""The release of transformers that it pins."""
DIGEST_BYTES = 32
PROCESSOR = "sglang.srt.multimodal.processors.qwen_vl.QwenVLImageProcessor"
WRAPPERS = {
    "qwen2_vl": "transformers.models.qwen2_vl.processing_qwen2_vl.Qwen2VLProcessor",
    "qwen2_5_vl": "transformers.models.qwen2_5_vl.processing_qwen2_5_vl.Qwen2_5_VLProcessor",
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        "transformers.models.qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor",
    ),
}
"""Model type -> wrapped processor of transformers, for models whose images are named by their bytes."""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Pages that became findable, in chain order, after ``parent_block_hash``."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    cache_salt: str | None = None
    lora_name: str | None = None


class SglangDialect(Dialect):
    """SGLang: each page is held once, and generated pages become findable when their request ends."""

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size, published=published, single=True)

    def digest(self, request: Request, number: int, ids: "array[int]") -> bytes:
        prior = request.digests[-1][:DIGEST_BYTES] if request.digests else root(request.salt)
        return page(prior, ids) + (namespace(adapter_id(request.lora)) if request.lora else b"")

    def stored(self, request: Request, first: int, last: int) -> BlockStored:
        lora = request.lora.name if request.lora else None
        fields = self._fields(request, first, last)
        return BlockStored(**fields, lora_id=None, cache_salt=request.salt, lora_name=lora)

    def joined(self, events: list[Event]) -> list[Event]:
        """Merge consecutive stores that continue each other, and consecutive removals."""
        out: list[Event] = []
        for event in events:
            match (out[-1] if out else None), event:
                case (BlockStored() as last, BlockStored()) if (
                    event.parent_block_hash == last.block_hashes[-1] and event.cache_salt == last.cache_salt
                ):
                    last.block_hashes += event.block_hashes
                    last.token_ids += event.token_ids
                case (BlockRemoved() as last, BlockRemoved()):
                    last.block_hashes += event.block_hashes
                case _:
                    out.append(event)
        return out


def root(salt: str | None) -> bytes:
    """Return the parent of a prompt's first page."""
    return hashlib.sha256(b"sglang-cache-salt-v1\x00" + salt.encode()).digest() if salt is not None else b""


def page(prior: bytes, ids: "array[int]") -> bytes:
    """Return the digest of one page: 32-bit words, or a mark and 64-bit words where one id needs them."""
    words = struct.pack(f"<B{len(ids)}Q", 0xFF, *ids) if max(ids) >> 32 else struct.pack(f"<{len(ids)}I", *ids)
    return hashlib.sha256(prior + words).digest()


def adapter_id(adapter: Adapter) -> str:
    """Return the id of an adapter that is loaded by a flag."""
    return uuid.uuid5(uuid.NAMESPACE_URL, f"{adapter.name}\0{adapter.path}").hex


def namespace(lora_id: str) -> bytes:
    """Return what is behind the digests of an adapter's pages, so that they are its own."""
    framed = b"\x01" + len(lora_id).to_bytes(8, "little") + lora_id.encode() + b"\x00"
    return hashlib.sha256(b"sglang-kv-event-namespace-v1" + framed).digest()


def published(digest: bytes) -> int:
    """Return the hash in events: 8 bytes of a page's digest, mixed with the adapter's if it has one."""
    short, behind = digest[:8], digest[DIGEST_BYTES:]
    mixed = hashlib.sha256(behind + short).digest()[:8] if behind else short
    return struct.unpack(">q", mixed)[0]  # type: ignore[no-any-return]


def sentinels(item: int) -> tuple[int, int, int, int]:
    digest = hashlib.sha256(b"sglang-mm-wide-pad-v1" + struct.pack(">Q", item)).digest()
    a, b, c, d = (1_000_000 + word % 2**62 for word in struct.unpack(">4Q", digest))
    return a, b, c, d


def padded(ids: Sequence[int], runs: Sequence[tuple[int, int, int]], *, first_only: bool = False) -> "array[int]":
    """Return ids with sentinels in the runs (item hash, start, length). ``first_only``: one value is repeated."""
    out = array("Q", ids)
    for item, start, length in runs:
        four = sentinels(item)
        for number in range(length):
            out[start + number] = four[0 if first_only else number % 4]
    return out


def by_pixels(mode: str, size: tuple[int, int], pixels: bytes) -> int:
    """Return an item hash of the decoded pixels, in place of one of the processed tensor."""
    head = f"{mode} {size[0]} {size[1]}\n".encode()
    return int.from_bytes(hashlib.sha256(head + pixels).digest()[:8], "big")


def by_bytes(data: bytes, fingerprint: str, options: Mapping[str, Any]) -> int:
    """Return the item hash of the artifact path: a hash of the encoded bytes and the processing options."""
    key = text_digest(
        {
            "content_digest": "sha256:" + hashlib.sha256(data).hexdigest(),
            "modality": "image",
            "processor_fingerprint": fingerprint,
            "preprocess_kwargs": options,
        }
    )
    framed = hashlib.sha256()
    for part in (b"multimodal-feature-v1", bytes.fromhex(key[len("sha256:") :]), bytes(1)):
        framed.update(struct.pack(">Q", len(part)) + part)
    return int.from_bytes(framed.digest()[:8], "big")


def fingerprint(
    model_type: str, architectures: list[str] | None, revision: str | None, process_config: Mapping[str, Any]
) -> str:
    """Return the fingerprint of a Qwen-VL processor on CPU, as a digest."""
    parts = {f"{kind}_config": process_config.get(kind, {}) for kind in ("image", "video", "audio")}
    return text_digest(
        {
            "transformers": TRANSFORMERS,
            "processor_class": PROCESSOR,
            "model_type": model_type,
            "architectures": architectures,
            "model_revision": revision,
            "processor_revision": revision,
            "disable_fast_image_processor": False,
            "mm_process_config": process_config,
            "processor": {
                "wrapper_class": WRAPPERS[model_type],
                "gpu_image_decode": True,
                "image_processor_backend": "auto",
                "feature_transport": "cpu",
                "wrapped_processor": None,
                **parts,
            },
            "extra": {},
        }
    )


def text_digest(value: object) -> str:
    """Return the digest of a value's canonical text, in which every part includes its type."""
    return "sha256:" + hashlib.sha256(_text(_tree(value)).encode()).hexdigest()


def _tree(value: object) -> dict[str, object]:
    if isinstance(value, Mapping):
        pairs = sorted(([_tree(key), _tree(item)] for key, item in value.items()), key=lambda pair: _text(pair[0]))
        return {"type": "mapping", "items": pairs}
    if isinstance(value, list):
        return {"type": "list", "items": [_tree(item) for item in value]}
    if isinstance(value, bool):
        return {"type": "bool", "value": value}
    if isinstance(value, float):
        return {"type": "float64", "bits": struct.pack(">d", value).hex()}
    if value is None:
        return {"type": "none"}
    return {"type": "int" if isinstance(value, int) else "str", "value": str(value)}


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
