"""Engine flags that belong to the resource cannot come in through `args`."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrouter_lib.api import SpecError, parse_deployment
from mmrouter_lib.api.engine_types.vllm import OWNED_FLAGS
from mmrouter_lib.api.owned_flags import is_flag


@pytest.mark.parametrize(
    "arg",
    [
        "--block-size",
        "--block-size=32",
        "--block_size",
        "--block_size=32",
        "--block",
        "--kv-events-config.endpoint",
        "--kv-events-config.endpoint=tcp://*:1",
        "--no-enable-prefix-caching",
        "--no_enable_prefix_caching",
        "-tp",
        "-tp=2",
    ],
)
def test_an_owned_flag_is_refused_in_every_spelling(document: Any, arg: str) -> None:
    with pytest.raises(SpecError, match=r"^spec\.engine\.args\[1\]: .*cannot be set here"):
        parse_deployment(document(engine={"type": "vllm", "args": ["--enforce-eager", arg]}))


def test_the_message_names_the_field_that_replaces_the_flag(document: Any) -> None:
    pool = {"name": "w", "role": "worker", "accelerator": {"kind": "cpu"}, "args": ["--block-size", "16"]}
    with pytest.raises(SpecError) as caught:
        parse_deployment(document(pools=[pool]))
    assert str(caught.value) == (
        "spec.pools[0].args[0]: --block-size sets --block-size, which cannot be set here; use spec.engine.blockSize"
    )


@pytest.mark.parametrize(
    "args",
    [
        ["--load-format", "dummy", "--dtype", "float32", "--enforce-eager", "--max-model-len", "8192"],
        ["--config-format", "hf", "--model-impl", "auto", "--hf-overrides", "{}", "--num-gpu-blocks-override=64"],
        ["--speculative-config", '{"model": "--block-size"}'],
    ],
)
def test_other_flags_pass(document: Any, args: list[str]) -> None:
    parse_deployment(document(engine={"type": "vllm", "args": args}))


@given(st.sampled_from(sorted(owned.name for owned in OWNED_FLAGS)), st.sampled_from(["", "=1", "=a=b"]), st.booleans())
def test_underscores_and_values_never_hide_a_flag(name: str, value: str, underscores: bool) -> None:
    spelled = "--" + name[2:].replace("-", "_") if underscores and name.startswith("--") else name
    assert is_flag(spelled + value, name)
