"""Announcing encoders to the sidecars of SGLang engines: on every change, and again after a sidecar's restart."""

import pytest

from mmrouter_lib import feed
from mmrouter_router.encoding.encoder_announcements import REPEAT_SECONDS, EncoderAnnouncer
from mmrouter_router.fleet.feed_client import FeedRequestError
from mmrouter_router.fleet.workers import Fleet, Member
from mmrouter_router.telemetry.metrics import Metrics

PATIENCE = 60.0


class Sidecar:
    """A feed that records the announcements."""

    def __init__(self):
        self.told, self.silent = [], False

    async def request(self, build):
        if self.silent:
            raise FeedRequestError("no answer")
        self.told.append(build(1))
        return [feed.Accepted(1)]


class Rig:
    def __init__(self):
        self.now = 0.0
        self.fleet = Fleet(Metrics(), clock=lambda: self.now)
        self.sidecars = {}
        self.encoders = EncoderAnnouncer("r1", self.fleet, self.sidecars.get, PATIENCE, lambda: self.now)

    def pod(self, name, role, *, state="up", draining=False, admitted=True):
        worker = self.fleet.join(Member(name, name, f"10.0.0.{len(self.sidecars)}", role, role, admitted=admitted))
        self.sidecars.setdefault(name, Sidecar())
        self.beat(worker, state, draining)
        return worker

    def beat(self, worker, state="up", draining=False):
        name = worker.member.name
        beat = feed.Heartbeat(f"{name}/1", 1, 0, "sglang", state, "0", 16, "m", "", {}, 1, draining)
        self.fleet.on_published(worker, beat)

    async def names(self):
        """Tell, and return what each sidecar was newly told."""
        before = {name: len(sidecar.told) for name, sidecar in self.sidecars.items()}
        await self.encoders.announce()
        return {
            name: [[one for one, _ in word.encoders] for word in sidecar.told[before[name] :]]
            for name, sidecar in self.sidecars.items()
            if len(sidecar.told) > before[name]
        }


@pytest.mark.parametrize("role", ["worker", "prefill"])
async def test_only_engines_that_ask_encoders_get_the_list(role):
    rig = Rig()
    rig.pod("asks", role)
    rig.pod("d1", "decode")
    rig.pod("e2", "encoder")
    rig.pod("e1", "encoder")
    rig.pod("e3", "encoder", state="starting")
    rig.pod("e4", "encoder", draining=True)
    assert await rig.names() == {"asks": [["e1", "e2"]]}
    assert dict(rig.sidecars["asks"].told[0].encoders)["e1"] == rig.fleet.workers["e1"].member.ip


async def test_change_is_announced_at_once_and_repeated():
    rig = Rig()
    rig.pod("w", "worker")
    one = rig.pod("e1", "encoder")
    assert await rig.names() == {"w": [["e1"]]}
    assert await rig.names() == {}
    rig.pod("e2", "encoder")
    assert await rig.names() == {"w": [["e1", "e2"]]}
    rig.beat(one, state="down")
    assert await rig.names() == {"w": [["e2"]]}
    rig.now += REPEAT_SECONDS
    assert await rig.names() == {"w": [["e2"]]}


async def test_unadmitted_encoder_is_listed_alone_or_after_the_timeout():
    rig = Rig()
    rig.pod("w", "worker")
    new = rig.pod("e1", "encoder", admitted=False)
    assert await rig.names() == {"w": [["e1"]]}
    rig.pod("e2", "encoder")
    assert await rig.names() == {"w": [["e2"]]}
    rig.now = new.since + PATIENCE
    assert await rig.names() == {"w": [["e1", "e2"]]}


async def test_silent_sidecar_is_retried_without_blocking_others():
    rig = Rig()
    rig.pod("w1", "worker")
    rig.pod("w2", "worker")
    rig.sidecars["w1"].silent = True
    rig.pod("e1", "encoder")
    assert await rig.names() == {"w2": [["e1"]]}
    rig.sidecars["w1"].silent = False
    assert await rig.names() == {"w1": [["e1"]]}


async def test_empty_list_is_announced():
    rig = Rig()
    rig.pod("w", "worker")
    assert await rig.names() == {"w": [[]]}
