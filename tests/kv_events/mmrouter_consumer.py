"""This project's consumer, for ``check.py``: a sidecar's relay and a router's fleet, over the wire's form of the feed.

PYTHONPATH=.:tests .venv/bin/python tests/kv_events/check.py -- .venv/bin/python tests/kv_events/mmrouter_consumer.py
"""

import json
import sys
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmrouter_lib import feed
from mmrouter_lib.block_keys import Span, block_keys
from mmrouter_lib.media_identity import foreign_identity, from_wire
from mmrouter_router.fleet.cache_query import cache_query
from mmrouter_router.fleet.workers import Fleet, Member, Target
from mmrouter_router.scheduling.candidate_columns import CandidateGroup, CandidateRow
from mmrouter_router.telemetry.metrics import Metrics as RouterMetrics
from mmrouter_sidecar.engine.event_order import digest_of
from mmrouter_sidecar.feed.relay import EventRelay
from mmrouter_sidecar.metrics import Metrics
from mmrouter_sidecar.settings import CurveKeys, Settings


class Followed:
    """An engine as a sidecar and a router follow it. ``folder``: where the sidecar keeps its journal. ``drafts``: the
    engine has a drafter that reads hidden states. ``chunk``: tokens of a chunk of the model's attention, 0 without.
    """

    def __init__(self, folder: Path, engine: str, release: str, *, drafts: bool, chunk: int = 0) -> None:
        pod, keys = ("uid", "127.0.0.1", "127.0.0.1"), CurveKeys(b"", b"", ())
        drafter = "drops" if drafts else ""
        self.settings = Settings(
            *pod, engine, "m", "main", 1, bytes(range(32)), keys, *[folder] * 4, buffer_events=10_000, drafter=drafter
        )
        self._frames: list[feed.Published] = []
        self.relay = EventRelay(self.settings, Metrics(), self._frames.append)
        self.relay.update_facts(version=release)
        self.fleet = Fleet(RouterMetrics(), chunk=chunk)
        self.worker = self.fleet.join(Member("uid", "w", "127.0.0.1", "worker", "worker"))
        self._answer(self.fleet.feed_connected(self.worker))
        self._batches = 0

    def apply(self, payloads: Sequence[bytes]) -> None:
        for payload in payloads:
            self.relay.batch(0, self._batches, payload, digest_of(payload))
            self._batches += 1
        self.relay.flush()
        while self._frames:
            frame = feed.decode_published(feed.encode(self._frames.pop(0)))
            self._answer(self.fleet.on_published(self.worker, frame))

    def promised(self, ids: Sequence[int], images: Sequence[Span], salt: str | None, lora: str | None) -> int:
        """Return the tokens that a router expects the engine to have."""
        if not (size := self.relay.ledger.block_size):
            return 0
        keys, query = self._keys(ids, images, salt, lora), cache_query([Target(self.worker, 0, size)])
        hits = self.fleet.lookup(keys, len(ids), query)
        return min(hits[self.worker.slots[0]], (len(ids) - 1) // size) * size

    def promised_with_tiers(
        self, ids: Sequence[int], images: Sequence[Span], salt: str | None, lora: str | None
    ) -> tuple[int, int]:
        """Return the tokens that a router expects on the device, and those that follow in lower tiers."""
        if not (size := self.relay.ledger.block_size):
            return 0, 0
        target = Target(self.worker, 0, size)
        group = CandidateGroup.of(self.fleet, target.key_form, [CandidateRow.of(self.fleet, target, scored=True)])
        (row,) = group.table(self._keys(ids, images, salt, lora), len(ids), (), 0.0)
        return min(row.overlap, (len(ids) - 1) // size) * size, row.tier * size

    def bounds(self, ids: Sequence[int], salt: str | None, lora: str | None) -> tuple[int, int]:
        """Return the least and the most tokens that a router expects of an engine that hides evictions."""
        if not (size := self.relay.ledger.block_size):
            return 0, 0
        target = Target(self.worker, 0, size)
        group = CandidateGroup.of(self.fleet, target.key_form, [CandidateRow.of(self.fleet, target, scored=True)])
        (row,) = group.table(self._keys(ids, (), salt, lora), len(ids), (), 0.0, proved=False)
        return row.overlap * size, min(row.overlap + row.unproved, (len(ids) - 1) // size) * size

    def of_primary_alone(self, ids: Sequence[int], images: Sequence[Span], salt: str | None, lora: str | None) -> int:
        """Return the tokens that an index of one group expects, which holds every block of a hit."""
        if not (size := self.relay.ledger.block_size):
            return 0
        slot = self.worker.slots[0]
        hits = self.fleet.index.match(self._keys(ids, images, salt, lora), [slot])
        return min(hits[slot], (len(ids) - 1) // size) * size

    def _keys(self, ids: Sequence[int], images: Sequence[Span], salt: str | None, lora: str | None) -> "array[int]":
        size, seed = self.relay.ledger.block_size, self.settings.seed(lora, salt)
        wide = self.settings.engine == "sglang"  # whose ids of images have 62 bits
        return block_keys(array("Q" if wide else "I", ids), size, images, seed, self.worker.layout.lookahead)

    def _answer(self, requests: Sequence[feed.Request]) -> None:
        waiting = list(requests)
        while waiting:
            for reply in self.relay.answer(feed.decode_request(feed.encode(waiting.pop(0)))):
                waiting += self.fleet.on_reply(self.worker, feed.decode_reply(feed.encode(reply)))


class Consumer:
    """Takes the lines of one recording."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._followed: Followed | None = None

    def take(self, line: dict[str, Any]) -> int | None:
        if "kv_events" in line:
            chunk = max((fields.get("attention_chunk_size", 0) for _, fields in line.get("layers", ())), default=0)
            drafts = bool(line["drafter"])
            self._followed = Followed(self._folder, line["engine"], line["release"], drafts=drafts, chunk=chunk)
        assert self._followed is not None, "the first line names the engine"
        if "events" in line:
            self._followed.apply([bytes.fromhex(line["events"])])
        if (request := line.get("request")) is None:
            return None
        images = [
            Span(offset, length, from_wire(identity) or foreign_identity(identity))
            for identity, offset, length in request["images"]
        ]
        return self._followed.promised(request["tokens"], images, request["salt"], request["adapter"])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        consumer = Consumer(Path(folder))
        for line in sys.stdin:
            if (hit := consumer.take(json.loads(line))) is not None:
                print(json.dumps({"hit": hit}), flush=True)


if __name__ == "__main__":
    main()
