"""What an SGLang engine's ``/metrics`` says of its load and its pages (docs/engine-facts/sglang.md#http-endpoints)."""

import math
import re
from typing import Final

from mmrouter_lib.engines.vllm.metrics import Load

METRICS: Final = {
    "running": "sglang:num_running_reqs",
    "waiting": "sglang:num_queue_reqs",
    "kv_usage": "sglang:token_usage",
    "prefix_queries": "sglang:prompt_tokens_total",
    "prefix_hits": "sglang:cached_tokens_total",
    "geometry": "sglang:page_size",
}
"""What we read -> the name that SGLang gives it. With several data parallel ranks samples carry ``dp_rank``."""

_LABELS = r'\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\}'
_SAMPLE = re.compile(
    rf"^({'|'.join(re.escape(METRICS[name]) for name in ('running', 'waiting', 'kv_usage'))})(?:{_LABELS})?[ \t]+(\S+)",
    re.MULTILINE,
)
_PAGE_SIZE = re.compile(rf"^{re.escape(METRICS['geometry'])}(?:{_LABELS})?[ \t]+(\S+)", re.MULTILINE)
_RANK = re.compile(r'(?:^|,)\s*dp_rank="(\d+)"')
_PRIORITY = re.compile(r'(?:^|,)\s*priority="[^"]')


def parse_load(metrics_text: str) -> dict[int, Load]:
    """Return data parallel rank -> load from the text of ``/metrics``; empty when the engine names none of it.

    Ranks of a tensor parallel group say the same, so the greatest value counts and nothing is added up.
    """
    found: dict[int, dict[str, float]] = {}
    for name, labels, text in _SAMPLE.findall(metrics_text):
        if _PRIORITY.search(labels):
            continue  # the same queue by priority, besides its total
        value = _number(text)
        if value is None:
            continue
        rank = _RANK.search(labels)
        values = found.setdefault(int(rank[1]) if rank else 0, {})
        values[name] = max(values.get(name, 0.0), value)
    return {
        rank: Load(*(values.get(METRICS[field], 0.0) for field in ("running", "waiting", "kv_usage")))
        for rank, values in sorted(found.items())
    }


def parse_block_size(metrics_text: str) -> int | None:
    """Return the engine's own tokens per page, ``None`` where it does not say."""
    for _, text in _PAGE_SIZE.findall(metrics_text):
        size = _number(text)
        if size is not None and size >= 1:
            return int(size)
    return None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
