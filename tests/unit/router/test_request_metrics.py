"""What is counted of requests: by worker, by hit, and in bounded numbers of series."""

from unit.router.router_rig import value
from unit.router.test_skipped_predictions import PARTS, body, routed

from mmrouter_router.api.request_metrics import RequestCounts
from mmrouter_router.fleet.membership import Membership
from mmrouter_router.request.prepared import CHAT
from mmrouter_router.telemetry.metrics import Metrics


async def test_a_request_is_counted_by_worker_and_hit_and_a_worker_that_left_is_not_shown():
    async with routed(policy="kv") as (r, client):
        assert (await client.post(CHAT, content=body(*PARTS))).status_code == 200
        blocks = value(r, "prompt_blocks_total", worker="a")
        assert blocks == r.chat.counts.totals["prompt_blocks"] > 0
        assert value(r, "first_byte_seconds_count", cached="miss") == 1
        assert value(r, "request_seconds_count") == 1
        r.apply_membership(Membership(()))
        assert value(r, "prompt_blocks_total", worker="a") is None


async def test_a_request_without_a_prediction_is_neither_a_hit_nor_a_miss():
    async with routed() as (r, client):
        await client.post(CHAT, content=body(*PARTS))
        seen = {cached: value(r, "first_byte_seconds_count", cached=cached) for cached in ("hit", "miss", "unknown")}
        assert seen == {"hit": 0, "miss": 0, "unknown": 1}


def test_an_incomplete_answer_has_no_time_to_its_end() -> None:
    metrics = Metrics()
    counted = RequestCounts(metrics)
    for code in ("499", "broken_off", "429", "200"):
        counted.ended(CHAT, code, 2.0)
    assert metrics.registry.get_sample_value("mmrouter_request_seconds_count") == 1
