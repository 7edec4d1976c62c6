"""Leases in registered memory: bounded, never over each other, and seen to be over by who reads too late."""

from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from handover.tests.support import Clock
from mmrouter_handover.plugin.arena import GENERATION, HEAD_BYTES, Arena, Part

from .conftest import refusal

LIMIT = 4096


class Leasing(RuleBasedStateMachine):
    """Beside the arena stands what it has to be: leases by generation, and what was written into each."""

    parts = Bundle("parts")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.arena = Arena(LIMIT, self.clock)
        self.standing: dict[int, tuple[Part, bytes]] = {}

    @rule(target=parts, length=st.integers(0, 1500), seconds=st.integers(1, 5))
    def lend(self, length: int, seconds: int) -> object:
        self.forget_expired()
        lent: list[Part] = []
        if reason := refusal(lambda: lent.append(self.arena.lease(length, seconds))):
            assert reason == "full"
            assert all(gap < HEAD_BYTES + length for gap in self.gaps())
            return multiple()
        part = lent[0]
        payload = part.generation.to_bytes(8, "big") * (length // 8 + 1)
        self.arena.payload(part, length)[:] = payload[:length]
        self.standing[part.generation] = (part, payload[:length])
        return part

    @rule(part=consumes(parts))
    def release(self, part: Part) -> None:
        self.forget_expired()
        stood = self.standing.pop(part.generation, None) is not None
        self.arena.expire()
        assert self.arena.release(part) == stood
        assert not self.arena.release(part)

    @rule(seconds=st.integers(0, 3))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @invariant()
    def what_stands_is_whole_and_its_generation_is_there(self) -> None:
        self.arena.expire()
        self.forget_expired()
        assert self.arena.leased_bytes == sum(part.size for part, _ in self.standing.values())
        for generation, (part, payload) in self.standing.items():
            assert GENERATION.unpack_from(self.arena.memory, part.offset)[0] == generation
            assert self.arena.payload(part, len(payload)) == payload

    def forget_expired(self) -> None:
        for generation, (part, _) in list(self.standing.items()):
            if part.deadline <= self.clock.now:
                del self.standing[generation]

    def gaps(self) -> list[int]:
        ends = [(0, 0), *sorted((part.offset, part.size) for part, _ in self.standing.values()), (LIMIT, 0)]
        return [after[0] - before[0] - before[1] for before, after in pairwise(ends)]


TestLeasing = Leasing.TestCase
TestLeasing.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_who_reads_after_the_end_finds_another_generation_also_where_new_bytes_begin_behind_it():
    arena = Arena(LIMIT, Clock())
    first, second = arena.lease(100, 5), arena.lease(1000, 5)
    assert arena.release(second)
    assert GENERATION.unpack_from(arena.memory, second.offset)[0] == 0
    assert arena.release(first)
    over_both = arena.lease(1500, 5)
    assert over_both.offset == first.offset
    assert over_both.generation not in (first.generation, second.generation)


def test_what_never_fits_is_large_and_what_does_not_fit_now_is_full():
    arena = Arena(LIMIT, Clock())
    for length, reason in ((LIMIT, "large"), (LIMIT - HEAD_BYTES, ""), (0, "full")):
        assert refusal(lambda length=length: arena.lease(length, 5)) == reason
