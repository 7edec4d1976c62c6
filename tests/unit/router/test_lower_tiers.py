"""Blocks that engines hold below device memory: found right after the overlap, and cheaper than computed ones."""

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.conftest import examples
from unit.router.frontend import PORT, Frontend
from unit.router.rig import BLOCK, IDS, KEYS, Rig, counts, prepared

from mmrouter_lib import feed
from mmrouter_lib.block_keys import pack_keys
from mmrouter_lib.cache_layout import CacheGroup
from mmrouter_router.api.answers import debug_headers
from mmrouter_router.dispatch.engine_client import EngineReply
from mmrouter_router.explain.decisions import trace_of
from mmrouter_router.scheduling.scoring import FETCH

TIERS = {"lower_media": ("CPU", "STORAGE")}


@pytest.fixture
def rig() -> Rig:
    return Rig()


def tiered(rig: Rig, name: str, device=(), below=(), **beat):
    """Add a worker that has named its tiers, and answer the snapshot request that follows.

    ``below``: keys by medium.
    """
    worker = rig.worker(name, device, **TIERS, **beat)
    caches = {**dict(below), "GPU": device}
    for medium, keys in caches.items():
        place = (worker.sync.request_id, worker.id, 1, 0, 0, 0, medium)
        rig.fleet.on_reply(worker, feed.SnapshotPart(*place, pack_keys(keys), last=medium == "GPU"))
    return worker


def candidates(rig: Rig, ids=IDS) -> dict:
    return {s.candidate.name: s.candidate for s in rig.placer.place(prepared(ids=ids), dry_run=True).choice.scores}


def leading(held: set[int], start: int) -> int:
    return next((n for n, key in enumerate(KEYS[start:]) if key not in held), len(KEYS) - start)


HELD = st.sets(st.sampled_from(sorted(KEYS)))


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(HELD, HELD, HELD, HELD), min_size=1, max_size=3), st.booleans())
def test_an_engine_continues_after_its_device_in_the_host_and_then_on_disk(caches, by_snapshot):
    rig = Rig()
    for number, (device, host, disk, gone) in enumerate(caches):
        below = {"CPU": sorted(host | gone), "STORAGE": sorted(disk)}
        worker = tiered(rig, str(number), sorted(device), below if by_snapshot else ())
        for medium, held in () if by_snapshot else below.items():
            rig.delta(worker, held, medium=medium)
        rig.delta(worker, medium="CPU", removed=sorted(gone))
    ids = [*IDS, 1]  # whose last token is in no block
    seen = candidates(rig, type(IDS)("I", ids))
    for number, (device, host, disk, gone) in enumerate(caches):
        overlap = leading(device, 0)
        of_host = leading(host - gone, overlap)
        of_disk = leading(disk, overlap + of_host)
        row = seen[str(number)]
        assert (row.overlap, row.tier) == (overlap, of_host + of_disk)
        assert row.fetch == of_host * FETCH["host"] + of_disk * FETCH["disk"]


def test_the_device_wins_over_the_host_over_the_disk_over_nothing(rig):
    tiered(rig, "none")
    for name, medium in (("disk", "STORAGE"), ("host", "CPU"), ("device", "GPU")):
        rig.delta(tiered(rig, name), KEYS, medium=medium)
    ranked = [s.candidate.name for s in rig.placer.place(prepared()).choice.scores]
    assert ranked == ["device", "host", "disk", "none"]
    assert 0 < FETCH["host"] < FETCH["disk"] < 1


def test_the_block_of_the_last_token_is_computed_whatever_tier_has_it(rig):
    rig.delta(tiered(rig, "a"), KEYS, medium="CPU")
    assert candidates(rig)["a"].tier == (len(IDS) - 1) // BLOCK


def test_a_clear_and_a_new_epoch_empty_every_tier(rig):
    worker = tiered(rig, "a", KEYS[:2])
    rig.delta(worker, KEYS[2:4], medium="CPU")
    assert candidates(rig)["a"].tier == 2
    rig.delta(worker, cleared=True)
    assert (candidates(rig)["a"].overlap, candidates(rig)["a"].tier) == (0, 0)
    rig.delta(worker, KEYS[:4], medium="CPU")
    assert candidates(rig)["a"].tier == 4
    rig.beat(worker, epoch=2, **TIERS)
    rig.sync(worker, KEYS[:1], epoch=2)
    assert (candidates(rig)["a"].overlap, candidates(rig)["a"].tier) == (1, 0)


def test_an_unverified_workers_tiers_do_not_count(rig):
    rig.delta(tiered(rig, "a", KEYS[:2], canary=""), KEYS[2:], medium="CPU")
    assert candidates(rig)["a"].tier == 0


def test_a_tier_is_indexed_from_a_new_snapshot_once_the_sidecar_names_it(rig):
    """An older sidecar's keys of such blocks lack images and salts."""
    worker = rig.worker("a", KEYS[:2])
    rig.delta(worker, KEYS[2:], medium="CPU")
    assert candidates(rig)["a"].tier == 0
    assert counts(rig.metrics.feed_ignored, "reason") == {"medium": 1}
    rig.beat(worker, **TIERS)
    assert not worker.sync.synced, "a snapshot has been requested"
    rig.sync(worker, KEYS[:2], seq=worker.sync.seq)
    rig.delta(worker, KEYS[2:4], medium="CPU")
    assert candidates(rig)["a"].tier == 2
    rig.delta(worker, KEYS[4:], medium="EXTERNAL")
    assert counts(rig.metrics.feed_ignored, "reason") == {"medium": 2}


def test_engines_with_windows_are_bounded_because_their_lower_tiers_are_not_indexed(rig):
    groups = (CacheGroup(0, "full_attention"), CacheGroup(1, "sliding_window", 64))
    worker = rig.worker("a", KEYS, groups=groups, all_groups=True, **TIERS)
    rig.sync(worker, KEYS)
    rig.delta(worker, KEYS, medium="CPU")
    decision = rig.placer.place(prepared())
    assert (decision.choice.winner.tier, decision.exactness) == (0, "bounded")
    assert decision.reasons == ("cache_groups:lower_tiers",)
    assert counts(rig.metrics.feed_ignored, "reason") == {"medium": 1}


def test_a_decision_names_the_blocks_of_lower_tiers_apart(rig):
    rig.delta(tiered(rig, "a", KEYS[:2]), KEYS[2:4], medium="CPU")
    request = prepared()
    decision = rig.placer.place(request)
    booked = rig.placer.begin(decision)
    trace = trace_of("r", request, decision)
    headers = dict(debug_headers(EngineReply(decision, trace, booked, None, b"", None)))
    assert (headers[b"x-mmrouter-overlap-blocks"], headers[b"x-mmrouter-tier-blocks"]) == (b"2", b"2")
    shown = trace.as_json()
    assert (shown["overlap"], shown["tier"], shown["candidates"][0]["tier"]) == (2, 2, 2)
    assert "2 of 6 blocks held, 2 more in lower tiers" in decision.choice.reason
    assert decision.span_attributes()["mmrouter.tier_blocks"] == 2
    assert decision.choice.regret == 0
    usage = rig.fleet.usage(decision.target.worker, 0)
    assert usage.prefill == len(KEYS) - 4, "loaded blocks are not in the queue of blocks to compute"
    booked.end()
    scores = decision.choice.scores[0]
    assert scores.terms["fetch"] == 6 * 2 * FETCH["host"]


async def test_the_control_port_lists_the_keys_of_each_memory_of_a_worker():
    frontend = await Frontend(token="t").start()
    try:
        worker = tiered(frontend, "a", KEYS[:2], {"CPU": KEYS[2:4]})
        async with httpx.AsyncClient(headers={"authorization": "Bearer t"}, trust_env=False) as client:
            answer = await client.get(f"http://{frontend.ip}:{PORT}/control/workers/{worker.member.uid}/keys")
        hexadecimal = [f"{key:016x}" for key in KEYS]
        assert answer.json()["keys"] == {"0": sorted(hexadecimal[:2])}
        assert answer.json()["tiers"]["0/CPU"] == sorted(hexadecimal[2:4])
    finally:
        await frontend.stop()
