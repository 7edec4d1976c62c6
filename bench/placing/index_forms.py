"""The block index in both forms, in turns: CPU time per stored block and per matched prompt of 8k tokens, and memory
per unique block (docs/performance.md, *index*). Run as a program, it is the process whose memory is measured.
"""

import ctypes
import gc
import os
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Final

import psutil

from bench.placing.workload import BLOCK_SIZE, SEED, BlockWorkload, build
from bench.report import AnswersDifferError, Row, not_run, row
from mmrouter_lib import native
from mmrouter_lib.block_keys import block_keys
from mmrouter_router.fleet.index import Index

SIZES: Final = {64: 4000, 256: 4000, 1000: 500}
"""Workers -> blocks of each."""
QUERIES, ROUNDS = 100, 3
MEMORY_WORKERS, MEMORY_BLOCKS = 64, 16_000
GOALS: Final = {("store", 64): "<= 0.02", ("match", 64): "<= 4", ("match", 256): "<= 8"}
MEMORY_GOAL = "<= 40"
FORMS: Final = {"python": "0", "native": "1"}
"""Form -> the value of the switch."""


def run() -> list[Row]:
    """Measure every size. Raises :class:`AnswersDifferError`."""
    rows = [each for workers, blocks in SIZES.items() for each in measure(workers, blocks)]
    name = f"index, {MEMORY_WORKERS} workers: memory per unique block"
    memory = {form: bytes_per_block(form) for form in present()}
    return rows + _rows(name, memory, "bytes", MEMORY_GOAL)


def present() -> list[str]:
    return [form for form in FORMS if form in ("python", native.form)]


def measure(workers: int, blocks: int) -> list[Row]:
    """Return the times of one size. Raises :class:`AnswersDifferError`."""
    load = build(workers=workers, blocks_per_worker=blocks, queries=QUERIES)
    prompts = [block_keys(ids, BLOCK_SIZE, (), SEED) for ids in load.queries]
    everyone = (1 << workers) - 1
    store: dict[str, list[float]] = {form: [] for form in present()}
    match: dict[str, list[float]] = {form: [] for form in present()}
    for _ in range(ROUNDS):
        answers = []
        for form in present():
            index = empty(form, workers)
            store[form].append(_timed(lambda index=index: fill(index, load)))  # type: ignore[misc]
            overlaps: list[list[int]] = []
            match[form].append(_timed(lambda index=index, overlaps=overlaps: look(index, prompts, everyone, overlaps)))  # type: ignore[misc]
            answers.append((len(index), [index.held(slot) for slot in range(workers)], overlaps))
        if answers.count(answers[0]) != len(answers):
            raise AnswersDifferError(f"the forms of the index differ with {workers} workers")
    per_block = {form: min(times) / load.blocks for form, times in store.items()}
    per_prompt = {form: min(times) / QUERIES for form, times in match.items()}
    name = f"index, {workers} workers"
    return [
        *_rows(f"{name}: store, per block", per_block, "us", GOALS.get(("store", workers))),
        *_rows(f"{name}: match, per prompt", per_prompt, "us", GOALS.get(("match", workers))),
    ]


def empty(form: str, workers: int) -> Index:
    """Return an index of a form, in which the candidates have the slots from 0."""
    before = os.environ.get(native.SWITCH)
    native.load({native.SWITCH: FORMS[form]})
    try:
        index = Index()
    finally:
        native.load({} if before is None else {native.SWITCH: before})
    for _ in range(workers):
        index.join()
    return index


def fill(index: Index, load: BlockWorkload) -> None:
    for event in load.events:
        index.store(event.worker, event.keys)


def look(index: Index, prompts: Sequence["array[int]"], wanted: int, overlaps: list[list[int]]) -> None:
    for keys in prompts:
        overlaps.append(index.leading(keys, wanted))


def _timed(work: Callable[[], None]) -> float:
    """Return CPU microseconds of this thread."""
    gc.collect()
    gc.disable()
    try:
        began = time.thread_time_ns()
        work()
        return (time.thread_time_ns() - began) / 1000
    finally:
        gc.enable()


def _rows(name: str, values: dict[str, float], unit: str, goal: str | None) -> list[Row]:
    """Return a row per form, and their ratio; the goal is that of the compiled form."""
    rows = [row(f"{name}, Python", values["python"], unit)]
    if "native" not in values:
        return [*rows, not_run(f"{name}, compiled", unit, native.why, goal=goal)]
    compiled = values["native"]
    return [
        *rows,
        row(f"{name}, compiled", compiled, unit, goal=goal),
        row(f"{name}, Python over compiled", values["python"] / compiled, "x"),
    ]


def bytes_per_block(form: str) -> float:
    """Return the bytes by which a process of this form grows per unique block. Raises ``CalledProcessError``."""
    environment = {**os.environ, native.SWITCH: FORMS[form]}
    command = [sys.executable, "-m", "bench.placing.index_forms"]
    return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def print_memory() -> None:
    load = build(workers=MEMORY_WORKERS, blocks_per_worker=MEMORY_BLOCKS, queries=0)
    index, process = empty(native.form, MEMORY_WORKERS), psutil.Process()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # otherwise the index grows into what building the load has freed
    before = process.memory_info().rss
    fill(index, load)
    sys.stdout.write(f"{(process.memory_info().rss - before) / len(index)}\n")


if __name__ == "__main__":
    print_memory()
