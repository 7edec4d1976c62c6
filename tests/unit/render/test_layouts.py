"""Prefill and decode pools that cannot exchange KV blocks: told, and told apart."""

from typing import Any

import pytest
from unit.render.objects import change, deployments, template_labels
from unit.render.test_children import GOLDENS, load
from unit.render.test_pods_inputs import COMPATIBILITY, hashes, templates

from mmrouter_lib.api import MMRouterDeployment, to_json
from mmrouter_lib.engines.launchers import LAUNCHERS
from mmrouter_operator.model.credentials import SecretData
from mmrouter_operator.model.labels import KV_LAYOUT
from mmrouter_operator.render import render
from mmrouter_operator.render.kv_layouts import mismatches

DISAGGREGATED = {"vllm": "disaggregated", "sglang": "sglang-disaggregated"}


def said(engine: str, prefill: list[str], decode: list[str], shared: list[str] | None = None) -> MMRouterDeployment:
    """Return a deployment whose pools of both roles have these arguments; ``shared``: of all pools."""
    dep = load(DISAGGREGATED[engine])
    args = {"prefill": prefill, "decode": decode}
    pools = [{**pool, "args": args.get(pool["role"], [])} for pool in to_json(dep)["spec"]["pools"]]
    return change(dep, pools=pools, engine={"type": engine, "args": shared or [], "blockSize": 64})


def labels(dep: MMRouterDeployment, secrets: SecretData) -> dict[str, str | None]:
    roles = ("prefill", "decode")
    found = (template_labels(obj) for obj in deployments(render(dep, secrets=secrets)))
    return {mine["mmrouter.io/role"]: mine.get(KV_LAYOUT) for mine in found if mine["mmrouter.io/role"] in roles}


@pytest.mark.parametrize("name", GOLDENS)
def test_pools_that_say_nothing_against_it_are_paired_and_bear_no_more_labels(name: str, secrets: SecretData) -> None:
    assert mismatches(load(name)) == []
    assert not any(KV_LAYOUT in template_labels(obj) for obj in deployments(render(load(name), secrets=secrets)))


@pytest.mark.parametrize("engine", list(DISAGGREGATED))
@pytest.mark.parametrize(
    ("prefill", "decode", "what"),
    [
        (["--kv-cache-dtype", "fp8"], [], "--kv-cache-dtype is fp8 and not set"),
        ([], ["--kv_cache_dtype=fp8_e4m3"], "--kv-cache-dtype is not set and fp8_e4m3"),
        (["--dtype=float16"], ["--dtype=bfloat16"], "--dtype is float16 and bfloat16"),
        (["--dtype", "float32"], [], "--dtype is float32 and not set"),
    ],
)
def test_what_engines_do_not_translate_keeps_pools_apart_by_a_label_of_their_pods(
    secrets: SecretData, engine: str, prefill: list[str], decode: list[str], what: str
) -> None:
    dep = said(engine, prefill, decode)
    (pair,) = mismatches(dep)
    assert pair.sentence() == f"pools prefill and decode cannot exchange KV blocks: {what}"
    found = labels(dep, secrets)
    assert None not in found.values()
    assert found["prefill"] != found["decode"]


@pytest.mark.parametrize("engine", list(DISAGGREGATED))
@pytest.mark.parametrize(
    ("prefill", "decode", "shared"),
    [
        (["--dtype=bfloat16"], [], []),  # which is what the other one may well choose by itself
        (["--dtype", "half"], ["--dtype=float16"], []),
        (["--kv-cache-dtype=auto"], [], []),
        (["--kv-cache-dtype=fp8"], ["--kv-cache-dtype=fp8"], []),
        ([], [], ["--kv-cache-dtype=fp8"]),
        (["--max-num-seqs=4"], [], []),
    ],
)
def test_what_may_well_be_equal_is_left_to_the_engines(
    secrets: SecretData, engine: str, prefill: list[str], decode: list[str], shared: list[str]
) -> None:
    dep = said(engine, prefill, decode, shared)
    assert mismatches(dep) == []
    assert set(labels(dep, secrets).values()) == {None}


def block_sizes(engine: str, prefill: int, decode: int) -> MMRouterDeployment:
    dep = said(engine, [], [])
    sizes = {"prefill": prefill, "decode": decode}
    pools = [{**pool, "blockSize": sizes.get(pool["role"], 64)} for pool in to_json(dep)["spec"]["pools"]]
    return change(dep, pools=pools)


def test_block_sizes_are_translated_by_vllm_and_not_by_sglang() -> None:
    assert mismatches(block_sizes("vllm", 64, 128)) == []
    (pair,) = mismatches(block_sizes("sglang", 64, 128))
    assert pair.differs == {"blockSize": ("64", "128")}
    assert mismatches(block_sizes("sglang", 64, 64)) == []


def test_the_others_backend_is_taken_where_one_side_names_none() -> None:
    assert mismatches(said("vllm", ["--attention-backend=TRITON_ATTN"], [])) == []
    (pair,) = mismatches(said("vllm", ["--attention-backend=TRITON_ATTN"], ["--attention-backend=FLASH_ATTN"]))
    assert pair.differs == {"--attention-backend": ("TRITON_ATTN", "FLASH_ATTN")}


def test_unequal_pools_are_one_set_that_changes_together_and_their_hashes_tell_of_the_label(
    secrets: SecretData,
) -> None:
    before, after = said("vllm", [], []), said("vllm", [], ["--kv-cache-dtype=fp8"])
    found: dict[str, Any] = templates(after, secrets)
    values = {
        name: template["metadata"]["labels"][COMPATIBILITY] for name, template in found.items() if name != "frontend"
    }
    assert values["prefill"] == values["decode"]
    old, new = hashes(templates(before, secrets)), hashes(found)
    assert {name for name in new if new[name] != old[name]} == {"prefill", "decode"}


@pytest.mark.parametrize("engine", list(DISAGGREGATED))
def test_what_keeps_pools_apart_is_among_what_makes_another_set(engine: str) -> None:
    """Else the label would change under pods whose set, and hash, stay as they are."""
    assert LAUNCHERS[engine].kv_exact_flags.keys() <= LAUNCHERS[engine].kv_layout_flags
