"""Arena leases are bounded, never overlap, and a late reader detects the end of a lease."""

from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from handover.tests.support import Clock
from mmrouter_handover.plugin.arena import GENERATION, HEAD_BYTES, Arena, ArenaLease

from .conftest import refusal

LIMIT = 4096


class Leasing(RuleBasedStateMachine):
    """Model of the arena: leases by generation, and the bytes written into each."""

    parts = Bundle("parts")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.arena = Arena(LIMIT, self.clock)
        self.leases: dict[int, tuple[ArenaLease, bytes]] = {}

    @rule(target=parts, length=st.integers(0, 1500), seconds=st.integers(1, 5))
    def lend(self, length: int, seconds: int) -> object:
        self.forget_expired()
        lent: list[ArenaLease] = []
        if reason := refusal(lambda: lent.append(self.arena.lease(length, seconds))):
            assert reason == "full"
            assert all(gap < HEAD_BYTES + length for gap in self.gaps())
            return multiple()
        part = lent[0]
        payload = part.generation.to_bytes(8, "big") * (length // 8 + 1)
        self.arena.payload(part, length)[:] = payload[:length]
        self.leases[part.generation] = (part, payload[:length])
        return part

    @rule(part=consumes(parts))
    def release(self, part: ArenaLease) -> None:
        self.forget_expired()
        was_leased = self.leases.pop(part.generation, None) is not None
        self.arena.expire()
        assert self.arena.release(part) == was_leased
        assert not self.arena.release(part)

    @rule(seconds=st.integers(0, 3))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @invariant()
    def leased_bytes_and_generations_are_unchanged(self) -> None:
        self.arena.expire()
        self.forget_expired()
        assert self.arena.leased_bytes == sum(part.size for part, _ in self.leases.values())
        for generation, (part, payload) in self.leases.items():
            assert GENERATION.unpack_from(self.arena.memory, part.offset)[0] == generation
            assert self.arena.payload(part, len(payload)) == payload

    def forget_expired(self) -> None:
        for generation, (part, _) in list(self.leases.items()):
            if part.deadline <= self.clock.now:
                del self.leases[generation]

    def gaps(self) -> list[int]:
        ends = [(0, 0), *sorted((part.offset, part.size) for part, _ in self.leases.values()), (LIMIT, 0)]
        return [after[0] - before[0] - before[1] for before, after in pairwise(ends)]


TestLeasing = Leasing.TestCase
TestLeasing.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_a_late_reader_finds_another_generation():
    arena = Arena(LIMIT, Clock())
    first, second = arena.lease(100, 5), arena.lease(1000, 5)
    assert arena.release(second)
    assert GENERATION.unpack_from(arena.memory, second.offset)[0] == 0
    assert arena.release(first)
    over_both = arena.lease(1500, 5)
    assert over_both.offset == first.offset
    assert over_both.generation not in (first.generation, second.generation)


def test_a_lease_that_never_fits_is_large_and_one_that_does_not_fit_now_is_full():
    arena = Arena(LIMIT, Clock())
    for length, reason in ((LIMIT, "large"), (LIMIT - HEAD_BYTES, ""), (0, "full")):
        assert refusal(lambda length=length: arena.lease(length, 5)) == reason
