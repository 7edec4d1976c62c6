"""vLLM's metrics text: load per data parallel rank, and the engine's own block size."""

import pytest

from mmrouter_lib.engines.base.metrics import RankLoad
from mmrouter_lib.engines.vllm.metrics import parse_block_size, parse_load

TEXT = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a \\"quoted\\" } name"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 1e-3
vllm:cache_config_info{block_size="32",engine="0",hash_block_size="16",num_gpu_blocks="24"} 1.0
"""


def test_load_is_read_per_rank() -> None:
    assert parse_load(TEXT) == {0: RankLoad(3, 2, 0.25), 1: RankLoad(1, 0, 0.001)}


def test_the_engines_own_block_size_is_read_and_not_the_hash_block_size() -> None:
    assert parse_block_size(TEXT) == 32
    assert parse_block_size('vllm:cache_config_info{hash_block_size="16"} 1.0\n') is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nothing",
        'vllm:num_requests_running{engine="0"} NaN',
        'vllm:num_requests_running{engine="0"} many',
        'other:num_requests_running{engine="0"} 1',
    ],
)
def test_missing_samples_give_no_block_size(text: str) -> None:
    assert parse_load(text) == {}


def test_samples_without_labels_belong_to_rank_zero() -> None:
    assert parse_load("vllm:num_requests_waiting 4\n") == {0: RankLoad(0, 4, 0)}
