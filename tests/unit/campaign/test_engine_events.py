"""The target ``engine_events`` compares every cache group of a modelled engine with the router's index."""

import random

import msgspec
import pytest
from campaign.target import BrokenPropertyError
from campaign.targets.engine_events import EngineEvents

from mmrouter_lib import feed
from mmrouter_router.fleet.workers import Fleet, Worker


def check_engines_with_several_groups() -> None:
    with EngineEvents() as target:
        for number in range(8):
            target.check(b"groups\n" + random.Random(number).randbytes(60))


def test_every_group_of_an_engine_equals_its_index() -> None:
    check_engines_with_several_groups()


def test_a_block_that_stays_indexed_in_another_group_than_the_primary_one_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = Fleet.on_published

    def without_removals(fleet: Fleet, worker: Worker, frame: feed.Published) -> object:
        if isinstance(frame, feed.Delta) and frame.group != worker.layout.primary:
            frame = msgspec.structs.replace(frame, removed=b"")
        return taken(fleet, worker, frame)

    monkeypatch.setattr(Fleet, "on_published", without_removals)
    with pytest.raises(BrokenPropertyError, match="indexed"):
        check_engines_with_several_groups()
