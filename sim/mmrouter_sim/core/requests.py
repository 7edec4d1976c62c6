"""A request inside a rank, and block hashes as vLLM computes them from token ids, images, LoRA and cache salt.

    hash[i]  = H((hash[i-1], tuple(token ids), extra keys or None))
    hash[-1] = H(seed text)

``H`` is SHA-256 over the canonical CBOR (``sha256_cbor``) or the pickle (``sha256``) of its argument. The hashed extra
keys are tagged with their kind, the published ones are not (docs/engine-facts/vllm.md#block-hashes). Nothing here
comes from ``mmrouter_lib.block_keys``, so that engine and router cannot agree merely by calling the same function.
"""

import hashlib
import os
import pickle
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import cbor2

Hash = Callable[[object], bytes]
ExtraKey = tuple[str, str] | tuple[str, str, int] | tuple[str, str, str]
"""One hashed extra key: ("lora", name, path), ("mm", identifier, start - block start) or ("cache_salt", salt)."""

SEED = "vllm-none-hash"
"""Seed of the chain when PYTHONHASHSEED is not set."""

_LOW_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Media:
    """One image's placeholder tokens in the expanded prompt: identifier, offset and length in tokens."""

    identifier: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


class Adapter(NamedTuple):
    """A LoRA adapter that an engine has loaded. ``number``: its id in this process, from 1."""

    name: str
    path: str
    number: int = 1


def sha256_cbor(value: object) -> bytes:
    """Return the SHA-256 of the canonical CBOR of a value."""
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


def sha256_pickle(value: object) -> bytes:
    """Return the SHA-256 of the pickle of a value."""
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


ALGORITHMS: dict[str, Hash] = {"sha256": sha256_pickle, "sha256_cbor": sha256_cbor}
"""The algorithms that are equal across engines and restarts; vLLM's xxhash ones start from random bytes."""


def first_parent(hash_: Hash, seed: str | None = None) -> bytes:
    """Return the parent of a chain's first block. ``seed`` defaults to PYTHONHASHSEED, else to the constant."""
    return hash_(seed if seed is not None else os.environ.get("PYTHONHASHSEED") or SEED)


def extra_keys(
    start: int, end: int, media: Sequence[Media], *, salt: str | None = None, lora: Adapter | None = None
) -> tuple[ExtraKey, ...]:
    """Return the tagged extra keys of the block of tokens [start, end): LoRA, media in prompt order, salt."""
    keys: list[ExtraKey] = []
    if lora is not None:
        keys.append(("lora", lora.name, lora.path))
    keys += [("mm", m.identifier, m.offset - start) for m in media if m.offset < end and m.end > start]
    if salt and start == 0:
        keys.append(("cache_salt", salt))
    return tuple(keys)


def block_hash(hash_: Hash, parent: bytes, tokens: Sequence[int], keys: tuple[ExtraKey, ...]) -> bytes:
    return hash_((parent, tuple(tokens), keys or None))


def published_keys(keys: tuple[ExtraKey, ...]) -> list[Any] | None:
    """Return the extra keys as an event shows them: untagged, media as pairs, ``None`` when there are none."""
    return [list(key[1:]) if key[0] == "mm" else key[1] for key in keys] or None


def published_int(digest: bytes) -> int:
    """Return the form in which the engine publishes a digest by default: its low 8 bytes, unsigned, big-endian."""
    return int.from_bytes(digest, "big") & _LOW_64


Sampler = Callable[[int], int]
"""Position of the answer token (0 for the first) -> token id."""

Finish = Literal["stop", "length", "abort"]


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and the state of its generation. ``ids`` grows as tokens are sampled."""

    id: str
    ids: "array[int]"  # array('I'): the expanded prompt, then the answer
    sample: Sampler
    max_tokens: int
    media: tuple[Media, ...] = ()  # in prompt order
    salt: str | None = None
    lora: Adapter | None = None
    stop_ids: frozenset[int] = frozenset()
    report_hits: bool = False  # kv_cache_report_mode=full: announce reused blocks again
    external: int = 0  # prompt tokens whose keys and values came from another engine
    hold: bool = False  # its blocks stay after its end until another engine has fetched them

    prompt_length: int = field(init=False)
    computed: int = field(default=0, init=False)  # tokens whose keys and values are in blocks
    blocks: list[int] = field(default_factory=list, init=False)
    stored: int = field(default=0, init=False)  # blocks of this request that are findable by hash
    digests: list[bytes] = field(default_factory=list, init=False)  # of every full block of ids
    cached_tokens: int | None = field(default=None, init=False)  # served from the prefix cache at first admission
    preemptions: int = field(default=0, init=False)
    finished: Finish | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.ids)

    @property
    def answer_length(self) -> int:
        return len(self.ids) - self.prompt_length
