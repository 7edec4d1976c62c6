"""What an engine's arguments and events tell of hits beside a drafter."""

import json

import pytest

from mmrouter_lib.cache_layout import CacheGroup, cache_layout
from mmrouter_lib.engines.vllm.drafters import drafter

FULL, WINDOW, STATES = (CacheGroup(0, "full_attention"), CacheGroup(1, "sliding_window", 64), CacheGroup(2, "mamba"))


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"method": "eagle3", "model": "m"}, "drops"),
        ({"method": "mtp", "num_speculative_tokens": 1}, "drops"),
        ({"method": "qwen3_next_mtp"}, "drops"),
        ({"method": "mtp", "disable_eagle_block_drop": True}, ""),
        ({"method": "ngram"}, ""),
        ({"method": "draft_model", "model": "m"}, ""),
        ({"model": "m", "num_speculative_tokens": 3}, "unknown"),
    ],
)
def test_the_method_says_whether_a_drafter_reads_hidden_states(config, found):
    text = json.dumps(config)
    for args in (["--speculative-config", text], [f"--speculative-config={text}"], ["-sc", text]):
        assert drafter(["--max-model-len", "9", *args]) == found


def test_options_may_be_written_one_by_one():
    assert drafter(["--speculative-config.method", "eagle"]) == "drops"
    switched_off = ["--speculative-config.disable_eagle_block_drop=true"]
    assert drafter(["--speculative-config.method=mtp", *switched_off]) == ""
    assert drafter(["--speculative_config.model", "m"]) == "unknown"


def test_an_engine_without_a_drafter_drops_nothing_and_one_of_an_unreadable_config_may():
    assert drafter(["--max-model-len", "9"]) == ""
    assert drafter(["--speculative-config", "{broken"]) == "unknown"


def test_attention_is_computed_anew_for_a_drafter_and_states_are_not():
    layout = cache_layout([FULL, STATES], drafter="drops")
    assert (layout.recomputed, layout.bounds) == (frozenset({0}), ())
    assert cache_layout([FULL, STATES]).recomputed == frozenset()
    assert cache_layout((), drafter="drops").recomputed == frozenset({0})


def test_windows_beside_a_drafter_and_unknown_drafters_are_bounded():
    assert cache_layout([FULL, WINDOW], drafter="drops").bounds == ("drafter",)
    assert cache_layout([FULL], drafter="unknown").bounds == ("drafter",)
