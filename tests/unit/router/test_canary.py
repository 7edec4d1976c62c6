"""The canary's second try where an engine's metrics tell another block size than its events."""

from types import SimpleNamespace

import pytest
from unit.router.rig import Rig

from mmrouter_lib import feed
from mmrouter_router.explain.differences import Difference
from mmrouter_router.verify.canary import Canary

METRICS, EVENTS = 16, 32
"""Tokens per block."""


class Feeder:
    """A sidecar that grants the claim and takes the result."""

    def __init__(self) -> None:
        self.result: feed.CanaryReport | None = None

    async def request(self, make):
        asked = make(1)
        if isinstance(asked, feed.CanaryResult):
            self.result = asked.canary
        return [feed.ClaimAnswer(1, True, "router")]


@pytest.mark.parametrize("cause", ["block_size", "truncation"])
@pytest.mark.parametrize(("shown", "sizes"), [(EVENTS, [METRICS, EVENTS]), (METRICS, [METRICS])])
async def test_a_canary_is_repeated_with_the_block_size_that_the_first_events_show(cause, shown, sizes):
    rig = Rig()
    worker = rig.worker("a", canary="Unknown", block_size=METRICS)
    compared: list[int] = []

    class Compared(Canary):
        async def compare(self, target, feeder):
            compared.append(target.block_size)
            rig.beat(worker, "Unknown", block_size=shown)
            if target.block_size == EVENTS:
                return None, 7
            return Difference(cause, "predicted blocks of 16 tokens"), 0

    probes = SimpleNamespace(publishing_roles={"worker"})
    feeder = Feeder()
    report = await Compared("router", rig.fleet, probes, None, 0, rig.metrics).verify(worker, feeder, METRICS)
    assert compared == sizes
    assert report == feeder.result
    assert (report.result, report.compared) == (("True", 7) if shown == EVENTS else ("False", 0))
