"""Policies that ignore the prompt: predictions are skipped unless needed, and can be made afterwards."""

import json
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.router.preparing import image, text
from unit.router.rig import IDS, KEYS, Engine, Rig, prepared, resource
from unit.router.router_rig import client_of, join, member, router, value

from mmrouter_router.explain.decisions import BODY_BYTES, DecisionLog, DecisionTrace
from mmrouter_router.intake.api_key_auth import DEFAULT
from mmrouter_router.request.prepared import CHAT
from mmrouter_router.scheduling.scoring import PROMPT_BLIND_POLICIES

ID = "x-mmrouter-request-id"
SHOW = {"x-mmrouter-control": "t"}


def deployed(policy: str = "roundRobin", ratio: str = "0", engine: str = "vllm", roles=("worker",), **more):
    return resource(
        engine={"type": engine, "blockSize": 16},
        routing={"policy": policy},
        verification={"sampleRatio": ratio},
        pools=[{"name": r, "role": r, "replicas": 1, "accelerator": {"kind": "cpu"}} for r in roles],
        **more,
    )


@asynccontextmanager
async def routed(**spec):
    """Start a router with one engine; yields the router and a client."""
    async with Engine() as engine, router(own=deployed(**spec)) as made, client_of(made) as client:
        join(made, member("a", engine.ip))
        yield made, client


def body(*parts) -> bytes:
    return json.dumps({"model": "t", "messages": [{"role": "user", "content": list(parts)}]}).encode()


PARTS = [text("what is this? " * 20), image("a"), text("and this?"), image("b")]


@pytest.mark.parametrize("policy", sorted(PROMPT_BLIND_POLICIES))
async def test_unneeded_prompt_is_not_predicted(policy):
    async with routed(policy=policy) as (r, client):
        answer = await client.post(CHAT, content=body(*PARTS))
        assert answer.status_code == 200
        trace = r.decisions.get(answer.headers[ID])
        assert (trace.prompt_tokens, len(trace.keys), trace.decision.exactness) == (0, 0, "affinity")
        assert trace.decision.reasons == ("policy:routing.policy",)
        assert value(r, "decisions_total", exactness="affinity", reason="policy") == 1
        assert (r.chat.counts.totals["decisions"], value(r, "prompt_blocks_total", worker="a")) == (0, None)
        assert trace.as_json()["predicted"] == "no"


async def test_skipped_prediction_can_be_made_afterwards():
    async with routed() as (r, client):
        answer = await client.post(CHAT, content=body(*PARTS))
        trace = r.decisions.get(answer.headers[ID])
        described = await r.chat.describe(trace)
        before = await r.chat.prepare(CHAT, body(*PARTS), DEFAULT)
        assert described["predicted"] == "afterwards"
        assert described["prompt_tokens"] == len(before.ids) > 0
        assert described["keys"] == [f"{key:016x}" for key in before.keys(16)]
        assert [image["offset"] for image in described["images"]] == [span.offset for span in before.spans]
        assert described["overlap"] == 0
        assert not any(image.media.data for image in trace.unpredicted.images)


async def test_control_token_forces_prediction():
    async with routed() as (r, client):
        answer = await client.post(CHAT, content=body(*PARTS), headers=SHOW)
        assert answer.headers["x-mmrouter-exactness"] == "exact"
        assert int(answer.headers["x-mmrouter-prompt-tokens"]) > 0
        assert r.decisions.get(answer.headers[ID]).as_json()["predicted"] == "before"
        assert r.chat.counts.totals["decisions"] == r.chat.counts.totals["exact_decisions"] == 1


@pytest.mark.parametrize(
    ("spec", "looks"),
    [
        ({}, False),
        ({"ratio": "1"}, True),
        ({"policy": "kv"}, True),
        ({"policy": "leastLoaded"}, True),
        ({"engine": "sglang"}, True),
        ({"roles": ("prefill", "decode")}, True),
        ({"roles": ("worker", "encoder")}, True),
        ({"observability": {"debugHeaders": True}}, True),
    ],
)
async def test_prompts_are_predicted_where_needed(spec, looks):
    async with routed(**spec) as (r, client):
        assert (r.chat.needs_prompt("any request") or r.chat.debug_headers) == looks
        if spec.get("roles") is None:
            answer = await client.post(CHAT, content=body(text("hello")))
            assert (r.decisions.get(answer.headers[ID]).unpredicted is None) == looks


@given(
    st.sampled_from(sorted(PROMPT_BLIND_POLICIES)),
    st.lists(st.integers(0, len(KEYS)), min_size=1, max_size=5),
    st.integers(0, 4),
)
def test_blind_policies_ignore_the_prompt(policy, held, turns):
    rig = Rig()
    for number, blocks in enumerate(held):
        rig.worker(f"w{number}", KEYS[:blocks])
    for _ in range(turns):
        rig.placer.place(prepared(), policy=policy)
    known, unknown = (
        rig.placer.place(replace(prepared("exact"), ids=ids), policy=policy, dry_run=True).choice.winner.name
        for ids in (IDS, IDS[:0])
    )
    assert known == unknown


async def test_bodies_kept_for_later_prediction_are_bounded():
    async with routed() as (r, client):
        long = await client.post(CHAT, content=body(text("x" * BODY_BYTES)))
        assert (await r.chat.describe(r.decisions.get(long.headers[ID])))["predicted"] == "no"
        short = await client.post(CHAT, content=body(text("x" * 1000)))
        trace = r.decisions.get(short.headers[ID])
        few = DecisionLog(size=1000, tokens=3 * trace.weight)
        for number in range(10):
            few.add(f"{number}", trace)
        assert len(few.latest(1000)) == 3


@pytest.mark.parametrize(
    ("prompts", "kept"),
    [
        ([1, 1, 1, 1, 1], [2, 3, 4]),  # three fit
        ([4, 4, 4], [1, 2]),  # of the tokens only two of these
        ([1, 1, 99], [2]),  # the newest stays, whatever it takes
        ([99, 1, 1], [1, 2]),
        ([99, 4, 4, 4, 1, 1], [3, 4, 5]),
    ],
)
def test_newest_traces_are_kept_within_the_token_bound(prompts, kept):
    decisions = DecisionLog(size=3, tokens=10)
    for number, tokens in enumerate(prompts):
        decisions.add(str(number), DecisionTrace(str(number), None, tokens, None, []))
    assert [found.request_id for found in reversed(decisions.latest(9))] == [str(number) for number in kept]
    assert all((decisions.get(str(n)) is not None) is (n in kept) for n in range(len(prompts)))


def test_a_request_that_moves_to_another_engine_is_the_newest_and_counts_once():
    decisions = DecisionLog(size=3, tokens=10)
    for name in ("a", "b", "a", "a", "a"):
        decisions.add(name, DecisionTrace(name, None, 4, None, []))
    assert [found.request_id for found in decisions.latest(9)] == ["a", "b"]
