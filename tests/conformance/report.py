"""The page docs/conformance.md: which engine and family was compared, with what result, and what was not run.

A run collects :class:`Cell` objects and writes them as JSON; the page is generated from that JSON alone, so every
number can be traced to a run.
"""

import fcntl
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conformance.prediction import Report

SCENARIOS = 10
NAMES = {
    "qwen2_vl": "Qwen2-VL",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "llava": "LLaVA-1.5",
    "llava_next": "LLaVA-NeXT",
    "phi3_v": "Phi-3-vision",
}
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
PROVIDERS = {"vllm": "uuid of ours", "sglang": "artifact"}
"""Engine -> where an image's identity comes from where nothing else is said."""
AFFINITY = "served by affinity: SGLang expands its images with other code, which the router does not model"
NOT_RUN = {
    ("sglang", "llava"): f"{AFFINITY}; 0.5.23 also fails to build a CLIP tower in its generic wrapper",
    ("sglang", "llava_next"): AFFINITY,
    ("sglang", "phi3_v"): "not supported by SGLang 0.5.23",
}
EXPECTED = [
    *(("vllm", family, PROVIDERS["vllm"]) for family in NAMES),
    ("sglang", "qwen2_vl", "artifact"),
    ("sglang", "qwen2_5_vl", "artifact"),
    ("sglang", "qwen2_5_vl", "learned"),
    ("sglang", "qwen3_vl", "artifact"),
    *((engine, family, "") for engine, family in NOT_RUN),
]


@dataclass
class Cell:
    """One engine and family. ``hits`` of ``repeats``: blocks that repeated requests took from the cache, and could."""

    engine: str
    family: str
    version: str = ""
    provider: str = ""
    requests: int = 0
    blocks: int = 0
    matched: int = 0
    mismatches: int = 0
    scenarios: dict[str, list[str]] = field(default_factory=dict)
    hits: int = 0
    repeats: int = 0
    not_run: str = ""
    note: str = ""


def run_folder() -> Path | None:
    named = os.environ.get("MMROUTER_RUN_FOLDER")
    return Path(named) if named else None


@contextmanager
def exclusive(run: Path | None) -> Iterator[None]:
    """Keep the other sessions of a run from the published files meanwhile."""
    if run is None:
        yield
        return
    with (run / "conformance.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Cells:
    """Collects a run's cells and keeps them in files, so that a run which ends early leaves what it has. A run may be
    several sessions side by side, each with cells of its own: what is written into ``folder`` holds those of all
    sessions that share the folder ``run``.
    """

    def __init__(self, folder: Path, run: Path | None = None) -> None:
        self._folder = folder
        self._run = run
        self._cells: dict[tuple[str, str, str], Cell] = {}

    @contextmanager
    def of(self, engine: str, family: str, provider: str) -> Iterator[Cell]:
        """Give the cell of what runs now; a skip inside becomes its reason."""
        cell = self._cells[engine, family, provider] = Cell(engine, family, provider=provider)
        cell.not_run = "the run failed before it compared anything"
        try:
            yield cell
        except pytest.skip.Exception as skipped:
            cell.not_run = str(skipped).removeprefix("not run: ")
            raise
        finally:
            self._write()

    def compared(
        self, engine: str, family: str, report: "Report", repeats: tuple[int, int], *, provider: str = ""
    ) -> None:
        """``provider``: that of the cell, unless it is the engine's usual one."""
        cell = self._cells[engine, family, provider or PROVIDERS[engine]]
        cell.not_run = ""
        cell.requests, cell.blocks, cell.matched = report.requests, report.blocks, report.matched
        cell.mismatches = len(report.mismatches)
        cell.hits, cell.repeats = repeats
        if report.ragged:
            cell.note = f"{report.ragged} events of a sliding window aligned by recomputation"
        self._write()

    def scenarios(self, engine: str, family: str, results: Mapping[str, list[str]], *, provider: str = "") -> None:
        """``results``: scenario -> what was not as it must be."""
        self._cells[engine, family, provider or PROVIDERS[engine]].scenarios = dict(results)
        self._write()

    def lines(self) -> Iterator[str]:
        """Yield a line for each cell, those that were not run with the reason. A session on its own names every cell of
        the table, one of several those that it had.
        """
        for cell in rows(self._cells) if self._run is None else self._cells.values():
            counts = f"blocks {cell.blocks}, matched {cell.matched}, mismatches {cell.mismatches}"
            name = f"{cell.engine} {cell.family} {cell.provider}".rstrip()
            yield f"{name}: {f'not run: {cell.not_run}' if cell.not_run else counts}"

    def _write(self) -> None:
        cells = [asdict(cell) for cell in self._cells.values()]
        with exclusive(self._run):
            if self._run is not None:
                (self._run / f"cells-{os.getpid()}.json").write_text(json.dumps(cells))
                cells = [
                    cell for part in sorted(self._run.glob("cells-*.json")) for cell in json.loads(part.read_text())
                ]
            done = {
                "date": datetime.now(UTC).date().isoformat(),
                "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
                "cells": cells,
            }
            (self._folder / "conformance.json").write_text(json.dumps(done, indent=1) + "\n")
            (self._folder / "conformance.md").write_text(table(done))


HEAD = """# Conformance

Predictions compared with real engines. `make conformance WRITE=1` writes this page from the figures of its run
(`conformance.json` beside it).

Every row is one running engine on CPU with a model's real tokenizer, chat template, special ids and image geometry, and
a network of two layers with random weights, on which no block hash depends.

- *Blocks* are those that the engine published, each compared with the key that the library predicted for the request
  from its text and its images. A difference in any token id, count, identity, offset, order or salt is a mismatch.
- *Hit rate of repeats* is the share of complete blocks of repeated requests that the engine took from its cache.
- *Scenarios* are """
TAIL = """
## Notes

**Phi-3-vision.** Its configuration class and processor are remote code of its repository. Two modules of this project,
written from the published formulas, replace them (`hack/engines/phi3v`). The row therefore proves vLLM's tokenization,
events and hashes against the library, but not the remote code; `tests/conformance/processors` compares the formula with
another implementation.

**Learned identities.** A router learned them from the engine's events and from its own probe requests. The row is an
engine behind the router and sidecar; its blocks are those in the engine's replayed events, each once, under the prompts
that were sent.

**Several engines.** Their blocks are those of one engine, so they have no row of their own. A stock vLLM encoder,
prefill and decode engine behind one router pass `mmrouter verify`, lose a prefill and a decode engine during requests,
and give the answers of one engine alone (`tests/conformance/vllm/test_disaggregated.py`). The ten scenarios also pass
in each mode of `routing.transfer`, with a real renderer and the plugin in `shm` and `nixl`
(`tests/conformance/vllm/test_handover.py`).

**Changes to the engines.** vLLM runs as published, except for test adaptations in `hack/engines/vllm_env.py`:
tokenizers are shared where they would be copied repeatedly; the CPU platform does not override how the engine process
is started, which is a fork of the API server, as vLLM does when it is embedded; and NIXL's polling sleeps between
polls. SGLang runs from its published wheel with a stub in place of compiled CPU kernels, which no package index has
(`hack/engines/sglang_stubs`); every function that the stub does not implement raises. Its processes are forked from the
first one too (`hack/engines/sglang_env.py`), and its scheduler sleeps while idle. None of these changes affects an
answer. No engine compiles with PyTorch.
"""


def rows(cells: Mapping[tuple[str, str, str], Cell]) -> list[Cell]:
    return [
        cells.get((engine, family, provider))
        or Cell(engine, family, provider=provider, not_run=NOT_RUN.get((engine, family), "not part of this run"))
        for engine, family, provider in EXPECTED
    ]


def table(done: Mapping[str, Any]) -> str:
    cells = rows({(cell["engine"], cell["family"], cell["provider"]): Cell(**cell) for cell in done["cells"]})
    names = next((list(cell.scenarios) for cell in cells if cell.scenarios), [])
    lines = [HEAD + ", ".join(names) + ".", "", f"{done['date']}, {done['machine']}", ""]
    lines += list(grid(cells))
    failed = [
        f"- {NAMES[cell.family]} on {cell.engine}, {name}: {text}"
        for cell in cells
        for name, found in cell.scenarios.items()
        for text in found
    ]
    return "\n".join([*lines, *([""] if failed else []), *failed, TAIL.rstrip(), ""])


def grid(cells: Sequence[Cell]) -> Iterator[str]:
    head = ("engine", "family", "identity", "requests", "blocks", "matched", "mismatches", "hit rate of repeats")
    yield f"| {' | '.join((*head, 'scenarios', 'note'))} |"
    yield "|" + "---|" * (len(head) + 2)
    for cell in cells:
        engine = f"{ENGINES[cell.engine]} {cell.version}".strip()
        if cell.not_run:
            values: list[Any] = [
                engine,
                NAMES[cell.family],
                cell.provider or "-",
                *["-"] * 6,
                f"not run: {cell.not_run}",
            ]
        else:
            passed = sum(not found for found in cell.scenarios.values())
            rate = f"{cell.hits / cell.repeats:.3f} ({cell.hits} of {cell.repeats})" if cell.repeats else "-"
            counts = (cell.requests, cell.blocks, cell.matched, cell.mismatches)
            values = [engine, NAMES[cell.family], cell.provider, *counts, rate, f"{passed}/{SCENARIOS}", cell.note]
        yield f"| {' | '.join(str(value).replace('|', '/') for value in values)} |"
