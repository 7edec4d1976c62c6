"""One request inside a rank, and its chain of block hashes."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from mmrouter_sim.core.hashing import Hash, Media, block_hash, extra_keys, published_keys

Sampler = Callable[[int], int]
"""Position of the answer token (0 for the first) -> token id."""

Finish = Literal["stop", "length", "abort"]


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and the state of its generation. ``ids`` grows as tokens are sampled; times are seconds of the caller's
    clock.
    """

    id: str
    ids: "array[int]"  # array('I'): the expanded prompt, then the answer
    sample: Sampler
    max_tokens: int
    media: tuple[Media, ...] = ()  # in prompt order
    salt: str | None = None
    lora: tuple[str, str] | None = None  # name, path
    stop_ids: frozenset[int] = frozenset()
    report_hits: bool = False  # kv_cache_report_mode=full: announce reused blocks again
    arrived: float = 0.0
    external: int = 0  # prompt tokens whose keys and values came from another engine
    hold: bool = False  # its blocks stay after its end until another engine has fetched them

    prompt_length: int = field(init=False)
    computed: int = field(default=0, init=False)  # tokens whose keys and values are in blocks
    blocks: list[int] = field(default_factory=list, init=False)
    stored: int = field(default=0, init=False)  # blocks of this request that are findable by hash
    digests: list[bytes] = field(default_factory=list, init=False)  # of every full block of ids
    cached_tokens: int | None = field(default=None, init=False)  # served from the prefix cache at first admission
    preemptions: int = field(default=0, init=False)
    started: float | None = field(default=None, init=False)
    first_token: float | None = field(default=None, init=False)
    finished: Finish | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.ids)

    @property
    def answer_length(self) -> int:
        return len(self.ids) - self.prompt_length


class Chain:
    """Computes a request's digests with one algorithm, seed and block size."""

    def __init__(self, hash_: Hash, seed: bytes, block_size: int) -> None:
        self._hash = hash_
        self._seed = seed
        self.block_size = block_size

    def extend(self, request: Request) -> None:
        """Append the digests of the request's new full blocks."""
        size = self.block_size
        for number in range(len(request.digests), len(request.ids) // size):
            start, end = number * size, (number + 1) * size
            keys = extra_keys(start, end, request.media, salt=request.salt, lora=request.lora)
            parent = request.digests[-1] if request.digests else self._seed
            request.digests.append(block_hash(self._hash, parent, request.ids[start:end], keys))

    def published(self, request: Request, first: int, last: int) -> list[list[object] | None]:
        """Return the published extra keys of blocks [first, last)."""
        size = self.block_size
        return [
            published_keys(extra_keys(n * size, (n + 1) * size, request.media, salt=request.salt, lora=request.lora))
            for n in range(first, last)
        ]
