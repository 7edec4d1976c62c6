"""A relay without sockets, everything that it published, and random engine batches for it."""

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from unit.sidecar.conftest import CLEARED, batch, keys_of, removed, stored

from mmrouter_lib import feed
from mmrouter_sidecar.engine.event_order import digest_of
from mmrouter_sidecar.feed.relay import EventRelay
from mmrouter_sidecar.metrics import Metrics
from mmrouter_sidecar.settings import Settings


class Bench:
    """A relay, everything that it published, and a way to feed it random engine batches."""

    def __init__(self, settings: Settings, seed: int = 0) -> None:
        self.frames: list[Any] = []
        self.settings, self.chance = settings, random.Random(seed)
        self.relay = EventRelay(settings, Metrics(), self.frames.append)
        self.numbers = itertools.count()
        self.held: list[int] = []
        self.hashes = itertools.count(1)
        self.after: list[Bench] = []
        self.states = [self.state]

    def reopened(self, *, killed: bool = False, **changes: Any) -> "Bench":
        """The relay after a restart, which is closed with this one."""
        if not killed:
            self.relay.close()
        self.after.append(Bench(replace(self.settings, **changes)))
        return self.after[-1]

    def close(self) -> None:
        self.relay.close()
        for bench in self.after:
            bench.close()

    def batch(self, *events: Any, rank: int = 0) -> None:
        raw = batch(*events, rank=rank)
        self.relay.batch(rank, next(self.numbers), raw, digest_of(raw))

    def flushed(self, *events: Any, rank: int = 0) -> None:
        self.batch(*events, rank=rank)
        self.relay.flush()

    def record(self) -> None:
        """Publish what changed, and keep the state that the journal has now."""
        self.relay.flush()
        self.states.append(self.state)

    def anything(self) -> None:
        """One random batch: mostly new blocks, some second copies, removals, a rare clear."""
        choice = self.chance.random()
        if choice < 0.6 or not self.held:
            parent = self.chance.choice([None, *self.held])
            new = [next(self.hashes) for _ in range(self.chance.randint(1, 4))]
            self.held += new
            self.batch(stored(new, parent))
        elif choice < 0.7:
            again = self.chance.choice(self.held)
            self.held.append(again)
            self.batch(stored([again]))
        elif choice < 0.97:
            self.batch(removed(self.held.pop(self.chance.randrange(len(self.held)))))
        else:
            self.held.clear()
            self.batch(CLEARED)

    def of(self, kind: type) -> list[Any]:
        return [frame for frame in self.frames if isinstance(frame, kind)]

    def ask(self, request: Any) -> list[Any]:
        return list(self.relay.answer(request))

    def index(self) -> dict[Any, set[int]]:
        return keys_of(self.ask(feed.SnapshotRequest(1)))

    @property
    def beats(self) -> list[feed.Heartbeat]:
        return self.of(feed.Heartbeat)

    @property
    def journal(self) -> Path:
        return self.settings.state_dir / "ledger.journal"

    @property
    def state(self) -> Any:
        relay = self.relay
        held = {place: dict(cache.blocks) for place, cache in relay.ledger.tables.items() if cache.blocks}
        copies = {place: dict(cache.copies) for place, cache in relay.ledger.tables.items() if cache.copies}
        return relay.worker, relay.epoch, relay.seq, held, copies, dict(relay.proofs), relay.canary.result
