"""The table of what was proved: which engine and family, with what result, and what was not run and why.

    python tests/conformance/report.py FIGURES.json OUT.md    # writes the table of a run

A run collects :class:`Cell` s and writes them as JSON; the table is made from that JSON alone, so that anyone can see
where a number comes from and no number can be typed in.
"""

import fcntl
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conformance.compare import Report

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
AFFINITY = "the router predicts nothing of it there and serves it by affinity: SGLang expands its images by other code"
NOT_RUN = {
    ("sglang", "llava"): f"{AFFINITY}; and 0.5.23 ends while it builds a CLIP tower in its generic wrapper",
    ("sglang", "llava_next"): AFFINITY,
    ("sglang", "phi3_v"): "SGLang 0.5.23 has no class for it",
}
"""Cells that no run can have, and why."""
EXPECTED = [
    *(("vllm", family, PROVIDERS["vllm"]) for family in NAMES),
    ("sglang", "qwen2_vl", "artifact"),
    ("sglang", "qwen2_5_vl", "artifact"),
    ("sglang", "qwen2_5_vl", "learned"),
    ("sglang", "qwen3_vl", "artifact"),
    *((engine, family, "") for engine, family in NOT_RUN),
]
"""Cells of every table; one that nothing was recorded for was not run."""


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
    hits: int = 0
    repeats: int = 0
    scenarios: dict[str, list[str]] = field(default_factory=dict)
    not_run: str = ""
    note: str = ""


def run_folder() -> Path | None:
    """Return the folder that the sessions of one run share; ``None`` for a session on its own."""
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
    """Collects a run's cells and keeps them in files, so that a run which ends early leaves what it has.

    A run may be several sessions side by side, each with cells of its own: what is written into ``folder`` holds those
    of all sessions that share the folder ``run``.
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
        """Yield a line for each cell, those that were not run with the reason.

        A session on its own names every cell of the table, one of several those that it had.
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

What this project predicts, against real engines: written by `make conformance WRITE=1` from the figures of that run
(`conformance.json` beside this file). Nothing here is typed by hand.

Every cell is one running engine on CPU with a model's real tokenizer, chat template, special ids and image geometry and
a network of two layers with random weights, which no block hash depends on. *Blocks* are those that the engine
published, each compared with the key that the library predicted for the request from its text and its images; a
difference in any token id, count, identity, offset, order or salt is a mismatch. *Hit rate of repeats*: of the complete
blocks of requests that were sent again, how many the engine took from its cache. *Scenarios*: """
TAIL = """
Phi-3-vision's configuration class and processor are remote code of its repository. Here two modules of this project
replace them (`hack/engines/phi3v`), written from the published formulas. So its row proves vLLM's own tokenisation,
events and hashes, and the library against them, and not the remote code; the formula is compared with an implementation
of others in `tests/conformance/processors`.

The identities *learned* are those that a router learned from the engine's events and from questions of its own: that
row is of an engine behind the product's router and sidecar, and its blocks are those in the engine's replayed events,
each once, under the prompts that were sent.

What several engines do together has no row, because its blocks are those of one engine whatever it came by them. A
stock vLLM encoder, prefill and decode engine pass the gate behind one router, lose a prefill and a decode engine under
way, and give the answers of one engine alone (`tests/conformance/vllm/test_disaggregated.py`). The ten scenarios also
pass in each mode of `routing.transfer`, with a real renderer and our plugin in `shm` and `nixl`
(`tests/conformance/vllm/test_transfer.py`).

vLLM is as published, but for a few lines by which tokenizers are passed on where they would be copied again and again,
and one that keeps its platform for CPUs from overruling how the engine's process is started: it is forked from the API
server, as vLLM does where it is not started by its command. NIXL, which looks at its transfers without a pause, rests
in between (all in `hack/engines/vllm_env.py`). None of it decides anything of an answer. No engine compiles with
PyTorch.
SGLang runs from its published wheel; in place of compiled CPU kernels, which no package index has, stands a stub
(`hack/engines/sglang_stubs`) in which everything raises that is called and not written out. Its processes are forked
from the first one, too (`hack/engines/sglang_env.py`), and its scheduler sleeps while it has nothing to do.
"""


def rows(cells: Mapping[tuple[str, str, str], Cell]) -> list[Cell]:
    """Return every expected cell, in order; one that nothing was recorded for says why it was not run."""
    return [
        cells.get((engine, family, provider))
        or Cell(engine, family, provider=provider, not_run=NOT_RUN.get((engine, family), "not part of this run"))
        for engine, family, provider in EXPECTED
    ]


def table(done: Mapping[str, Any]) -> str:
    """Return the page of a run's JSON."""
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


def main() -> int:
    if len(sys.argv) != 3:
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    figures, out = map(Path, sys.argv[1:])
    out.write_text(table(json.loads(figures.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
