"""Engines that work together, as docs/conformance.md lists them: every setup with every engine and family.

A test that proves a cell is marked ``proves(engine, setup, family)``; ``{name}`` in them stands for the test's
parameter of that name. What the mark's tests found is the cell; a cell that cannot be run has its reason here.

A run has one family for each setup, and a few others on one engine. ``MMROUTER_FAMILIES``, which is ``all`` or names of
families with commas, makes it the long form: every setup with each of them (``test_cells.py``), every family on an
engine, and tests that measure for minutes.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from hack.build_once import ROOT

SCENARIOS = 10
FAMILIES = {
    "qwen2_vl": "Qwen2-VL",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "llava": "LLaVA-1.5",
    "llava_next": "LLaVA-NeXT",
    "phi3_v": "Phi-3-vision",
}
REPOSITORIES = {
    "qwen2_vl": "Qwen/Qwen2-VL-2B-Instruct",
    "qwen2_5_vl": "Qwen/Qwen2.5-VL-7B-Instruct",
    "qwen3_vl": "Qwen/Qwen3-VL-2B-Instruct",
    "llava": "llava-hf/llava-1.5-7b-hf",
    "llava_next": "llava-hf/llava-v1.6-mistral-7b-hf",
    "phi3_v": "microsoft/Phi-3-vision-128k-instruct",
}
TINY = "mmrouter/tiny-qwen2-vl"
"""Qwen2-VL with a vocabulary of a thousand tokens, for tests that are not about prompts: vLLM starts with a third less
CPU than with one of 150,000, and answers with half."""
TINY_MODEL = ROOT / "examples" / "models" / "tiny-qwen2-vl"
RENDERED = {
    "llava_onevision": "LLaVA-OneVision",
    "idefics3": "Idefics3, SmolVLM",
    "gemma3": "Gemma 3",
    "gemma4": "Gemma 4",
    "mistral3": "Mistral 3",
}
"""Families beside a renderer: it makes the prompts of the first two, for which the library has no code, and is the
second opinion on those of the others.
"""
WITHOUT_SETUP = {"qwen3_5": "Qwen3.5"}
"""Families whose prompts alone are compared, with those of an engine's own code."""
PROCESSED = {
    "mistral3": "Mistral 3",
    "pixtral": "Pixtral",
    "glm4v": "GLM-4.1V",
    "internvl": "InternVL 3",
    "internvl_chat": "InternVL 3 of its authors",
    "llama4": "Llama 4",
    "gemma4": "Gemma 4",
    "minicpmv4_6": "MiniCPM-V 4.6",
    "paddleocr_vl": "PaddleOCR-VL",
    "deepseek_ocr": "DeepSeek-OCR",
    "deepseek_ocr2": "DeepSeek-OCR-2",
    "nemotron_vl": "Nemotron Nano VL v2",
    "nemotron_omni": "Nemotron 3 Nano Omni",
    "kimi_k25": "Kimi K2.5",
}
"""Families whose prompts are compared with those of vLLM's own front end, which expands images without a model."""
VIDEOS = {family: FAMILIES[family] for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")} | WITHOUT_SETUP
"""Families whose videos are compared with what vLLM's own loader and processor make of them."""
AUDIO = {family: PROCESSED[family] for family in ("gemma4", "nemotron_omni")} | {"qwen3_omni_moe": "Qwen3-Omni"}
"""Families whose prompts with audio are compared with those of vLLM's own front end."""
SHOWN = FAMILIES | RENDERED | PROCESSED | VIDEOS | AUDIO
NEWER = "vLLM 0.33.0"
"""The setup of an engine of a newer release with the tested one's compiled part, as there is no CPU build of it."""
BY_MOONCAKE = "prefill, decode by Mooncake"
"""The setup of an SGLang pair that hands blocks over by Mooncake instead of NIXL."""
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
HANDED_OVER = ("hand-over shm", "hand-over nixl")
STAGED = ("encoder, worker", "prefill, decode", "encoder, prefill, decode")
"""Setups that are named by the roles of their pools."""
SETUPS = ("two workers", *STAGED, *HANDED_OVER, "hand-over none")
NOT_RUN = {("sglang", "phi3_v"): "SGLang 0.5.23 has no Phi3VForCausalLM and resolves it to TransformersForCausalLM"}
"""Families that an engine does not run in any setup."""
ONE_FAMILY = {"vllm": "qwen2_vl", "sglang": "qwen2_5_vl"}
"""The family that is not only part of the long form."""
SAME = {("sglang", "hand-over none"): "two workers"}
"""Setups that are another one under a second name."""
IMPOSSIBLE = {("sglang", setup): "SGLang's engines process images themselves" for setup in HANDED_OVER}
NO_ENCODER = "Model type LlavaLlamaForCausalLM is not supported for encoder disaggregation"
UNSUPPORTED: dict[tuple[str, str, str], str] = {
    ("sglang", setup, family): f"SGLang 0.5.23: {NO_ENCODER}"
    for setup in ("encoder, worker", "encoder, prefill, decode")
    for family in ("llava", "llava_next")
}
"""Cells that were run and cannot be: what the engine said."""
NOT_PART = "not part of a run yet"


def not_run(engine: str, setup: str, family: str) -> str:
    """Return why a cell has no test, or, where it has one, that the run left it out."""
    setup = SAME.get((engine, setup), setup)
    impossible = NOT_RUN.get((engine, family)) or IMPOSSIBLE.get((engine, setup))
    return impossible or UNSUPPORTED.get((engine, setup, family)) or NOT_PART


def named_families() -> list[str]:
    """Return the families of ``MMROUTER_FAMILIES``, none where it is not set. Raises ``pytest.UsageError``."""
    known = FAMILIES | RENDERED | WITHOUT_SETUP
    named = [name.strip() for name in os.environ.get("MMROUTER_FAMILIES", "").split(",") if name.strip()]
    if unknown := [name for name in named if name not in (*known, "all")]:
        raise pytest.UsageError(f"FAMILIES: {', '.join(unknown)} is no known family; write all, or {', '.join(known)}")
    return list(known) if "all" in named else named


def long_form() -> list[str]:
    """Return the families of the long form, none where the run is not that."""
    return [family for family in FAMILIES if family in named_families()]


def setup_families() -> list[str]:
    """Return the families that a run has in vLLM's setups of several engines; it has the others on one engine."""
    return long_form() or [ONE_FAMILY["vllm"]]


class Place(NamedTuple):
    """A cell, as a parameter of tests."""

    engine: str
    setup: str
    family: str

    @property
    def roles(self) -> list[str]:
        """The roles of its pools."""
        return self.setup.split(", ") if self.setup in STAGED else ["worker"]

    @property
    def learned(self) -> bool:
        """Whether the router learns images from the engine's events."""
        return self.engine == "sglang" and ("encoder" in self.roles or self.family.startswith("llava"))

    def __str__(self) -> str:
        return "-".join((self.engine, *self.roles, self.family))


def places() -> list[Place]:
    """Return the cells of the long form that no other module has for each of its families."""
    made = [Place(*cell) for cell in CELLS if cell[1] in (*STAGED, "two workers") and cell[2] in long_form()]
    return [each for each in made if each[:2] != ("vllm", "two workers") and not_run(*each) == NOT_PART]


CELLS = [
    *((engine, setup, family) for engine in ENGINES for setup in SETUPS for family in FAMILIES),
    *(("vllm", "renderer, worker", family) for family in RENDERED),
    *(("vllm", "front end", family) for family in PROCESSED),
    *(("vllm", "videos", family) for family in VIDEOS),
    *(("vllm", "audio", family) for family in AUDIO),
    ("vllm", NEWER, "qwen2_vl"),
    ("sglang", BY_MOONCAKE, "qwen2_5_vl"),
]


@dataclass
class Proof:
    """What the tests of a cell found. ``figures``: what they recorded by name."""

    engine: str
    setup: str
    family: str
    passed: int = 0
    scenarios: int = 0
    failed: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    skipped: str = ""
    date: str = ""

    def add(self, test: str, report: pytest.TestReport, figures: Mapping[str, Any]) -> None:
        """Count one phase of a test: its call, or a setup or teardown that did not pass."""
        if report.failed:
            self.failed.append(test)
        elif report.skipped and isinstance(report.longrepr, tuple):
            self.skipped = report.longrepr[2].removeprefix("Skipped: ").removeprefix("not run: ")
        elif report.when == "call":
            self.passed += 1
            self.scenarios += test.startswith("test_scenario[")
            self.figures |= figures

    def join(self, other: "Proof") -> "Proof":
        """Add what another session of the run found."""
        self.passed += other.passed
        self.scenarios = max(self.scenarios, other.scenarios)  # a session has the ten as a whole
        self.failed += other.failed
        self.figures |= other.figures
        self.skipped = self.skipped or other.skipped
        return self

    @property
    def result(self) -> str:
        if self.failed:
            return f"failed: {', '.join(self.failed)}"
        if not self.passed:
            return f"not run: {self.skipped or NOT_PART}"
        several = min(self.scenarios, SCENARIOS)  # a cell may have them once for each provider of identities
        scenarios = [f"{several} of {SCENARIOS} scenarios"] if several else []
        figures = [f"{name} {value}" for name, value in self.figures.items()]
        tests = f"{self.passed} test{'s' * (self.passed > 1)}"
        return f"proved: {', '.join([*scenarios, *figures, tests])}"


def proved_cells(item: pytest.Item) -> Iterator[tuple[str, str, str]]:
    """Yield the cells that a test is marked with."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    for mark in item.iter_markers("proves"):
        engine, setup, family = (str(part).format(**parameters) for part in mark.args)
        assert (engine, setup, family) in CELLS, f"{item.name} proves a cell that the page does not have"
        yield engine, setup, family


def tables(proofs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of one table for each engine, with a row for every cell."""
    found = {(one["engine"], one["setup"], one["family"]): Proof(**one) for one in proofs}
    for engine, shown in ENGINES.items():
        yield from ("", f"### {shown}", "", "| setup | family | result |", "|---|---|---|")
        for cell in (each for each in CELLS if each[0] == engine):
            _, setup, family = cell
            proof = found.get((engine, SAME.get((engine, setup), setup), family))
            result = proof.result if proof else f"not run: {not_run(*cell)}"
            yield f"| {setup} | {SHOWN[family]} | {result.replace('|', '/')} |"
