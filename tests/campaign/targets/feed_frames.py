"""Frames of a sidecar's feed in any order, cut and changed: a router refuses and counts them, or follows them.

Afterwards the router is brought back into step by one snapshot, and its index then equals that snapshot.
"""

import random
from collections.abc import Sequence
from typing import Self

import msgspec
from campaign.mutation import MSGPACK_WORDS, mutated
from campaign.target import BrokenPropertyError, Target

from mmrouter_lib import feed
from mmrouter_lib.block_keys import pack_keys
from mmrouter_lib.cache_layout import CacheGroup
from mmrouter_lib.feed import Delta, Heartbeat, ReplayPart, SnapshotPart
from mmrouter_router.fleet.workers import Fleet, Member, Worker
from mmrouter_router.telemetry.metrics import Metrics

APART = b"\n--\n"
SNAPSHOT = 3  # id of a router's first request for a snapshot
PUBLISHED, REPLY = b"P", b"R"
BEAT = Heartbeat(
    "uid/boot-1", 5, 3, "vllm", "up", "0.32.0", 16, "m", "main", {"a": "b"}, 1, False, None, (), {"c": "d"}
)
CANARY = feed.CanaryReport(5, "True", "", "", 3, "r")
OTHERS = feed.SharedDirectory(1, 2, 3, 4, False)


class FeedFrames(Target):
    """An input: frames, each with one letter in front that says on which socket it comes."""

    name = "feed_frames"
    short = 800
    words = (
        *MSGPACK_WORDS,
        *(b"\x91" * 200, b"\xc6\xff\xff\xff\xff", b"\xd3" + b"\xff" * 8, b"\xce\xff\xff\xff\xff"),
        *(b"\xa5delta", b"\xa9heartbeat", b"\xadsnapshot_part", b"\xabreplay_part"),
        *(b"\x01", b"\x02", b"\xff", b"\xcb\x7f\xf0" + bytes(6), APART + PUBLISHED, APART + REPLY),
    )

    def __enter__(self) -> Self:
        self._fleet, self._number = Fleet(Metrics()), 0
        return self

    def seeds(self) -> list[bytes]:
        snapshot = SnapshotPart(SNAPSHOT, "uid/boot-1", 5, 3, 0, 0, "GPU", pack_keys([1, 2, 3]), True)
        deltas = [Delta(5, number, 0.0, 0, 0, "GPU", pack_keys([number * 10]), pack_keys([1])) for number in (4, 5, 6)]
        cleared = Delta(5, 7, 0.0, 0, 0, "CPU", b"", b"", True)
        groups = (CacheGroup(0, "sliding_window", 8), CacheGroup(1, "full_attention"))
        grouped = msgspec.structs.replace(BEAT, canary=CANARY, groups=groups, shared=OTHERS)
        sighting = feed.ImageObservation(0, 0, None, 3, 4, bytes(32), (1, 2))
        load, work = feed.LoadReport(0, 1.0, 2.0, 0.5), feed.Work("r", 0, 1, 2.0, 3.0)
        streams: list[list[feed.Published | feed.Reply]] = [
            [BEAT, snapshot, *deltas, cleared],
            [BEAT, snapshot, deltas[0], deltas[2], ReplayPart(3, (deltas[1],), True), load, work, sighting],
            [grouped, snapshot, ReplayPart(3, tuple(deltas), False, True), feed.Refused(1, "why"), feed.Accepted(1)],
            [feed.ClaimAnswer(1, True, "r"), feed.DetailPart(1, (feed.RawBatch(1, 0, 1, b"x"),), True), BEAT],
        ]
        return [APART.join(map(_framed, stream)) for stream in streams]

    def draw(self, source: random.Random, kept: Sequence[bytes]) -> bytes:
        frames = source.choice(kept).split(APART)
        if source.random() < 0.3:
            frames += source.choice(kept).split(APART)
            source.shuffle(frames)
            return APART.join(frames[:20])
        place = source.randrange(len(frames))
        frames[place] = frames[place][:1] + mutated(source, (frames[place][1:],), self.words)[:4096]
        return APART.join(frames[:20])

    def check(self, data: bytes) -> str:
        self._number += 1
        uid = f"uid-{self._number}"
        worker = self._fleet.join(Member(uid, "w", "127.0.0.1", "worker", "worker"))
        seen = set()
        try:
            self._fleet.feed_connected(worker)
            with self.product():
                for frame in data.split(APART):
                    seen.add(self._take(worker, frame))
            if worker.sync.synced:
                seen.add("in step")
            self._recover(worker, uid)
        finally:
            self._fleet.leave(uid)
            while self._fleet.index.sweep():
                pass
        return " ".join(sorted(seen))

    def _take(self, worker: Worker, frame: bytes) -> str:
        try:
            if frame[:1] == REPLY:
                reply = feed.decode_reply(frame[1:])
                self._fleet.on_reply(worker, reply)
                return type(reply).__name__
            published = feed.decode_published(frame[1:])
            self._fleet.on_published(worker, published)
        except feed.FeedError:
            return "refused"
        return type(published).__name__

    def _recover(self, worker: Worker, uid: str) -> None:
        """A new epoch with its heartbeat and snapshot puts the index in step, whatever came before."""
        epoch = worker.sync.epoch + 1
        if epoch >= 2**63:
            return  # no clock gives such an epoch
        beat = Heartbeat(f"{uid}/new", epoch, 0, "vllm", "up", "0.32.0", 16, "m", "main", {})
        requests = self._fleet.on_published(worker, feed.decode_published(feed.encode(beat)))
        for _ in range(5):
            for request in requests:
                keys = pack_keys([11, 12, 13])
                part = SnapshotPart(request.id, f"{uid}/new", epoch, 0, 0, 0, "GPU", keys, True)
                requests = self._fleet.on_reply(worker, feed.decode_reply(feed.encode(part)))
        indexed = {rank: self._fleet.index.keys(slot) for rank, slot in worker.slots.items()}
        if not worker.sync.synced or {rank: keys for rank, keys in indexed.items() if keys} != {0: {11, 12, 13}}:
            raise BrokenPropertyError(f"after a snapshot the index is {indexed}, in step: {worker.sync.synced}")


def _framed(frame: feed.Published | feed.Reply) -> bytes:
    published = isinstance(frame, Delta | Heartbeat | feed.LoadReport | feed.ImageObservation | feed.Work)
    return (PUBLISHED if published else REPLY) + feed.encode(frame)
