"""Flags of engines that mmrouter sets itself are refused in a resource, with the reason and the field to use."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.engines.conftest import document

from mmrouter_lib.api import SpecError, parse_deployment
from mmrouter_lib.api.engine_traits import VLLM_FLAGS
from mmrouter_lib.api.owned_flag_rules import is_flag

SPELLINGS = (
    "--block-size --block-size=32 --block_size --block_size=32 --block --kv-events-config.endpoint -tp -tp=2 "
    "--kv-events-config.endpoint=tcp://*:1 --no-enable-prefix-caching --no_enable_prefix_caching"
)


@pytest.mark.parametrize("arg", SPELLINGS.split())
def test_an_owned_flag_is_refused_in_every_spelling(arg: str) -> None:
    with pytest.raises(SpecError, match=r"^spec\.engine\.args\[1\]: .*cannot be set here"):
        parse_deployment(document(engine={"type": "vllm", "args": ["--enforce-eager", arg]}))


@pytest.mark.parametrize(
    ("engine", "flag", "why"),
    [
        ("vllm", "--default-mm-loras", "clients name the adapter that answers"),
        ("sglang", "--max-loaded-loras", "an adapter that is loaded again has lost its blocks"),
    ],
)
def test_a_flag_that_would_make_adapters_inexact_is_refused_with_the_reason(engine: str, flag: str, why: str) -> None:
    with pytest.raises(SpecError, match=f"{flag} cannot be set here, because {why}"):
        parse_deployment(document(engine={"type": engine, "image": "x", "args": [flag, "1"]}))


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (["--block-size", "16"], "--block-size"),
        (["--block-size=16"], "--block-size"),
        (["--block_size=16"], "--block_size sets --block-size, which"),
    ],
)
def test_the_message_names_the_field_that_replaces_the_flag_and_the_reason(args: list[str], shown: str) -> None:
    pool = {"name": "w", "role": "worker", "accelerator": {"kind": "cpu"}, "args": args}
    with pytest.raises(SpecError) as caught:
        parse_deployment(document(pools=[pool]))
    assert str(caught.value) == (
        f"spec.pools[0].args[0]: {shown} cannot be set here, because routers predict block keys from it; "
        "use spec.engine.blockSize"
    )


@pytest.mark.parametrize(
    "args",
    [
        ["--load-format", "dummy", "--dtype", "float32", "--enforce-eager", "--max-model-len", "8192"],
        ["--config-format", "hf", "--model-impl", "auto", "--hf-overrides", "{}", "--num-gpu-blocks-override=64"],
        ["--speculative-config", '{"model": "--block-size"}'],
    ],
)
def test_other_flags_pass(args: list[str]) -> None:
    parse_deployment(document(engine={"type": "vllm", "args": args}))


@given(st.sampled_from(sorted(owned.name for owned in VLLM_FLAGS)), st.sampled_from(["", "=1", "=a=b"]), st.booleans())
def test_underscores_and_values_never_hide_a_flag(name: str, value: str, underscores: bool) -> None:
    spelled = "--" + name[2:].replace("-", "_") if underscores and name.startswith("--") else name
    assert is_flag(spelled + value, name)
