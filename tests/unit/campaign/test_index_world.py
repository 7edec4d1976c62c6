"""The deployment in virtual time: what a defect of the product would do to decisions is found."""

import logging
from collections import Counter

import pytest
from campaign.index.world import Plan, World

from mmrouter_router.fleet.feed_sync import FeedSync
from mmrouter_router.fleet.index import Index
from mmrouter_sidecar.feed.relay import EventRelay

PEACE = Plan(faults=0.0, lag=0.1)
FAULTS = Plan(faults=1.0, storms=False, lag=3.5)
STORMS = Plan(faults=2.0)


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL)


def ran(folder, plan: Plan, seed: str = "seed", seconds: float = 8.0) -> World:
    world = World(seed, folder, plan)
    world.run(seconds)
    world.settle()
    return world


def kinds(world: World) -> Counter[str]:
    return Counter(violation.kind for violation in world.checker.violations)


@pytest.mark.usefixtures("form")
def test_without_faults_every_view_is_milliseconds_old(tmp_path):
    world = ran(tmp_path, PEACE)
    assert (kinds(world), world.differences()) == (Counter(), [])
    assert world.checker.oldest < 0.02
    assert world.checker.blocks > 1000


def test_a_world_follows_from_its_seed(tmp_path):
    one, other = (ran(tmp_path / name, STORMS, seconds=4) for name in ("one", "other"))
    assert one.counts == other.counts
    assert one.checker.blocks == other.checker.blocks
    assert one.time.now == other.time.now


def test_a_sidecar_whose_journal_is_older_than_every_event_may_miss_blocks_until_a_replay(tmp_path):
    # A campaign drew it: the engine is stopped when the sidecar is back, so no replay comes.
    world = ran(tmp_path, Plan(), b"13d489d401f8".hex(), seconds=12)
    assert world.counts["sidecar killed"]
    assert (kinds(world), world.differences()) == (Counter(), [])


def test_an_index_that_forgets_removals_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(Index, "remove", lambda self, slot, keys: None)
    world = ran(tmp_path, PEACE)
    assert set(kinds(world)) & {"claimed", "torn"}
    assert world.differences()


def test_an_index_that_keeps_a_dead_engines_blocks_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(EventRelay, "engine_ended", lambda self, reason: None)
    world = ran(tmp_path, FAULTS, "1", seconds=15)
    assert world.counts["engine killed"]
    assert kinds(world)["claimed"]


def test_an_index_that_loses_stores_is_found(tmp_path, monkeypatch):
    store = Index.store
    monkeypatch.setattr(Index, "store", lambda self, slot, keys: store(self, slot, list(keys)[:-1]))
    world = ran(tmp_path, PEACE)
    assert kinds(world)["missed"]
    assert world.differences()


def test_a_router_that_ignores_gaps_is_found(tmp_path, monkeypatch):
    def apply_anything(self, delta):
        self.seq = delta.seq
        return [delta]

    monkeypatch.setattr(FeedSync, "on_delta", apply_anything)
    monkeypatch.setattr(FeedSync, "advance", lambda self, delta: False)
    world = ran(tmp_path, STORMS, seconds=20)
    assert kinds(world) or world.differences()
