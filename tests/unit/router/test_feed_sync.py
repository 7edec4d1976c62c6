"""However frames are lost, doubled or late, the follower ends with what the sidecar holds or knows that it does not."""

import random

from hypothesis import given
from hypothesis import strategies as st

from mmrouter_lib.block_keys import pack_keys, unpack_keys
from mmrouter_lib.feed import Delta, Heartbeat, ReplayPart, SnapshotPart
from mmrouter_router.fleet.feed_sync import ApplyDelta, AskReplay, AskSnapshot, FeedSync, LoadPart, ResetWorker, Synced

RING = 6


class Sidecar:
    """The other end as the feed defines it: a stream of deltas, a ring, snapshots at (epoch, seq)."""

    def __init__(self) -> None:
        self.worker, self.epoch, self.seq = "pod/boot-1", 1, 0
        self.held: set[int] = set()
        self.ring: list[Delta] = []

    def change(self, stored: set[int], removed: set[int]) -> Delta:
        stored, removed = stored - self.held, (removed & self.held) - stored
        self.held = (self.held | stored) - removed
        self.seq += 1
        delta = Delta(self.epoch, self.seq, 0.0, 0, 0, "GPU", pack_keys(sorted(stored)), pack_keys(sorted(removed)))
        self.ring = [*self.ring, delta][-RING:]
        return delta

    def restart(self) -> None:
        self.epoch += 1
        self.worker, self.seq, self.held, self.ring = f"pod/boot-{self.epoch}", 0, set(), []

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(self.worker, self.epoch, self.seq, "vllm", "up", "0", 16, "m", "main", {})

    def answer(self, ask: AskSnapshot | AskReplay):
        if isinstance(ask, AskSnapshot):
            keys = pack_keys(sorted(self.held))
            return SnapshotPart(ask.id, self.worker, self.epoch, self.seq, 0, 0, "GPU", keys, True)
        have = [d for d in self.ring if d.seq >= ask.first]
        gone = ask.epoch != self.epoch or (ask.first <= self.seq and (not have or have[0].seq > ask.first))
        return ReplayPart(ask.id, tuple(have) if not gone else (), True, gone)


class View:
    """What an index would hold, driven by the follower's steps."""

    def __init__(self) -> None:
        self.sync = FeedSync()
        self.held: set[int] = set()
        self.asked: list[AskSnapshot | AskReplay] = []
        self.take(self.sync.start())

    def take(self, steps) -> None:
        for step in steps:
            match step:
                case ResetWorker():
                    self.held = set()
                case ApplyDelta(delta):
                    self.held -= set(unpack_keys(delta.removed))
                    self.held |= set(unpack_keys(delta.stored))
                case LoadPart(part):
                    self.held |= set(unpack_keys(part.keys))
                case AskSnapshot() | AskReplay():
                    self.asked.append(step)
                case Synced():
                    assert self.sync.synced

    def reply(self, frame) -> None:
        steps = self.sync.on_snapshot(frame) if isinstance(frame, SnapshotPart) else self.sync.on_replay(frame)
        self.take(steps)


@given(st.integers(0, 2**32), st.integers(5, 60))
def test_index_converges_under_loss_duplication_and_delay(seed, rounds):
    rng = random.Random(seed)
    sidecar, view = Sidecar(), View()
    air: list = []
    for _ in range(rounds):
        action = rng.random()
        if action < 0.6:
            delta = sidecar.change({rng.randrange(30) for _ in range(3)}, {rng.randrange(30) for _ in range(2)})
            if rng.random() < 0.75:
                air.extend([delta] * rng.choice([1, 1, 2]))
        elif action < 0.65:
            sidecar.restart()
        elif action < 0.8:
            air.append(sidecar.heartbeat())
        elif view.asked:
            ask = view.asked.pop(rng.randrange(len(view.asked)))
            if rng.random() < 0.8:
                air.append(sidecar.answer(ask))
        while air and rng.random() < 0.6:
            deliver(view, air.pop(rng.choice([0, 0, rng.randrange(len(air))])))
        if view.sync.synced and view.sync.seq == sidecar.seq and view.sync.epoch == sidecar.epoch:
            assert view.held == sidecar.held
    for frame in air:
        deliver(view, frame)
    for _ in range(20):  # the air is clean now: a bounded number of exchanges must be enough
        deliver(view, sidecar.heartbeat())
        asks, view.asked = view.asked, []
        if not asks:
            view.take(view.sync.on_silence())
        for ask in asks:
            view.reply(sidecar.answer(ask))
    assert view.sync.synced
    assert view.held == sidecar.held


def deliver(view: View, frame) -> None:
    match frame:
        case Delta():
            view.take(view.sync.on_delta(frame))
        case Heartbeat():
            view.take(view.sync.on_heartbeat(frame))
        case _:
            view.reply(frame)


def synced_view(sidecar: Sidecar) -> View:
    view = View()
    view.reply(sidecar.answer(view.asked.pop()))
    deliver(view, sidecar.heartbeat())
    assert view.sync.synced
    return view


def test_new_epoch_resets_before_applying():
    sidecar = Sidecar()
    sidecar.change({1, 2, 3}, set())
    view = synced_view(sidecar)
    sidecar.restart()
    deliver(view, sidecar.change({9}, set()))
    assert view.held == set()
    assert not view.sync.synced
    view.reply(sidecar.answer(view.asked.pop()))
    assert view.held == {9}


def test_late_delta_of_an_ended_epoch_is_ignored():
    sidecar = Sidecar()
    late = sidecar.change({1}, set())
    sidecar.restart()
    view = synced_view(sidecar)
    deliver(view, late)
    assert view.held == set()
    assert view.sync.synced


def test_heartbeat_reveals_a_lost_last_delta():
    sidecar = Sidecar()
    view = synced_view(sidecar)
    sidecar.change({5}, set())
    deliver(view, sidecar.heartbeat())
    assert view.asked == [AskReplay(2, 1, 1)]
    view.reply(sidecar.answer(view.asked.pop()))
    assert view.held == {5}


def test_stale_feed_requests_one_snapshot():
    sidecar = Sidecar()
    view = synced_view(sidecar)
    view.sync.synced = False  # it was silent for too long
    sidecar.change({5}, set())
    for _ in range(3):
        deliver(view, sidecar.heartbeat())
    assert view.asked == [AskSnapshot(2)]
    view.reply(sidecar.answer(view.asked.pop()))
    assert (view.sync.synced, view.held) == (True, {5})


def test_case_48_gap_ends_in_one_snapshot_and_the_stream_continues():
    sidecar, view = Sidecar(), View()
    view.reply(sidecar.answer(view.asked.pop()))
    for number in range(RING + 3):
        sidecar.change({number}, set())
    view.take(view.sync.on_delta(sidecar.ring[-1]))
    view.reply(sidecar.answer(view.asked.pop()))  # the replay is gone
    (ask,) = view.asked
    view.asked.clear()
    view.reply(sidecar.answer(ask))
    assert (view.sync.seq, view.held) == (sidecar.seq, sidecar.held)
    view.take(view.sync.on_heartbeat(sidecar.heartbeat()))
    view.take(view.sync.on_delta(sidecar.change({99}, set())))
    assert view.asked == [], "no request is repeated"
    assert view.held == sidecar.held


def test_gap_longer_than_the_ring_requests_a_snapshot():
    sidecar = Sidecar()
    view = synced_view(sidecar)
    for number in range(RING + 3):
        last = sidecar.change({number}, set())
    deliver(view, last)
    view.reply(sidecar.answer(view.asked.pop()))
    assert isinstance(view.asked[-1], AskSnapshot)
    view.reply(sidecar.answer(view.asked.pop()))
    assert view.held == sidecar.held
