"""Routing policies of the simulation: the router's own code, and models of other routers from their documentation.

A policy does not see the engines, but requests, first tokens, ends and cache changes.
"""

import random
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from xxhash import xxh3_64_intdigest

from bench.cluster.workloads import ClusterRequest
from bench.placing import workload
from mmrouter_lib import feed
from mmrouter_router.fleet.index import Index
from mmrouter_router.request.prepared import Prepared
from mmrouter_router.scheduling.placer import Booking

MATCH: Final = 0.3
IMBALANCE: Final = (64, 1.5)
"""Documented defaults of smg's cache_aware policy: share of the text that must match, and the difference of requests
between the most and the least loaded worker, absolute and as a ratio, from which load decides."""


class Policy:
    """Chooses engines, in turns unless a subclass chooses otherwise, and counts requests in flight."""

    def __init__(self, engines: int) -> None:
        self._engines = engines
        self._flying = [0] * engines
        self._where: dict[int, int] = {}

    def choose(self, number: int, request: ClusterRequest, now: float) -> int:
        """Return the engine of a request and count the request as sent."""
        return self._sent(number, number % self._engines)

    def _sent(self, number: int, engine: int) -> int:
        self._flying[engine] += 1
        self._where[number] = engine
        return engine

    def answered(self, number: int) -> None:
        """Take a first token."""

    def ended(self, number: int) -> None:
        """Take the end of a request."""
        self._flying[self._where.pop(number)] -= 1

    def cache_changed(self, engine: int, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Take changes of an engine's cache."""


class LeastLoaded(Policy):
    """Fewest requests in flight; ties in turns."""

    def choose(self, number: int, request: ClusterRequest, now: float) -> int:
        least = min(self._flying)
        tied = [engine for engine, flying in enumerate(self._flying) if flying == least]
        return self._sent(number, tied[number % len(tied)])


class ConsistentHash(Policy):
    """Rendezvous hash of the conversation: as with a session header, every turn goes to the same engine."""

    def choose(self, number: int, request: ClusterRequest, now: float) -> int:
        ties = [xxh3_64_intdigest(b"%d" % engine, request.session & (1 << 64) - 1) for engine in range(self._engines)]
        return self._sent(number, ties.index(min(ties)))


class TextPrefix(Policy):
    """The cache_aware policy of smg and sglang-router: a tree of sent texts per worker, without images or evictions.
    The best match wins if it is long enough, else the smallest tree; where loads differ too much, the shortest queue.
    """

    def __init__(self, engines: int) -> None:
        super().__init__(engines)
        self._tree = Index()
        self._slots = [self._tree.join() for _ in range(engines)]

    def choose(self, number: int, request: ClusterRequest, now: float) -> int:
        flying, (absolute, ratio) = self._flying, IMBALANCE
        if max(flying) - min(flying) > absolute and max(flying) > ratio * min(flying):
            engine = flying.index(min(flying))
        else:
            depths = self._tree.match(request.text_keys, self._slots)
            engine = min(range(self._engines), key=lambda e: (-depths[self._slots[e]], flying[e]))
            if depths[self._slots[engine]] <= MATCH * len(request.text_keys):
                engine = min(range(self._engines), key=lambda e: (self._tree.held(self._slots[e]), e))
        self._tree.store(self._slots[engine], request.text_keys)
        return self._sent(number, engine)


class Dynamo(Policy):
    """The cost of Dynamo's KV router with its defaults and temperature 0, over the events of all engines:

        max(0, (prompt tokens + prefill tokens there) / block - overlap) + blocks in use there with this request

    Prefill tokens leave at the first token, blocks at the end; shared blocks count once. Ties are broken at random.
    Prompts are rounded up to a whole block.
    """

    def __init__(self, engines: int, block_size: int) -> None:
        self._size = block_size
        self._index, self._active = Index(), Index()
        self._slots = [self._index.join() for _ in range(engines)]
        self._actives = [self._active.join() for _ in range(engines)]
        self._used: list[Counter[int]] = [Counter() for _ in range(engines)]
        self._tails = [0] * engines
        self._prefill = [0.0] * engines
        self._requests: dict[int, tuple[int, ClusterRequest, float]] = {}
        self._random = random.Random(1)

    def choose(self, number: int, request: ClusterRequest, now: float) -> int:
        overlap = self._index.match(request.keys, self._slots)
        shared = self._active.match(request.keys, self._actives)
        blocks = -(-request.tokens // self._size)
        costs = []
        for engine, (slot, active) in enumerate(zip(self._slots, self._actives, strict=True)):
            prefill = max(0.0, (request.tokens + self._prefill[engine]) / self._size - overlap[slot])
            used = self._active.held(active) + self._tails[engine]
            costs.append(prefill + used + blocks - shared[active])
        least = min(costs)
        engine = self._random.choice([engine for engine, cost in enumerate(costs) if cost == least])
        fresh = max(0.0, request.tokens - overlap[self._slots[engine]] * self._size)
        self._prefill[engine] += fresh
        self._requests[number] = engine, request, fresh
        self._used[engine].update(request.keys)
        self._active.store(self._actives[engine], request.keys)
        self._tails[engine] += blocks - len(request.keys)
        return engine

    def answered(self, number: int) -> None:
        engine, request, fresh = self._requests[number]
        self._prefill[engine] -= fresh
        self._requests[number] = engine, request, 0.0

    def ended(self, number: int) -> None:
        engine, request, fresh = self._requests.pop(number)
        self._prefill[engine] -= fresh
        used = self._used[engine]
        used.subtract(request.keys)
        gone = [key for key in request.keys if not used[key]]
        for key in gone:
            del used[key]
        self._active.remove(self._actives[engine], gone)
        self._tails[engine] -= -(-request.tokens // self._size) - len(request.keys)

    def cache_changed(self, engine: int, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        self._index.remove(self._slots[engine], keys_of(removed))
        self._index.store(self._slots[engine], keys_of(stored))


class Ours(Policy):
    """The router itself: its fleet, fed with frames, its placer and its bookings."""

    def __init__(self, engines: int, block_size: int) -> None:
        self.fleet, self.workers = workload.synced(engines, block_size=block_size)
        self._placer = workload.placer(self.fleet, engines)
        self._numbers = {worker.member.uid: number for number, worker in enumerate(self.workers)}
        self._size = block_size
        self._seqs = [0] * engines
        self._bookings: dict[int, Booking] = {}

    def choose(self, number: int, request: ClusterRequest, now: float) -> int:
        decision = self._placer.place(prepared(request, self._size))
        self._bookings[number] = self._placer.begin(decision)
        return self._numbers[decision.target.worker.member.uid]

    def answered(self, number: int) -> None:
        self._bookings[number].answered()

    def ended(self, number: int) -> None:
        self._bookings.pop(number).end()

    def cache_changed(self, engine: int, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Publish a delta as a sidecar does."""
        self._seqs[engine] += 1
        frame = feed.Delta(workload.EPOCH, self._seqs[engine], 0.0, 0, 0, "GPU", b"".join(stored), b"".join(removed))
        self.fleet.on_published(self.workers[engine], frame)

    def holds(self, engine: int) -> set[int]:
        return self.fleet.index.keys(self.workers[engine].slots[0])


def prepared(request: ClusterRequest, block_size: int) -> Prepared:
    return Prepared(
        request=workload.REQUEST,
        salt=None,
        images=(),
        ids=array("I", bytes(4 * request.tokens)),
        spans=request.spans,
        exactness="exact",
        reasons=(),
        seed=0,
        fingerprint=request.session & (1 << 64) - 1,
        _keys={(block_size, None, 0): request.keys},
    )


def keys_of(names: Sequence[bytes]) -> Iterator[int]:
    return (int.from_bytes(name, "little") for name in names)
