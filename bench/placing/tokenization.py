"""Tokenization time of 8k tokens of conversation and a new turn, with and without the router's segment cache.

Both tokenize the same texts, interleaved in one run, and must give equal ids.
"""

import os
import time
from array import array
from pathlib import Path

from tokenizers import Tokenizer

from bench.rows import Row, not_run, percentile, row
from mmrouter_lib.model_folder import find_json
from mmrouter_lib.prompt.segment_cache import SegmentCache
from mmrouter_lib.prompt.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "examples" / "models" / "tiny-qwen2-vl"
REAL = Path(os.environ.get("MMROUTER_MODELS") or ROOT.parent / "shared" / "models") / "Qwen--Qwen2.5-VL-7B-Instruct"
PROMPT_TOKENS = 8192
TURNS = 100
GOAL = ">= 10"
WORDS = (
    "The captain crossed the harbour, counted 49 lamps and wrote a letter home; no reader understood it. "
    "for i in range(0, len(ids), size):\n    yield ids[i : i + size]\n"
    'Größe, 你好,世界 and 3.14159: what the painter saw was "a bridge", or so she said. '
)


class AnswersDifferError(Exception):
    """The cache gave other ids, so its times are not comparable."""


def run() -> list[Row]:
    """Measure the tiny tokenizer of the examples and, where its folder is there, a real one."""
    rows = measure("tiny tokenizer", TINY)
    if (REAL / "tokenizer.json").is_file():
        return rows + measure("Qwen2.5-VL", REAL)
    return [*rows, not_run(name("Qwen2.5-VL", "below the whole text"), "x", f"no folder {REAL.name}", goal=GOAL)]


def measure(label: str, folder: Path) -> list[Row]:
    """Return the rows of one tokenizer. Raises :class:`AnswersDifferError`."""
    tokenizer = load_tokenizer(folder, find_json(folder, "tokenizer_config.json") or {})
    # A second tokenizer, because each caches the words that it has seen.
    cached = SegmentCache(load_tokenizer(folder, find_json(folder, "tokenizer_config.json") or {}))
    history = conversation(tokenizer)
    cached(history, add_special_tokens=False)
    whole_ms: list[float] = []
    cached_ms: list[float] = []
    for number in range(TURNS):
        text = f"{history}<|im_start|>user\nTurn {number}: {WORDS}<|im_end|>\n<|im_start|>assistant\n"
        began = time.perf_counter_ns()
        whole = array("I", tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        middle = time.perf_counter_ns()
        found = cached(text, add_special_tokens=False)
        whole_ms.append((middle - began) / 1e6)
        cached_ms.append((time.perf_counter_ns() - middle) / 1e6)
        if found != whole:
            raise AnswersDifferError(f"{label}: turn {number}")
    slow, fast = percentile(whole_ms, 0.5), percentile(cached_ms, 0.5)
    peer = f"the whole text: p50 {slow:.3g} ms, p99 {percentile(whole_ms, 0.99):.3g} ms"
    return [
        row(name(label, "p50"), fast, "ms"),
        row(name(label, "p99"), percentile(cached_ms, 0.99), "ms"),
        row(name(label, "below the whole text"), slow / fast, "x", peer=peer, goal=GOAL),
    ]


def name(label: str, what: str) -> str:
    """Return a row's name."""
    return f"tokenization, {PROMPT_TOKENS} tokens and a new turn, {label}: {what}"


def conversation(tokenizer: Tokenizer) -> str:
    """Return turns of at least ``PROMPT_TOKENS`` tokens in all."""
    text, tokens = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n", 0
    while tokens < PROMPT_TOKENS:
        role = ("user", "assistant")[text.count("<|im_start|>") % 2 == 0]
        turn = f"<|im_start|>{role}\n{text.count('<|im_end|>')}. {WORDS * 2}<|im_end|>\n"
        text += turn
        tokens += len(tokenizer.encode(turn, add_special_tokens=False).ids)
    return text
