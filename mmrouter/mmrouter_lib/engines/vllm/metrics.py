"""What a vLLM engine's ``/metrics`` says of its load and its blocks (docs/engine-facts/vllm.md#metrics)."""

import math
import re
from dataclasses import dataclass
from typing import Final

METRICS: Final = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_usage": "vllm:kv_cache_usage_perc",
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "geometry": "vllm:cache_config_info",
}
"""What we read -> the name that vLLM gives it. All carry the label ``engine``, the data parallel rank."""

_LABELS = r'\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\}'
_SAMPLE = re.compile(
    rf"^({'|'.join(re.escape(METRICS[name]) for name in ('running', 'waiting', 'kv_usage'))})(?:{_LABELS})?[ \t]+(\S+)",
    re.MULTILINE,
)
_GEOMETRY = re.compile(rf"^{re.escape(METRICS['geometry'])}{_LABELS}", re.MULTILINE)
_RANK = re.compile(r'(?:^|,)\s*engine="(\d+)"')
_BLOCK_SIZE = re.compile(r'(?:^|,)\s*block_size="(\d+)"')


@dataclass(frozen=True, slots=True)
class Load:
    """One rank: requests running, requests waiting, share of KV blocks in use (0..1)."""

    running: float = 0.0
    waiting: float = 0.0
    kv_usage: float = 0.0


def parse_load(metrics_text: str) -> dict[int, Load]:
    """Return data parallel rank -> load from the text of ``/metrics``; empty when the engine names none of it."""
    found: dict[int, dict[str, float]] = {}
    for name, labels, text in _SAMPLE.findall(metrics_text):
        try:
            value = float(text)
        except ValueError:
            continue
        if not math.isfinite(value):
            continue
        rank = _RANK.search(labels)
        values = found.setdefault(int(rank[1]) if rank else 0, {})
        values[name] = values.get(name, 0.0) + value
    return {
        rank: Load(*(values.get(METRICS[field], 0.0) for field in ("running", "waiting", "kv_usage")))
        for rank, values in sorted(found.items())
    }


def parse_block_size(metrics_text: str) -> int | None:
    """Return the engine's own tokens per block, ``None`` where it does not say."""
    for labels in _GEOMETRY.findall(metrics_text):
        size = _BLOCK_SIZE.search(labels)
        if size and int(size[1]) > 0:
            return int(size[1])
    return None
