"""Load and page size from an SGLang engine's ``/metrics`` (docs/engine-facts/sglang.md#http-endpoints)."""

import re
from typing import Final

from mmrouter_lib.engines.base.metrics import LABELS, LoadParser, finite_number

METRICS: Final = {
    "running": "sglang:num_running_reqs",
    "waiting": "sglang:num_queue_reqs",
    "kv_usage": "sglang:token_usage",
    "prefix_queries": "sglang:prompt_tokens_total",
    "prefix_hits": "sglang:cached_tokens_total",
    "geometry": "sglang:page_size",
}
"""Quantity -> SGLang's metric name. With several data parallel ranks samples carry ``dp_rank``."""

# Ranks of a tensor parallel group report the same numbers, so the maximum counts instead of the sum. Samples with a
# priority repeat parts of the queue's total.
parse_load = LoadParser(METRICS, "dp_rank", max, skip=re.compile(r'(?:^|,)\s*priority="[^"]'))

_PAGE_SIZE = re.compile(rf"^{re.escape(METRICS['geometry'])}(?:{LABELS})?[ \t]+(\S+)", re.MULTILINE)


def parse_block_size(metrics_text: str) -> int | None:
    """Return the engine's tokens per page, ``None`` where the text does not have it."""
    for _, text in _PAGE_SIZE.findall(metrics_text):
        size = finite_number(text)
        if size is not None and size >= 1:
            return int(size)
    return None
