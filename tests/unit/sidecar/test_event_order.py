"""Batches that are lost, duplicated or late leave the event stream once and in order, or as a reported loss."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrouter_sidecar.engine import event_order as module
from mmrouter_sidecar.engine.event_order import EventStream, Lost, NextBatch, ReplayRequest, Skipped, digest_of


def payload(seq: int, engine: str = "a") -> bytes:
    return f"{engine}:{seq}".encode()


def seqs(steps: list[module.Step]) -> list[int]:
    return [step.seq for step in steps if isinstance(step, NextBatch)]


def fed(count: int = 1) -> EventStream:
    """A stream that has applied the first numbers."""
    stream = EventStream()
    for seq in range(count):
        assert seqs(stream.live(seq, payload(seq))) == [seq]
    return stream


@dataclass
class World:
    """An engine, a lossy live channel and a replay channel that answers late; ``chance`` decides what happens next."""

    chance: random.Random
    buffer: int = 10_000
    stream: EventStream = field(default_factory=EventStream)
    published: int = 0
    live: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    serving: bool = False
    asked: int | None = None
    out: list[module.Step] = field(default_factory=list)

    def take(self, steps: list[module.Step]) -> None:
        for step in steps:
            if isinstance(step, ReplayRequest):
                self.asked, self.serving, self.answer = step.first, False, []
            else:
                self.out.append(step)

    def serve(self) -> None:
        """The engine answers the last question from its buffer, as it is now; some replayed messages do not fit."""
        held = range(max(self.asked or 0, self.published - self.buffer), self.published)
        kept = [seq for place, seq in enumerate(held) if not place or self.chance.random() < 0.9]
        self.answer, self.serving, self.asked = kept, True, None

    def step(self) -> None:
        choice = self.chance.random()
        if choice < 0.35:
            self.published += 1
            if self.chance.random() < 0.8:
                self.live.append(self.published - 1)
                if self.chance.random() < 0.1:
                    self.live.append(self.published - 1)
        else:
            self.deliver(live=choice < 0.7)

    def deliver(self, *, live: bool = True) -> bool:
        """Let the next thing under way arrive; false if there is none."""
        if self.live and live:
            seq = self.live.pop(0)
            self.take(self.stream.live(seq, payload(seq)))
        elif self.asked is not None:
            self.serve()
        elif self.serving and self.answer:
            seq = self.answer.pop(0)
            self.take(self.stream.replayed(seq, payload(seq)))
        elif self.serving:
            self.serving = False
            self.take(self.stream.replay_ended())
        else:
            return False
        return True

    def finish(self) -> None:
        """Everything under way arrives; then silence is looked into."""
        for _ in range(10_000):
            if not self.deliver():
                if self.stream.next >= self.published:
                    return
                self.take(self.stream.quiet())
        raise AssertionError("the stream never settled")


def finished(seed: int, steps: int, **fields: int) -> World:
    world = World(random.Random(seed), **fields)
    world.take(world.stream.connected())
    for _ in range(steps):
        world.step()
    world.finish()
    return world


@given(st.integers(0, 2**32), st.integers(0, 60))
def test_every_batch_is_emitted_once_in_order_while_the_engine_has_it(seed: int, steps: int) -> None:
    world = finished(seed, steps)
    assert seqs(world.out) == list(range(world.published))
    assert not [step for step in world.out if isinstance(step, Lost | Skipped)]
    assert world.stream.waiting == 0


@given(st.integers(0, 2**32), st.integers(0, 80), st.integers(1, 4))
def test_a_short_replay_buffer_reports_losses_and_never_reorders(seed: int, steps: int, buffer: int) -> None:
    world = finished(seed, steps, buffer=buffer)
    before = -1
    for step in world.out:
        if isinstance(step, Skipped):
            assert step.first == before + 1
            before = step.end
        elif isinstance(step, NextBatch):
            assert step.seq == before + 1
            before = step.seq
    assert before == world.published - 1


def test_a_gap_is_requested_from_the_first_missing_number() -> None:
    stream = fed()
    assert stream.live(3, payload(3)) == [ReplayRequest(1)]
    assert stream.live(4, payload(4)) == []
    assert seqs(stream.replayed(1, payload(1))) == [1]
    assert seqs(stream.replayed(2, payload(2))) == [2, 3, 4]


def test_history_that_the_engine_no_longer_has_is_reported_as_lost() -> None:
    stream = fed()
    stream.live(9, payload(9))
    assert stream.replayed(7, payload(7)) == [
        Lost("history"),
        Skipped(1, 6),
        NextBatch(7, payload(7), digest_of(payload(7))),
    ]
    assert seqs(stream.replayed(8, payload(8))) == [8, 9]


def test_a_late_start_has_nothing_to_lose() -> None:
    stream = EventStream()
    assert stream.connected() == [ReplayRequest(0)]
    stream.live(9, payload(9))
    steps = stream.replayed(8, payload(8))
    assert steps[0] == Skipped(0, 7)
    assert seqs(steps) == [8, 9]


def test_a_lower_number_with_other_bytes_is_another_engine() -> None:
    stream = fed(4)
    assert stream.live(2, payload(2)) == [module.Duplicate()]
    assert stream.live(0, payload(0, "b")) == [Lost("backwards"), ReplayRequest(0)]
    assert seqs(stream.replayed(0, payload(0, "b"))) == [0]
    assert seqs(stream.live(1, payload(1, "b"))) == [1]


def test_a_number_older_than_every_memory_is_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECENT", 8)
    stream = fed(20)
    assert stream.live(13, payload(13)) == [module.Duplicate()]
    assert stream.live(3, payload(3))[0] == Lost("backwards")


def test_a_restarted_sidecar_resumes_when_the_proof_matches() -> None:
    stream = EventStream((41, digest_of(payload(41))))
    assert stream.connected() == [ReplayRequest(41)]
    assert stream.live(43, payload(43)) == []
    assert stream.replayed(41, payload(41)) == [module.Duplicate()]
    assert seqs(stream.replayed(42, payload(42))) == [42, 43]
    assert stream.resumed, "more may follow"
    assert stream.replay_ended() == []
    assert not stream.resumed


def test_a_resumption_with_a_gap_lasts_until_the_gap_is_filled() -> None:
    stream = EventStream((41, digest_of(payload(41))))
    stream.connected()
    stream.replayed(41, payload(41))
    stream.live(44, payload(44))
    assert stream.replay_ended() == [ReplayRequest(42)]
    assert stream.resumed
    stream.replayed(42, payload(42))
    assert seqs(stream.replayed(43, payload(43))) == [43, 44]
    stream.replay_ended()
    assert not stream.resumed


def test_a_proof_that_no_replay_confirms_expires_and_a_confirmed_one_does_not() -> None:
    stream = EventStream((41, digest_of(payload(41))))
    stream.connected()
    assert stream.expire() == [Lost("other_instance"), ReplayRequest(0)]
    assert not stream.resumed
    stream = EventStream((41, digest_of(payload(41))))
    stream.connected()
    stream.replayed(41, payload(41))
    assert stream.expire() == []
    assert seqs(stream.live(42, payload(42))) == [42]


@pytest.mark.parametrize("answer", [[], [(41, payload(41, "b"))], [(50, payload(50))], [(0, payload(0, "b"))]])
def test_a_restarted_sidecar_discards_unproved_batches(answer: list[tuple[int, bytes]]) -> None:
    stream = EventStream((41, digest_of(payload(41))))
    stream.connected()
    stream.live(1, payload(1, "b"))
    steps = [step for seq, raw in answer for step in stream.replayed(seq, raw)] or stream.replay_ended()
    assert steps == [Lost("other_instance"), ReplayRequest(0)]
    assert seqs(stream.replayed(0, payload(0, "b"))) == [0, 1]


def test_a_gap_is_given_up_after_unanswered_replays() -> None:
    stream = fed()
    stream.live(2, payload(2))
    assert stream.replay_failed() == [ReplayRequest(1)]
    assert stream.replay_failed() == [ReplayRequest(1)]
    steps = stream.replay_failed()
    assert steps[:2] == [Lost("unanswered"), Skipped(1, 1)]
    assert seqs(steps) == [2]


def test_an_unanswered_replay_without_a_gap_is_requested_again() -> None:
    stream = EventStream()
    stream.connected()
    assert [stream.replay_failed() for _ in range(10)] == [[ReplayRequest(0)]] * 10


def test_batches_behind_a_gap_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HELD", 10)
    stream = fed()
    steps = [step for seq in range(2, 40) for step in stream.live(seq, payload(seq))]
    assert Lost("backlog") in steps
    assert stream.waiting <= 10
    assert seqs(steps) == list(range(2, 40))


def test_numbers_restart_after_the_end_of_the_engine() -> None:
    stream = fed(3)
    stream.ended()
    assert stream.connected() == [ReplayRequest(0)]
    assert seqs(stream.live(0, payload(0, "b"))) == [0]
