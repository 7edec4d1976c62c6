"""Ways to choose an engine: the router's own code, and what other routers do, as far as it is written down.

None of them sees the engines: they see requests, first tokens, ends and, where they listen, the feed.
"""

import random
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from xxhash import xxh3_64_intdigest

from bench.cluster.workloads import Ask
from bench.placing import router_objects as bench_fleet
from mmrouter_lib import feed
from mmrouter_router.fleet.index import Index
from mmrouter_router.request.prepare import Prepared
from mmrouter_router.scheduling.placer import Booking, Placer
from mmrouter_router.scheduling.scoring import Weights

MATCH: Final = 0.3
IMBALANCE: Final = (64, 1.5)
"""Of smg's cache_aware policy: share of the text that has to match, and requests by which the most and the least loaded
worker may differ, absolutely and as a ratio (its documented defaults)."""


class Policy(Protocol):
    """Chooses. ``listens``: it takes what engines tell of their caches."""

    listens: bool

    def choose(self, number: int, ask: Ask, now: float) -> int:
        """Return the engine for a request and count it as sent there."""

    def answered(self, number: int) -> None:
        """Its first token came."""

    def ended(self, number: int) -> None:
        """It is over."""

    def told(self, engine: int, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """An engine's cache changed."""


class _Deaf:
    """What policies do that only count requests in flight."""

    listens = False

    def __init__(self, engines: int) -> None:
        self._engines = engines
        self._flying = [0] * engines
        self._where: dict[int, int] = {}

    def _sent(self, number: int, engine: int) -> int:
        self._flying[engine] += 1
        self._where[number] = engine
        return engine

    def answered(self, number: int) -> None:
        """Nothing follows from it."""

    def ended(self, number: int) -> None:
        """One less in flight."""
        self._flying[self._where.pop(number)] -= 1

    def told(self, engine: int, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Nobody tells."""


class RoundRobin(_Deaf):
    """Takes turns."""

    def choose(self, number: int, ask: Ask, now: float) -> int:
        """Return the next one."""
        return self._sent(number, number % self._engines)


class LeastLoaded(_Deaf):
    """Fewest requests in flight; ties in turns."""

    def choose(self, number: int, ask: Ask, now: float) -> int:
        """Return the one with fewest."""
        least = min(self._flying)
        tied = [engine for engine, flying in enumerate(self._flying) if flying == least]
        return self._sent(number, tied[number % len(tied)])


class ConsistentHash(_Deaf):
    """Rendezvous hash of the conversation: as with a session header, every turn goes to the same engine."""

    def choose(self, number: int, ask: Ask, now: float) -> int:
        """Return the one with the lowest hash."""
        ties = [xxh3_64_intdigest(b"%d" % engine, ask.session & (1 << 64) - 1) for engine in range(self._engines)]
        return self._sent(number, ties.index(min(ties)))


class TextPrefix(_Deaf):
    """The cache_aware policy of smg and sglang-router: a tree of the texts that were sent, one per worker, images
    unknown; nothing is heard of what engines dropped. The best match wins if it is long enough, else the smallest tree;
    where the load differs too much, the shortest queue.
    """

    def __init__(self, engines: int) -> None:
        super().__init__(engines)
        self._tree = Index()
        self._slots = [self._tree.join() for _ in range(engines)]

    def choose(self, number: int, ask: Ask, now: float) -> int:
        """Return what the tree or the queue says."""
        flying, (absolute, ratio) = self._flying, IMBALANCE
        if max(flying) - min(flying) > absolute and max(flying) > ratio * min(flying):
            engine = flying.index(min(flying))
        else:
            found = self._tree.match(ask.text_keys, self._slots)
            engine = min(range(self._engines), key=lambda e: (-found[self._slots[e]], flying[e]))
            if found[self._slots[engine]] <= MATCH * len(ask.text_keys):
                engine = min(range(self._engines), key=lambda e: (self._tree.held(self._slots[e]), e))
        self._tree.store(self._slots[engine], ask.text_keys)
        return self._sent(number, engine)


class Dynamo:
    """The cost of Dynamo's KV router with its defaults and temperature 0, over the events of all engines:

        max(0, (prompt tokens + prefill tokens there) / block - overlap) + blocks in use there with this request

    Prefill tokens leave at the first token, blocks at the end; blocks that requests share are in use once. Ties are
    broken at random. Prompts count up to a whole block.
    """

    listens = True

    def __init__(self, engines: int, block_size: int) -> None:
        self._size = block_size
        self._index, self._active = Index(), Index()
        self._slots = [self._index.join() for _ in range(engines)]
        self._actives = [self._active.join() for _ in range(engines)]
        self._used: list[Counter[int]] = [Counter() for _ in range(engines)]
        self._tails = [0] * engines
        self._prefill = [0.0] * engines
        self._flying: dict[int, tuple[int, Ask, float]] = {}
        self._random = random.Random(1)

    def choose(self, number: int, ask: Ask, now: float) -> int:
        """Return the one of least cost."""
        overlap = self._index.match(ask.keys, self._slots)
        shared = self._active.match(ask.keys, self._actives)
        blocks = -(-ask.tokens // self._size)
        costs = []
        for engine, (slot, active) in enumerate(zip(self._slots, self._actives, strict=True)):
            prefill = max(0.0, (ask.tokens + self._prefill[engine]) / self._size - overlap[slot])
            used = self._active.held(active) + self._tails[engine]
            costs.append(prefill + used + blocks - shared[active])
        least = min(costs)
        engine = self._random.choice([engine for engine, cost in enumerate(costs) if cost == least])
        fresh = max(0.0, ask.tokens - overlap[self._slots[engine]] * self._size)
        self._prefill[engine] += fresh
        self._flying[number] = engine, ask, fresh
        used_there = self._used[engine]
        used_there.update(ask.keys)
        self._active.store(self._actives[engine], ask.keys)
        self._tails[engine] += blocks - len(ask.keys)
        return engine

    def answered(self, number: int) -> None:
        """Its prompt is computed."""
        engine, ask, fresh = self._flying[number]
        self._prefill[engine] -= fresh
        self._flying[number] = engine, ask, 0.0

    def ended(self, number: int) -> None:
        """Its blocks are free."""
        engine, ask, fresh = self._flying.pop(number)
        self._prefill[engine] -= fresh
        used = self._used[engine]
        used.subtract(ask.keys)
        gone = [key for key in ask.keys if not used[key]]
        for key in gone:
            del used[key]
        self._active.remove(self._actives[engine], gone)
        self._tails[engine] -= -(-ask.tokens // self._size) - len(ask.keys)

    def told(self, engine: int, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Keep the index equal to the cache."""
        self._index.remove(self._slots[engine], keys_of(removed))
        self._index.store(self._slots[engine], keys_of(stored))


class Ours:
    """The router itself: feed frames into its fleet, its placer, its bookings."""

    listens = True

    def __init__(self, engines: int, block_size: int) -> None:
        self.fleet, self.workers = bench_fleet.synced(engines, block_size=block_size)
        self._engines = engines
        self._placer = bench_fleet.placer(self.fleet, engines)
        self._where = {worker.member.uid: number for number, worker in enumerate(self.workers)}
        self._size = block_size
        self._seqs = [0] * engines
        self._bookings: dict[int, Booking] = {}

    def weigh(self, weights: Weights) -> None:
        """Take other weights than the router does."""
        self._placer = Placer(bench_fleet.deployment(replicas=self._engines), self.fleet, weights)

    def choose(self, number: int, ask: Ask, now: float) -> int:
        """Return where the placer sends it."""
        decision = self._placer.place(prepared(ask, self._size))
        self._bookings[number] = self._placer.begin(decision)
        return self._where[decision.target.worker.member.uid]

    def answered(self, number: int) -> None:
        """As the forwarder does at the first byte."""
        self._bookings[number].answered()

    def ended(self, number: int) -> None:
        """As the forwarder does at the last one."""
        self._bookings.pop(number).end()

    def told(self, engine: int, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """A delta as a sidecar sends it."""
        self._seqs[engine] += 1
        frame = feed.Delta(bench_fleet.EPOCH, self._seqs[engine], 0.0, 0, 0, "GPU", b"".join(stored), b"".join(removed))
        self.fleet.published(self.workers[engine], frame)

    def holds(self, engine: int) -> set[int]:
        """Return what the index says of an engine."""
        return self.fleet.index.keys(self.workers[engine].slots[0])


def prepared(ask: Ask, block_size: int) -> Prepared:
    """Return what the router's stages before the placer make of a request."""
    return Prepared(
        request=bench_fleet.REQUEST,
        salt=None,
        images=(),
        ids=array("I", bytes(4 * ask.tokens)),
        spans=ask.spans,
        exactness="exact",
        reasons=(),
        seed=0,
        fingerprint=ask.session & (1 << 64) - 1,
        _keys={(block_size, None): ask.keys},
    )


def keys_of(names: Sequence[bytes]) -> Iterator[int]:
    """Return the router's keys of the engine's names."""
    return (int.from_bytes(name, "little") for name in names)
