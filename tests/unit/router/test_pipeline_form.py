"""Which stages a request goes through: the fullest form that the pods can serve, and whether it is policy it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrouter_router.scheduling.pipeline_form import (
    ENOUGH,
    EXPLORE,
    SHORT_TOKENS,
    OffloadPolicy,
    canary_applies,
    choose_form,
    publishes_blocks,
)

ROLES = ("encoder", "prefill", "decode", "worker")
subsets = st.frozensets(st.sampled_from(ROLES))
PAIR = frozenset({"prefill", "decode"})
resources = subsets.map(lambda pools: pools | PAIR if pools & PAIR else pools)
"""Roles of a resource: one of a pair is refused without the other."""


@given(st.sampled_from(["vllm", "sglang"]), resources, subsets)
def test_form_uses_able_pods_and_lists_degraded_pools(engine, pools, up):
    able = pools & up
    found = choose_form(engine, pools, able)
    assert found.answers <= able
    if found.prefills:
        assert {"prefill", "decode"} <= able
    if found.encodes:
        assert "encoder" in able
    assert (not found.degraded) == (able >= pools - {"worker"})


@given(resources, subsets)
def test_vllm_answers_while_any_language_model_is_up(pools, up):
    able = pools & up
    assert bool(choose_form("vllm", pools, able).answers) == bool(able - {"encoder"})


@pytest.mark.parametrize(
    ("engine", "pools", "able", "name", "degraded"),
    [
        ("vllm", "worker", "worker", "whole", ()),
        ("vllm", "encoder worker", "encoder worker", "encode-whole", ()),
        ("vllm", "encoder worker", "worker", "whole", ("no_encoder",)),
        ("vllm", "prefill decode", "prefill decode", "prefill-decode", ()),
        ("vllm", "prefill decode", "decode", "whole", ("no_prefill",)),
        ("vllm", "prefill decode", "prefill", "whole", ("no_decode",)),
        ("vllm", "encoder prefill decode", "encoder prefill decode", "encode-prefill-decode", ()),
        ("vllm", "encoder prefill decode", "prefill decode", "prefill-decode", ("no_encoder",)),
        ("vllm", "encoder prefill decode", "encoder decode", "whole", ("no_prefill",)),
        ("vllm", "encoder prefill decode", "encoder prefill", "encode-whole", ("no_decode",)),
        ("sglang", "prefill decode", "prefill decode", "prefill-decode", ()),
        ("sglang", "prefill decode worker", "decode worker", "whole", ("no_pair",)),
        ("sglang", "encoder worker", "worker", "whole", ("no_encoder",)),
        ("sglang", "encoder prefill decode", "encoder prefill decode", "prefill-decode", ()),
    ],
)
def test_form_degrades_with_a_pool_down(engine, pools, able, name, degraded):
    found = choose_form(engine, pools.split(), able.split())
    assert (found.name, found.degraded) == (name, degraded)
    assert found.answers


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_only_sglang_is_paired(engine):
    pair = choose_form(engine, PAIR, PAIR)
    assert pair.prefills
    assert pair.paired == (engine == "sglang")
    assert not choose_form(engine, ("worker",), ("worker",)).paired


@pytest.mark.parametrize(("engine", "roles"), [("vllm", "worker prefill decode"), ("sglang", "worker prefill")])
def test_canary_roles_and_publishing_roles(engine, roles):
    assert {role for role in (*ROLES, "renderer") if publishes_blocks(engine, role)} == set(roles.split())
    assert {role for role in (*ROLES, "renderer") if canary_applies(role)} == {"worker", "prefill", "decode"}


@pytest.mark.parametrize("able", ["prefill", "decode", "encoder", ""])
def test_half_an_sglang_pair_answers_nothing(able):
    assert not choose_form("sglang", ("encoder", "prefill", "decode"), able.split()).answers


def test_short_remaining_prompt_is_computed_locally():
    policy = OffloadPolicy()
    assert policy.reason_local(104) == "short"  # 104 of 1000 tokens remain
    assert policy.reason_local(2048) == ""
    assert policy.reason_local(1000) == ""  # all of 1000 remain


def learn(policy, *, local, remote):
    """Ask until both ways are known, each taking ``seconds(tokens)``."""
    for number in range(4 * ENOUGH):
        tokens = SHORT_TOKENS + 300 * (number % 7)
        is_local = bool(policy.reason_local(tokens))
        policy.observe(tokens, local(tokens) if is_local else remote(tokens), remote=not is_local)
    return policy


def local_share(policy, tokens):
    return sum(bool(policy.reason_local(tokens)) for _ in range(4 * EXPLORE)) / (4 * EXPLORE)


def test_faster_path_is_taken_and_the_other_explored():
    slow_transfer = learn(OffloadPolicy(), local=lambda n: n * 1e-4, remote=lambda n: 0.5 + n * 1e-4)
    assert local_share(slow_transfer, 1500) == 1 - 1 / EXPLORE
    busy_decoder = learn(OffloadPolicy(), local=lambda n: n * 1e-3, remote=lambda n: 0.01 + n * 1e-4)
    assert local_share(busy_decoder, 1500) == 1 / EXPLORE


def test_fixed_transfer_cost_pays_off_for_long_prompts():
    policy = learn(OffloadPolicy(), local=lambda n: n * 1e-3, remote=lambda n: 1.5 + n * 1e-4)
    assert local_share(policy, 600) > 0.9
    assert local_share(policy, 6000) < 0.1


def test_bound_of_0_always_offloads():
    policy = learn(OffloadPolicy(0), local=lambda n: 0.0, remote=lambda n: 9.0)
    assert local_share(policy, 0) == local_share(policy, 6000) == 0


def test_short_prompts_are_not_measured():
    policy = OffloadPolicy()
    for _ in range(100):
        policy.observe(SHORT_TOKENS - 1, 9.0, remote=True)
    assert policy.remote.measured == 0
