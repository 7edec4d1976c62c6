"""What a router's log says about its predictions and decisions."""

import logging

import pytest
from unit.router.preparing import text
from unit.router.router_rig import value
from unit.router.test_skipped_predictions import ID, body, deployed, routed

from mmrouter_router.core.log_limit import LogLimit
from mmrouter_router.explain.log_lines import prediction_line
from mmrouter_router.request.prepared import CHAT

WORDS = [text("what is this? " * 20)]


@pytest.mark.parametrize(("level", "lines"), [("DEBUG", 2), ("INFO", 0)])
async def test_each_decision_is_one_line_at_level_debug(caplog, level, lines):
    caplog.set_level(level, "mmrouter")
    async with routed(policy="kv") as (r, client):
        ids = [(await client.post(CHAT, content=body(*WORDS))).headers[ID] for _ in range(2)]
        messages = [record.getMessage() for record in caplog.records if record.name == "mmrouter.decision"]
        assert [line.split()[0] for line in messages] == ids[:lines]
        trace = r.decisions.get(ids[0])
        blocks = trace.decision.choice.winner.blocks
        assert all(f"{trace.decision.exactness}" in line for line in messages)
        assert all(line.endswith(f" of {blocks} blocks held") and line.count("blocks held") == 1 for line in messages)
        assert value(r, "hit_ratio_count") == 2


async def test_an_unpredicted_request_has_no_hit_ratio_and_says_so(caplog):
    caplog.set_level("DEBUG", "mmrouter")
    async with routed(policy="roundRobin") as (r, client):
        await client.post(CHAT, content=body(*WORDS))
        (line,) = [record.getMessage() for record in caplog.records if record.name == "mmrouter.decision"]
        assert "affinity (policy:routing.policy); turn " in line
        assert line.endswith("; not predicted")
        assert value(r, "hit_ratio_count") == 0


@pytest.mark.parametrize(
    ("policy", "roles", "unknown", "words"),
    [
        ("kv", ("worker",), "", " and completions, are exact: family qwen2_vl is modelled for vllm;"),
        ("kv", ("worker",), "new", "no prompt of new is predicted for vllm (tokenizer:missing), and there is no"),
        ("kv", ("worker", "renderer"), "new", "exact by the renderers' prompts, because family new is not modelled"),
        ("roundRobin", ("worker",), "", "; policy roundRobin ignores prompts, so only samples are predicted;"),
    ],
)
def test_the_line_at_the_start_says_what_is_exact_and_why_not(policy, roles, unknown, words):
    spec = deployed(policy, roles=roles).spec
    reason = "tokenizer:missing" if unknown else ""
    assert words in prediction_line(spec, family="qwen2_vl", unknown=unknown, learns_images=False, unpredicted=reason)


def test_the_line_at_the_start_says_that_media_are_not_predicted():
    line = prediction_line(deployed("kv").spec, family="qwen3", unknown="", learns_images=True, text_only=True)
    assert "chats without media, and completions, are exact: the texts of qwen3 are modelled for vllm;" in line
    assert line.endswith("; chats with media are placed by affinity")


def test_the_line_at_the_start_says_why_no_overlap_is_promised():
    line = prediction_line(
        deployed("kv").spec, family="new", unknown="", learns_images=False, hidden=("states", "windows")
    )
    assert "; no overlap is promised, because vllm does not tell which states and windows it drops;" in line


def test_lines_at_debug_are_not_limited():
    limit = LogLimit(burst=1, per_second=0)

    def passed(level: int) -> list[bool]:
        record = logging.LogRecord("mmrouter", level, __file__, 1, "line", None, None)
        return [limit.filter(record) for _ in range(3)]

    assert (passed(logging.DEBUG), passed(logging.INFO)) == ([True] * 3, [True, False, False])
