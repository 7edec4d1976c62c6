"""Figures that no scenario has: the longest turn of the event loop beside much new text, and the compiled index."""

import asyncio
import json
import os
import time
from itertools import count
from typing import Final

from bench.placing import index_forms, request_path
from bench.placing.request_path import TINY, WORDS
from bench.placing.workload import BLOCK_SIZE, SEED, build
from bench.quick.verdicts import Figure
from mmrouter_lib import native
from mmrouter_lib.block_keys import block_keys
from mmrouter_lib.model_folder import find_json
from mmrouter_lib.prompt.tokenizer import load_tokenizer

ROUNDS: Final = 7
CHARACTERS: Final = 30_000
"""New text of a request, which is tokenized in a thread."""
WORKERS, HELD, QUERIES = 64, 500, 20
SHORT_TIMES: Final = 1.5
"""Allowed factor for a turn, which is a fraction of a millisecond."""
TURN: Final = f"time: longest turn of the event loop beside {CHARACTERS:,} new characters, over tokenizing them"
INDEX: Final = "time: compiled index, over the Python form"


def longest_turn() -> Figure:
    """Return the longest turn while a request is prepared, over the time that its text takes the tokenizer: the least
    of rounds, in CPU time of the loop's thread.
    """
    whole = load_tokenizer(TINY, find_json(TINY, "tokenizer_config.json") or {})
    numbers, turns, floors = count(), list[float](), list[float]()

    async def measure() -> None:
        ours = request_path.Ours(TINY)
        try:
            for _ in range(ROUNDS):
                text = f"{next(numbers)} {WORDS * (CHARACTERS // len(WORDS))}"
                body = {"model": "bench", "messages": [{"role": "user", "content": text}]}
                turns.append(await _longest_turn(ours, json.dumps(body).encode()))
                began = time.thread_time()
                whole.encode_batch_fast([text], add_special_tokens=False)
                floors.append(time.thread_time() - began)
        finally:
            await ours.close()

    asyncio.run(measure())
    return Figure(TURN, min(turns) / min(floors), "x", allowed=SHORT_TIMES, noisy=True)


async def _longest_turn(ours: request_path.Ours, raw: bytes) -> float:
    loop, longest, last, ended = asyncio.get_running_loop(), 0.0, time.thread_time(), False

    def tick() -> None:
        """Run once in every turn."""
        nonlocal longest, last
        now = time.thread_time()
        longest, last = max(longest, now - last), now
        if not ended:
            loop.call_soon(tick)

    tick()
    await ours.route(raw)
    ended = True
    return longest


def compiled_index() -> Figure:
    """Return the time of a lookup in the compiled index over that in the Python form; the least of rounds."""
    native.load({})
    form, why = native.form, native.why
    native.load(os.environ)
    if form != "native":
        return Figure(INDEX, None, "x", noisy=True, why=why)
    load = build(workers=WORKERS, blocks_per_worker=HELD, queries=QUERIES)
    prompts = [block_keys(ids, BLOCK_SIZE, (), SEED) for ids in load.queries]
    spent: dict[str, list[float]] = {}
    for name in index_forms.FORMS:
        index = index_forms.empty(name, WORKERS)
        index_forms.fill(index, load)
        for _ in range(ROUNDS):
            began = time.thread_time()
            index_forms.look(index, prompts, (1 << WORKERS) - 1, [])
            spent.setdefault(name, []).append(time.thread_time() - began)
    return Figure(INDEX, min(spent["native"]) / min(spent["python"]), "x", noisy=True)
