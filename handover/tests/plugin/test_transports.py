"""Transports: items by shared memory and inline, ends of leases, backoff of NIXL peers, leases of NIXL's memory.

NIXL itself runs in tests/conformance.
"""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from handover.tests.support import NAME, SETTINGS, Clock, refusal
from mmrouter_handover.plugin import nixl_transport
from mmrouter_handover.plugin.item_exchange import Settings, Transports, read_settings
from mmrouter_handover.plugin.nixl_transport import GENERATION, HEAD_BYTES, Arena, ArenaLease, PeerBackoff
from mmrouter_handover.plugin.wire import Shm, read, read_header
from mmrouter_handover.shm import ledger

LIMIT = 4 << 20
ARENA_BYTES = 4096


@pytest.fixture
def sides(root: Path) -> tuple[Transports, Transports]:
    settings = Settings(str(root), ("shm", "inline"), LIMIT, "node-1")
    return Transports(settings, "renderer"), Transports(settings, "engine")


def tensors_of(packed: memoryview) -> bytes:
    header, tensors = read_header(packed, name=NAME, settings=SETTINGS)
    with tensors:
        return bytes(tensors[: header.length])


@pytest.mark.parametrize("way", ["shm", "inline"])
def test_an_offered_item_is_read_and_its_slot_is_free_again(sides, pack, way):
    renderer, engine = sides
    payload = bytes(range(256)) * 1000
    offer, release = renderer.offer(pack(payload), NAME, way, 5, LIMIT)
    assert engine.read(offer, tensors_of).startswith(payload)
    release()
    if way == "shm":
        assert refusal(lambda: engine.read(offer, tensors_of)) == "stale"


def test_the_slot_of_a_refused_item_is_released(sides, pack):
    renderer, engine = sides
    for _ in range(12):  # more than the limit at a time
        offer, _ = renderer.offer(pack(bytes(1 << 20), settings="others"), NAME, "shm", 60, 0)
        assert refusal(lambda offer=offer: engine.read(offer, tensors_of)) == "settings"


def test_a_released_offer_is_stale_and_its_slot_is_reused(sides, pack):
    renderer, engine = sides
    lent = []
    while not (reason := refusal(lambda: lent.append(renderer.offer(pack(bytes(1 << 20)), NAME, "shm", 60, 0)))):
        assert len(lent) < 12
    assert reason == "full"
    for _, release in lent:
        release()
    for offer, _ in lent:
        assert refusal(lambda offer=offer: engine.read(offer, tensors_of)) in ("stale", "gone")
    renderer.offer(pack(bytes(1 << 20)), NAME, "shm", 60, 0)


def test_missing_transports_have_a_reason(root, pack):
    nowhere = Transports(Settings("", ("shm",), LIMIT, ""), "engine")
    assert nowhere.missing["shm"] == "absent: MMROUTER_SHARED_DIR is not set"
    assert "does not name it" in nowhere.missing["inline"]
    missing = Transports(Settings(str(root / "gone"), ("shm", "inline"), LIMIT, ""), "renderer")
    assert "No such file" in missing.missing["shm"]
    assert missing.missing["inline"] == ""
    for ways, way, reason in ((nowhere, "inline", "absent"), (missing, "shm", "absent"), (missing, "inline", "large")):
        assert refusal(lambda ways=ways, way=way: ways.offer(pack(b"abc"), NAME, way, 5, 1)) == reason
    handle = read(b'{"way": "shm", "length": 3, "handle": {}}', Shm)
    here = Transports(Settings(str(root), ("shm",), LIMIT, ""), "engine")
    assert refusal(lambda: nowhere.read(handle, tensors_of)) == "absent"
    assert refusal(lambda: here.read(handle, tensors_of)) == "refused"


def test_a_closed_renderer_leaves_nothing_on_the_tmpfs(sides, root, pack):
    renderer, _ = sides
    _, release = renderer.offer(pack(b"abc"), NAME, "shm", 5, 0)
    release()
    renderer.close()
    assert ledger(root, 0.0).entries == ()


def test_settings_order_the_ways_and_reject_invalid_values():
    assert read_settings({}) == Settings("", ("shm", "inline"), 1 << 30, "")
    environment = {"MMROUTER_HANDOVER_WAYS": "inline, nixl", "MMROUTER_SHARED_DIR": "/s", "NODE_NAME": "n"}
    environment["MMROUTER_HANDOVER_BYTES"] = "1048576"
    assert read_settings(environment) == Settings("/s", ("nixl", "inline"), 1 << 20, "n")
    for wrong in ({"MMROUTER_HANDOVER_WAYS": "pigeon"}, {"MMROUTER_HANDOVER_BYTES": "much"}):
        with pytest.raises(ValueError, match=r"pigeon|much"):
            read_settings(wrong)


def test_the_pause_of_a_peer_doubles_up_to_a_bound_and_ends_with_a_success(clock):
    backoff = PeerBackoff(clock)
    assert not backoff.is_paused("a")
    for times in range(12):
        backoff.failed("a")
        seconds = min(nixl_transport.MAX_BACKOFF_SECONDS, nixl_transport.FIRST_BACKOFF_SECONDS * 2**times)
        clock.now += seconds - 1
        assert backoff.is_paused("a")
        clock.now += 1
        assert not backoff.is_paused("a")
    backoff.worked("a")
    backoff.failed("a")
    clock.now += nixl_transport.FIRST_BACKOFF_SECONDS
    assert not backoff.is_paused("a")


def test_the_oldest_failed_peer_is_forgotten_first(clock):
    backoff = PeerBackoff(clock)
    for number in range(nixl_transport.MAX_FAILED_PEERS + 1):
        backoff.failed(str(number))
    assert (backoff.is_paused("0"), backoff.is_paused("1")) == (False, True)


class Leasing(RuleBasedStateMachine):
    """Model of the arena: leases by generation, and the bytes written into each."""

    parts = Bundle("parts")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.arena = Arena(ARENA_BYTES, self.clock)
        self.leases: dict[int, tuple[ArenaLease, bytes]] = {}
        self.generation = 0

    @rule(target=parts, length=st.integers(0, 1500), seconds=st.integers(1, 5))
    def lend(self, length: int, seconds: int) -> object:
        self.forget_expired()
        lent: list[ArenaLease] = []
        if reason := refusal(lambda: lent.append(self.arena.lease(length, seconds))):
            assert reason == "full"
            assert all(gap < HEAD_BYTES + length for gap in self.gaps())
            return multiple()
        part = lent[0]
        assert part.generation > self.generation
        self.generation = part.generation
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
        assert GENERATION.unpack_from(self.arena.memory, part.offset)[0] != part.generation  # for a late reader

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
        ends = [(0, 0), *sorted((part.offset, part.size) for part, _ in self.leases.values()), (ARENA_BYTES, 0)]
        return [after[0] - before[0] - before[1] for before, after in pairwise(ends)]


TestLeasing = Leasing.TestCase
TestLeasing.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_a_lease_that_never_fits_is_large_and_one_that_does_not_fit_now_is_full():
    arena = Arena(ARENA_BYTES, Clock())
    for length, reason in ((ARENA_BYTES, "large"), (ARENA_BYTES - HEAD_BYTES, ""), (0, "full")):
        assert refusal(lambda length=length: arena.lease(length, 5)) == reason
