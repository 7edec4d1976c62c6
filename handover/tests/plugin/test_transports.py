"""Transports: items by shared memory and inline, ends of leases, backoff of NIXL peers.

NIXL itself runs in tests/conformance.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from handover.tests.support import Clock
from mmrouter_handover.plugin.nixl_transport import (
    FIRST_BACKOFF_SECONDS,
    MAX_BACKOFF_SECONDS,
    MAX_FAILED_PEERS,
    PeerBackoff,
)
from mmrouter_handover.plugin.packed_item import PackedItem, read_header
from mmrouter_handover.plugin.transports import Settings, Transports, read_settings
from mmrouter_handover.plugin.wire import HandOverFailed, Shm, Way, read
from mmrouter_handover.shm import ledger

from .conftest import NAME, SETTINGS, refusal

LIMIT = 4 << 20


@pytest.fixture
def sides(root: Path) -> tuple[Transports, Transports]:
    settings = Settings(str(root), ("shm", "inline"), LIMIT, "node-1")
    return Transports(settings, "renderer"), Transports(settings, "engine")


def tensors_of(packed: memoryview) -> bytes:
    header, tensors = read_header(packed, name=NAME, settings=SETTINGS)
    with tensors:
        return bytes(tensors[: header.length])


@pytest.mark.parametrize("way", ["shm", "inline"])
def test_an_offered_item_is_read_and_its_slot_is_free_again(
    sides: tuple[Transports, Transports], pack: Callable[..., PackedItem], way: Way
):
    renderer, engine = sides
    payload = bytes(range(256)) * 1000
    offer, release = renderer.offer(pack(payload), NAME, way, 5, LIMIT)
    assert engine.read(offer, tensors_of).startswith(payload)
    release()
    if way == "shm":
        with pytest.raises(HandOverFailed) as failed:
            engine.read(offer, tensors_of)
        assert failed.value.reason == "stale"


def test_the_slot_of_a_refused_item_is_released(sides: tuple[Transports, Transports], pack: Callable[..., PackedItem]):
    renderer, engine = sides
    for _ in range(12):  # more than the limit at a time
        offer, _ = renderer.offer(pack(bytes(1 << 20), settings="others"), NAME, "shm", 60, 0)
        with pytest.raises(HandOverFailed, match="settings"):
            engine.read(offer, tensors_of)


def test_a_released_offer_is_stale_and_its_slot_is_reused(
    sides: tuple[Transports, Transports], pack: Callable[..., PackedItem]
):
    renderer, engine = sides
    lent = []
    while not (reason := refusal(lambda: lent.append(renderer.offer(pack(bytes(1 << 20)), NAME, "shm", 60, 0)))):
        assert len(lent) < 12
    assert reason == "full"
    for _, release in lent:
        release()
    for offer, _ in lent:
        with pytest.raises(HandOverFailed) as failed:
            engine.read(offer, tensors_of)
        assert failed.value.reason in ("stale", "gone")
    renderer.offer(pack(bytes(1 << 20)), NAME, "shm", 60, 0)


def test_missing_transports_have_a_reason(root: Path, pack: Callable[..., PackedItem]):
    nowhere = Transports(Settings("", ("shm",), LIMIT, ""), "engine")
    assert nowhere.missing["shm"] == "absent: MMROUTER_SHARED_DIR is not set"
    assert "does not name it" in nowhere.missing["inline"]
    missing = Transports(Settings(str(root / "gone"), ("shm", "inline"), LIMIT, ""), "renderer")
    assert "No such file" in missing.missing["shm"]
    assert missing.missing["inline"] == ""
    for ways, way, reason in ((nowhere, "inline", "absent"), (missing, "shm", "absent"), (missing, "inline", "large")):
        with pytest.raises(HandOverFailed) as failed:
            ways.offer(pack(b"abc"), NAME, way, 5, 1)
        assert failed.value.reason == reason
    handle = read(b'{"way": "shm", "length": 3, "handle": {}}', Shm)
    for ways, reason in (
        (nowhere, "absent"),
        (Transports(Settings(str(root), ("shm",), LIMIT, ""), "engine"), "refused"),
    ):
        with pytest.raises(HandOverFailed) as failed:
            ways.read(handle, tensors_of)
        assert failed.value.reason == reason


def test_a_closed_renderer_leaves_nothing_on_the_tmpfs(
    sides: tuple[Transports, Transports], root: Path, pack: Callable[..., PackedItem]
):
    renderer, _ = sides
    _, release = renderer.offer(pack(b"abc"), NAME, "shm", 5, 0)
    release()
    renderer.close()
    assert ledger(root, 0.0).entries == ()


def test_settings_order_the_ways_and_reject_invalid_values():
    assert read_settings({}) == Settings("", ("shm", "inline"), 1 << 30, "")
    environment = {
        "MMROUTER_HANDOVER_WAYS": "inline, nixl",
        "MMROUTER_SHARED_DIR": "/s",
        "MMROUTER_HANDOVER_BYTES": "1048576",
        "NODE_NAME": "n",
    }
    assert read_settings(environment) == Settings("/s", ("nixl", "inline"), 1 << 20, "n")
    for wrong in ({"MMROUTER_HANDOVER_WAYS": "pigeon"}, {"MMROUTER_HANDOVER_BYTES": "much"}):
        with pytest.raises(ValueError, match=r"pigeon|much"):
            read_settings(wrong)


def test_the_pause_of_a_peer_doubles_up_to_a_bound_and_ends_with_a_success(clock: Clock):
    backoff = PeerBackoff(clock)
    assert not backoff.is_paused("a")
    for times in range(12):
        backoff.failed("a")
        seconds = min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2**times)
        clock.now += seconds - 1
        assert backoff.is_paused("a")
        clock.now += 1
        assert not backoff.is_paused("a")
    backoff.worked("a")
    backoff.failed("a")
    clock.now += FIRST_BACKOFF_SECONDS
    assert not backoff.is_paused("a")


def test_the_oldest_failed_peer_is_forgotten_first(clock: Clock):
    backoff = PeerBackoff(clock)
    for number in range(MAX_FAILED_PEERS + 1):
        backoff.failed(str(number))
    assert (backoff.is_paused("0"), backoff.is_paused("1")) == (False, True)
