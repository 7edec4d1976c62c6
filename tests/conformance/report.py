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
from conformance import releases
from conformance.family_rows import family_rows, release_tables
from conformance.setups import ENGINES, FAMILIES, NOT_PART, NOT_RUN, SCENARIOS, Proof, tables

if TYPE_CHECKING:
    from conformance.prediction import Report

PLACE = ("engine", "setup", "family")
PROVIDERS = {"vllm": "uuid of ours", "sglang": "artifact"}
"""Engine -> where an image's identity comes from where nothing else is said."""
EXPECTED = [
    *(("vllm", family, PROVIDERS["vllm"]) for family in FAMILIES),
    ("sglang", "qwen2_vl", "artifact"),
    ("sglang", "qwen2_5_vl", "artifact"),
    ("sglang", "qwen2_5_vl", "learned"),
    ("sglang", "qwen3_vl", "artifact"),
    ("sglang", "llava", "learned"),
    ("sglang", "llava_next", "learned"),
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
    date: str = ""


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
    several sessions side by side: what is written into ``folder`` holds those of all sessions that share the folder
    ``run``, and those of earlier runs which this one does not have.
    """

    def __init__(self, folder: Path, run: Path | None = None) -> None:
        self._folder = folder
        self._run = run
        self._cells: dict[tuple[str, str, str], Cell] = {}
        self._proofs: dict[tuple[str, str, str], Proof] = {}

    def proof(
        self, cell: tuple[str, str, str], test: str, report: pytest.TestReport, figures: Mapping[str, Any]
    ) -> None:
        """Add what a marked test found to its cell of the setups."""
        self._proofs.setdefault(cell, Proof(*cell, date=today())).add(test, report, figures)
        self._write()

    @contextmanager
    def of(self, engine: str, family: str, provider: str) -> Iterator[Cell]:
        """Give the cell of what runs now; a skip inside becomes its reason."""
        cell = self._cells[engine, family, provider] = Cell(engine, family, provider=provider, date=today())
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
        for proof in self._proofs.values():
            yield f"{proof.engine} {proof.setup} {proof.family}: {proof.result}"

    def _write(self) -> None:
        own = {
            name: list(map(asdict, kept.values())) for name, kept in (("cells", self._cells), ("proofs", self._proofs))
        }
        with exclusive(self._run):
            parts = [own]
            if self._run is not None:
                (self._run / f"cells-{os.getpid()}.json").write_text(json.dumps(own))
                parts = [json.loads(part.read_text()) for part in sorted(self._run.glob("cells-*.json"))]
            file = self._folder / "conformance.json"
            earlier = [json.loads(file.read_text())] if file.exists() else []
            done = {
                "date": today(),
                "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
                "cells": list(merged([*earlier, *parts], "cells", ("engine", "family", "provider")).values()),
                "proofs": joined(earlier, parts),
                "releases": earlier[0].get("releases", {}) if earlier else {},
            }
            file.write_text(json.dumps(done, indent=1) + "\n")
            (self._folder / "conformance.md").write_text(table(done))


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def merged(parts: Sequence[Mapping[str, Any]], name: str, key: Sequence[str]) -> dict[tuple[str, ...], Any]:
    """Return the entries of all parts by their key; a later one replaces an earlier one."""
    return {tuple(each[field] for field in key): each for part in parts for each in part[name]}


def joined(earlier: Sequence[Mapping[str, Any]], parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the proofs of this run's sessions, joined where several have a cell, and of other cells the earlier."""
    found: dict[tuple[str, str, str], Proof] = {}
    for one in (Proof(**each) for part in parts for each in part["proofs"]):
        cell = (one.engine, one.setup, one.family)
        found[cell] = found[cell].join(one) if cell in found else one
    return list((merged(earlier, "proofs", PLACE) | {cell: asdict(one) for cell, one in found.items()}).values())


FAMILIES_HEAD = (
    "# Conformance",
    "",
    "Predictions compared with real engines. `make conformance WRITE=1` writes this page from the figures of its run",
    "(`conformance.json` beside it).",
    "",
    "## Families",
    "",
    "How exactly a prompt of each family and its hits are [predicted](families.md), in the [terms of a",
    "decision](exactness.md#what-a-decision-says). A decision is weaker where a request or an engine's arguments say",
    "something that is not modelled.",
    "",
)
FAMILIES_RELEASES = (
    "",
    "The same on each release, with the number of drawn prompts that are equal to those of the release's own code: all",
    "that both sides take. *By affinity* are prompts that are not predicted on this release.",
    "[Below](#releases-without-a-model) are all checks, with the hits in every cache layout.",
)
HEAD = """## One engine

Every row is one engine on CPU, which receives requests past the router. It has a model's real tokenizer, chat template,
special ids and image geometry, and a network of two layers with random weights, on which no block hash depends.
Phi-3-vision runs with four tiles.

- *Blocks* are those that the engine published, each compared with the key that the library predicted for the request
  from its text and its images. A difference in any token id, count, identity, offset, order or salt is a mismatch.
- *Hit rate of repeats* is the share of complete blocks of repeated requests that the engine took from its cache.
- *Scenarios* are """
OTHERS = "What this run did not have is of earlier runs; `conformance.json` has the date of each row."
SETUPS_HEAD = (
    "## Several engines",
    "",
    "Every setup with every engine and family, behind sidecars and routers: proved by its tests, or not run, and why.",
    "`make conformance FAMILIES=all` runs all of them; without `FAMILIES`, most setups run with one family.",
)
RELEASES_HEAD = (
    "## Releases without a model",
    "",
    "`make adopt ENGINE=... RELEASE=... WRITE=1` runs an engine's own code of a release against the library, without a",
    "model, and adds its column: the scheduler and cache manager in every cache layout (*hits*), the prompts of drawn",
    "requests for every family (*front end*, *prompts*), and every name that a request may hold (*fields*, *items*).",
    "",
    "- *exact*: the library predicted all that was compared, as often as the cell says, or knows every name.",
    "- *bounded*: for the requests *below*, the library promised fewer tokens than the engine had, and never more.",
    "  *As held* counts those that hit all blocks which the engine's events show, by which they are routed.",
    "- *differs*: the check failed, with what differs. A router's decisions may be wrong there; a request with an",
    "  unknown name is a 400.",
    "- *by affinity*: requests that a router predicts on other releases, but not on this one.",
    "- *not run*: the release has no such code, or this machine cannot run it, in the words of the tool or the engine.",
    "- A dash: the run of the release left the check out (`--only`).",
    "",
    "A release's environment has the packages of the proved one, and the newest transformers that the release permits",
    "where it does not permit every later one. vLLM 0.30 sets no such bound, but transformers 5.17 renamed a class of",
    "Pixtral that it imports, so it has 5.16. *Hits* of SGLang before 0.5.23 are those of requests without adapters,",
    "because its events do not name them and routers serve none there.",
)
TAIL = """
## Notes

**Phi-3-vision.** Its configuration class and processor are remote code of its repository. Two modules of this project,
written from the published formulas, replace them (`hack/engines/phi3v`). The row therefore proves vLLM's tokenization,
events and hashes against the library, but not the remote code; `tests/conformance/processors` compares the formula with
another implementation.

**Learned identities.** A router learned them from the engine's events and from its own probe requests. The row is an
engine behind the router and sidecar; its blocks are those in the engine's replayed events, each once, under the prompts
that were sent. The rows of LLaVA are engines alone, and the router's code learned each image from one request before
the others. Checkpoints of llava-hf have no row on SGLang, which serves them without a prefix cache.

**Completions.** They have no row of their own, because they have no images. Their texts become the engine's own token
ids for each family on vLLM (`tests/conformance/vllm/test_tokenization.py`). Behind router and sidecar, the blocks that
vLLM and SGLang publish for a completion, of a text or of token ids, are the predicted ones, and its repeats hit all of
them (`test_routing.py` of both), also through a prefill and a decode engine of SGLang
(`tests/conformance/sglang/test_pairs.py`).

**Front end.** vLLM's own front end, without a model or an engine's process, makes the token ids of chats with drawn
pictures, and place and length of each image, and the library the same (`tests/conformance/processors`). Mistral 3 and
Pixtral have Mistral AI's tokenizer of Pixtral. For the others Qwen3-VL's tokenizer stands in, with their tokens added,
and a template of this project, so the row proves images and not texts.

**Videos.** vLLM's own front end loads encoded videos and makes the token ids of chats with them, and the library the
same from their headers: place, length and name of each video, and the extra keys of every block
(`tests/conformance/vllm/test_videos.py`). Qwen3.5 has Qwen3-VL's tokenizer.

**Audio.** Drawn conversations of text, images and WAV files go through the router's stages to vLLM's own front end.
Both have the same ids, places, lengths and names of images and audio, and extra keys of every block, up to the first
audio that is not predicted, which begins where the router says (`tests/conformance/vllm/test_audio.py`).

**Families beside a renderer.** The library has no code for LLaVA-OneVision and Idefics3, so `vllm launch render` with
the engines' files makes their prompts. For the others it is a second opinion; when the row of Mistral 3 was made, its
family had no code either. Networks and configurations are this project's, with the geometry, special ids and window of
the published models; LLaVA-OneVision and Idefics3 have fewer tiles, so that several images fit the context, and
Qwen3-VL's tokenizer with their tokens added. Gemma 3 has its own tokenizer and chat template. Mistral 3 has a stand-in,
Mistral AI's tokenizer and template of Pixtral, because no package has the later ones of Mistral Small 3.1. Images have
texts around them.

**Several engines.** A cell's tests are in `tests/conformance`, marked with the cell that they prove. With every family
(`test_cells.py`) they are `mmrouter verify`, the ten scenarios, that each stage had its part of a request, and that the
router's index equals the engines' own event histories. Where a router learns identities, the images of a scenario are
shown behind other texts before. With one family the index is also compared after evictions and a `kill -9`
(`test_routing.py`, `test_replicas.py`, with the vocabulary of `examples/models/tiny-qwen2-vl`), engines are lost during
requests, and answers compared with those of one engine alone (`test_disaggregated.py`).

**Data parallel ranks.** A vLLM with two and with four ranks, without a forward pass, and an SGLang with two run behind
sidecar and router. Each rank's part of the index equals that rank's own event history, a repeat is sent to the rank
that holds its prompt and hits what was promised, and the same prompt sent to another rank, past the router, finds
nothing there (`tests/conformance/test_data_parallel.py`).

**Not run, for want of a device.** vLLM's `ECCPUConnector` copies embeddings by streams of CUDA or XPU; its
configuration passes vLLM's own parser and classes, and its scheduler's half runs
(`tests/conformance/vllm/test_connector_config.py`).

**Mooncake.** The usual build does not load without CUDA (`ImportError: libcudart.so.12: cannot open shared object file:
No such file or directory`). The row is the build without CUDA, over TCP. SGLang's sender for Mooncake copies page
indices by CUDA's events, and with `RuntimeError: pin_memory=True requires a CUDA or other accelerator backend` its
engine ends; here it takes them as the sender for NIXL does (`hack/engines/mooncake_package.py`).

**vLLM 0.33.0.** Its wheels are CUDA builds. In an environment with its Python code alone an engine ends at its start:
first with `ModuleNotFoundError: No module named 'orjson'`, and beside that package with
`AttributeError: '_OpNamespace' '_C' object has no attribute 'init_cpu_memory_env'`, because there is no compiled part.
The row is an engine of 0.33.0's Python code with the compiled part of 0.32.0's CPU build, which computes the network
(`hack/engines/newer_vllm_env.py`): its prompts, events, hashes and hits are those predicted, and processed images are
handed from a renderer to an engine of it, by every way, bit by bit (`test_prediction.py`, `test_handover.py`). Without
an engine, 0.33.0's own front end makes of handed over images of six families what it makes of the images themselves
(`tests/conformance/processors`).

**Encoders on different devices.** Two vLLM encoders on CPUs, one of which is stopped for most of the time, stand for a
slow and a fast device (`tests/conformance/vllm/test_encoder_devices.py`,
[figures](disaggregation.md#measuring-the-modes)).

**Changes to the engines.** vLLM runs as published, except for test adaptations in `hack/engines/vllm_env.py`:
tokenizers are shared where they would be copied repeatedly; the CPU platform does not override how the engine process
is started, which is a fork of the API server, as vLLM does when it is embedded; and NIXL's polling sleeps between
polls. SGLang runs from its published wheel with a stub in place of compiled CPU kernels, which no package index has
(`hack/engines/sglang_stubs`); every function that the stub does not implement raises. Its processes are forked from the
first one too (`hack/engines/sglang_env.py`), and its scheduler sleeps while idle. NIXL takes a CPU's memory where
SGLang names a device's. The host memory of its hierarchical cache is not registered with CUDA, and blocks are copied by
PyTorch, because SGLang has no kernel for it on CPUs. None of these changes affects an answer. No engine compiles with
PyTorch.
"""


def rows(cells: Mapping[tuple[str, str, str], Cell]) -> list[Cell]:
    return [
        cells.get((engine, family, provider))
        or Cell(engine, family, provider=provider, not_run=NOT_RUN.get((engine, family), NOT_PART))
        for engine, family, provider in EXPECTED
    ]


def table(done: Mapping[str, Any]) -> str:
    cells = rows({(cell["engine"], cell["family"], cell["provider"]): Cell(**cell) for cell in done["cells"]})
    names = next((list(cell.scenarios) for cell in cells if cell.scenarios), [])
    lines = [
        *FAMILIES_HEAD,
        *family_rows(),
        *FAMILIES_RELEASES,
        *release_tables(done.get("releases", {})),
        "",
        HEAD + ", ".join(names) + ".",
        "",
        f"{done['date']}, {done['machine']}. {OTHERS}",
        "",
    ]
    lines += list(grid(cells))
    failed = [
        f"- {FAMILIES[cell.family]} on {cell.engine}, {name}: {text}"
        for cell in cells
        for name, found in cell.scenarios.items()
        for text in found
    ]
    lines += [*([""] if failed else []), *failed, "", *SETUPS_HEAD, *tables(done["proofs"])]
    lines += ["", *RELEASES_HEAD, *releases.tables(done.get("releases", {}))]
    return "\n".join([*lines, TAIL.rstrip(), ""])


def grid(cells: Sequence[Cell]) -> Iterator[str]:
    head = ("engine", "family", "identity", "requests", "blocks", "matched", "mismatches", "hit rate of repeats")
    yield f"| {' | '.join((*head, 'scenarios', 'note'))} |"
    yield "|" + "---|" * (len(head) + 2)
    for cell in cells:
        engine = f"{ENGINES[cell.engine]} {cell.version}".strip()
        if cell.not_run:
            values: list[Any] = [
                engine,
                FAMILIES[cell.family],
                cell.provider or "-",
                *["-"] * 6,
                f"not run: {cell.not_run}",
            ]
        else:
            passed = sum(not found for found in cell.scenarios.values())
            rate = f"{cell.hits / cell.repeats:.3f} ({cell.hits} of {cell.repeats})" if cell.repeats else "-"
            counts = (cell.requests, cell.blocks, cell.matched, cell.mismatches)
            values = [engine, FAMILIES[cell.family], cell.provider, *counts, rate, f"{passed}/{SCENARIOS}", cell.note]
        yield f"| {' | '.join(str(value).replace('|', '/') for value in values)} |"
