"""Items by shared memory and inline, and leases that end; NIXL runs in tests/conformance."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mmrouter_handover.plugin.packed_item import Plan, read_header
from mmrouter_handover.plugin.ways import Settings, Ways, read_settings
from mmrouter_handover.plugin.wire import HandOverFailed, Shm, Way, read
from mmrouter_handover.shm import ledger

from .conftest import NAME, SETTINGS, refusal

LIMIT = 4 << 20


@pytest.fixture
def sides(root: Path) -> tuple[Ways, Ways]:
    settings = Settings(str(root), ("shm", "inline"), LIMIT, "node-1")
    return Ways(settings, "renderer"), Ways(settings, "engine")


def tensors_of(packed: memoryview) -> bytes:
    header, tensors = read_header(packed, name=NAME, settings=SETTINGS)
    with tensors:
        return bytes(tensors[: header.length])


@pytest.mark.parametrize("way", ["shm", "inline"])
def test_an_item_that_was_offered_is_read_and_a_slot_is_free_again(
    sides: tuple[Ways, Ways], plan: Callable[..., Plan], way: Way
):
    renderer, engine = sides
    payload = bytes(range(256)) * 1000
    offer, release = renderer.offer(plan(payload), NAME, way, 5, LIMIT)
    assert engine.read(offer, tensors_of).startswith(payload)
    release()
    if way == "shm":
        with pytest.raises(HandOverFailed) as failed:
            engine.read(offer, tensors_of)
        assert failed.value.reason == "stale"


def test_a_slot_is_let_go_also_where_what_was_in_it_is_refused(sides: tuple[Ways, Ways], plan: Callable[..., Plan]):
    renderer, engine = sides
    for _ in range(12):  # more than the tmpfs may hold at a time
        offer, _ = renderer.offer(plan(bytes(1 << 20), settings="others"), NAME, "shm", 60, 0)
        with pytest.raises(HandOverFailed, match="settings"):
            engine.read(offer, tensors_of)


def test_a_released_offer_is_stale_and_its_bytes_are_lent_again(sides: tuple[Ways, Ways], plan: Callable[..., Plan]):
    renderer, engine = sides
    lent = []
    while not (reason := refusal(lambda: lent.append(renderer.offer(plan(bytes(1 << 20)), NAME, "shm", 60, 0)))):
        assert len(lent) < 12
    assert reason == "full"
    for _, release in lent:
        release()
    for offer, _ in lent:
        with pytest.raises(HandOverFailed) as failed:
            engine.read(offer, tensors_of)
        assert failed.value.reason in ("stale", "gone")
    renderer.offer(plan(bytes(1 << 20)), NAME, "shm", 60, 0)


def test_ways_that_are_not_there_say_why(root: Path, plan: Callable[..., Plan]):
    nowhere = Ways(Settings("", ("shm",), LIMIT, ""), "engine")
    assert nowhere.missing["shm"] == "absent: MMROUTER_SHARED_DIR is not set"
    assert "does not name it" in nowhere.missing["inline"]
    missing = Ways(Settings(str(root / "gone"), ("shm", "inline"), LIMIT, ""), "renderer")
    assert "No such file" in missing.missing["shm"]
    assert missing.missing["inline"] == ""
    for ways, way, reason in ((nowhere, "inline", "absent"), (missing, "shm", "absent"), (missing, "inline", "large")):
        with pytest.raises(HandOverFailed) as failed:
            ways.offer(plan(b"abc"), NAME, way, 5, 1)
        assert failed.value.reason == reason
    handle = read(b'{"way": "shm", "length": 3, "handle": {}}', Shm)
    for ways, reason in ((nowhere, "absent"), (Ways(Settings(str(root), ("shm",), LIMIT, ""), "engine"), "refused")):
        with pytest.raises(HandOverFailed) as failed:
            ways.read(handle, tensors_of)
        assert failed.value.reason == reason


def test_nothing_is_left_on_the_tmpfs_when_a_renderer_ends(
    sides: tuple[Ways, Ways], root: Path, plan: Callable[..., Plan]
):
    renderer, _ = sides
    _, release = renderer.offer(plan(b"abc"), NAME, "shm", 5, 0)
    release()
    renderer.close()
    assert ledger(root, 0.0).entries == ()


def test_the_environment_says_ways_in_the_order_in_which_they_are_best_and_nonsense_is_an_error():
    assert read_settings({}) == Settings("", ("shm", "inline"), 1 << 30, "")
    said = {
        "MMROUTER_HANDOVER_WAYS": "inline, nixl",
        "MMROUTER_SHARED_DIR": "/s",
        "MMROUTER_HANDOVER_BYTES": "1048576",
        "NODE_NAME": "n",
    }
    assert read_settings(said) == Settings("/s", ("nixl", "inline"), 1 << 20, "n")
    for wrong in ({"MMROUTER_HANDOVER_WAYS": "pigeon"}, {"MMROUTER_HANDOVER_BYTES": "much"}):
        with pytest.raises(ValueError, match=r"pigeon|much"):
            read_settings(wrong)
