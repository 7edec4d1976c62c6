"""Load and block size from a vLLM engine's ``/metrics`` (docs/engine-facts/vllm.md#metrics)."""

import operator
import re
from typing import Final

from mmrouter_lib.engines.base.metrics import LABELS, LoadParser

METRICS: Final = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_usage": "vllm:kv_cache_usage_perc",
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "geometry": "vllm:cache_config_info",
}
"""Quantity -> vLLM's metric name. All carry the label ``engine``, the data parallel rank."""

parse_load = LoadParser(METRICS, "engine", operator.add)

_GEOMETRY = re.compile(rf"^{re.escape(METRICS['geometry'])}{LABELS}", re.MULTILINE)
_BLOCK_SIZE = re.compile(r'(?:^|,)\s*block_size="(\d+)"')


def parse_block_size(metrics_text: str) -> int | None:
    """Return the engine's tokens per block, ``None`` where the text does not have it."""
    for labels in _GEOMETRY.findall(metrics_text):
        size = _BLOCK_SIZE.search(labels)
        if size and int(size[1]) > 0:
            return int(size[1])
    return None
