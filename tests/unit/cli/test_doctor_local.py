"""`mmrouter doctor` on local processes: its advice is about them."""

from typing import Any

import pytest
from unit.cli import healthy_cluster as d

from mmrouter_cli.doctor.check_routing import device_check, event_check, exactness_check, frontend_check


@pytest.mark.parametrize(
    "change",
    [
        {"heard_seconds_ago": None},
        {"engine_state": "starting"},
        {"engine_state": "down"},
        {"synced": False},
        {"epoch": "e2"},
        {"canary": "Unknown", "standing": "degraded"},
        {"canary": "True", "standing": "waiting"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_advice_on_local_processes_is_about_mmrouter_up_and_no_cluster(change: dict[str, Any]) -> None:
    before, now = d.state(d.worker("bad")), d.state(d.worker("bad", **change))
    facts = d.heard(now, d.state(d.worker("bad", **change)), before=before)
    found = {
        is_local: [
            finding.do
            for check in (frontend_check, event_check, device_check, exactness_check)
            for finding in check(facts._replace(is_local=is_local))
        ]
        for is_local in (False, True)
    }
    assert any("kubectl" in do for do in found[False])
    assert not [do for do in found[True] if "kubectl" in do or "operator" in do]
    assert any("mmrouter up" in do for do in found[True])
