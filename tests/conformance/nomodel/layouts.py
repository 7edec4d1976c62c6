"""Layouts of cache groups, and the processes in which an engine's own scheduler and cache manager run them."""

import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import IO, Any, TypeVar

from artefacts import ROOT
from conformance.engine_process import env_version
from conformance.nomodel import frames
from conformance.nomodel.prompts import Drawn
from conformance.own_code import EngineError

from mmrouter_lib.media_identity import to_wire

HERE = Path(__file__).parent
MODEL = ROOT / "examples" / "models" / "tiny-qwen2-vl"  # of its folder, vLLM reads the configuration only

Started = TypeVar("Started", bound="EngineProcess")
Layers = list[tuple[str, dict[str, int]]]
FULL: Layers = [("full", {})]


def windows(*sizes: int, heads: int = 1) -> Layers:
    """Layers with a window. Of more ``heads``, the engine gives other layers blocks that are larger by as much."""
    more = {"num_kv_heads": heads} if heads > 1 else {}
    return [("window", {"sliding_window": size, **more}) for size in sizes]


def chunk(name: str) -> int:
    """Return the tokens of a chunk of a layout's attention, 0 without."""
    return max(fields.get("attention_chunk_size", 0) for _, fields in LAYOUTS[name][0])


MAMBA: Layers = [("mamba", {})]
LAYOUTS: dict[str, tuple[Layers, int, int]] = {
    "full attention": (FULL * 2, 32, 400),
    "MLA": ([("mla", {})], 32, 400),
    "windows of 1024 beside full attention": (windows(*[1024] * 5) + FULL, 32, 1500),
    "windows of 64 beside full attention": (windows(*[64] * 5) + FULL, 16, 1200),
    "windows of 64 and 512 beside full attention": (windows(64, 512, 64, 512) + FULL * 2, 32, 900),
    "mamba beside full attention": (MAMBA * 3 + FULL, 64, 300),
    "mamba and windows beside full attention": (MAMBA * 2 + windows(256) + FULL, 64, 400),
    "windows of 256 alone": (windows(256) * 2, 32, 300),
    "windows of 256 alone, every block kept": (windows(256) * 2, 32, 300),
    "chunks of 512 beside full attention": ([("chunked", {"attention_chunk_size": 512})] * 3 + FULL, 32, 900),
    "windows of 512 in half blocks beside full attention": (windows(*[512] * 3, heads=2) + FULL, 16, 900),
    "windows of 256 in quarter blocks beside full attention": (windows(*[256] * 3, heads=4) + FULL, 16, 900),
    "windows of 512 in double blocks beside full attention": (
        [*windows(*[512] * 3), ("full", {"num_kv_heads": 2})],
        16,
        900,
    ),
    "full attention, EAGLE": (FULL * 2, 32, 400),
    "windows of 512 beside full attention, EAGLE": (windows(*[512] * 5) + FULL, 32, 1200),
    "mamba beside full attention, EAGLE": (MAMBA * 3 + FULL, 64, 300),
}
"""Layers, block size in tokens, and blocks: few enough that they are evicted. *Half*, *quarter* and *double* blocks are
compared with those of full attention. *Every block kept*: with ``--prefix-cache-retention-interval`` of one block."""


SIZES = {"half": [16, 32], "quarter": [16, 64], "double": [16, 32]}
"""Word in a layout's name -> tokens of its blocks, where there are several sizes."""


PAGES = {"pages of 1": (1, 6_000), "pages of 16": (16, 500), "pages of 64": (64, 150)}
"""SGLang's cache of full attention: tokens per page, and pages."""


HYBRIDS = {
    "states, pages of 1": (1, 6_000, 0, 24),
    "states, pages of 64": (64, 150, 0, 24),
    "windows of 128, pages of 1": (1, 6_000, 128, 0),
    "windows of 128, pages of 64": (64, 150, 128, 0),
    "states and windows of 128, pages of 64": (64, 150, 128, 24),
}
"""SGLang's cache of full attention with states or windows: tokens per page, pages, tokens of a window, states."""


def sizes_of(name: str) -> list[int]:
    """Return the tokens of blocks of each size of a layout."""
    return next((sizes for word, sizes in SIZES.items() if word in name), [LAYOUTS[name][1]])


class EngineProcess:
    """A process in an engine's environment, in which one cache after another is driven."""

    def __init__(self, log: IO[str], env: Path, *program: str | Path) -> None:
        self._log, self.release = log, env_version(env)
        command = (env / "bin" / "python", *program)
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)

    def run(self, prompt: Drawn, name: Callable[[bytes], str] = to_wire) -> Any:
        """Run a request to its end. ``name``: the text of an image's identity."""
        images = [(name(image.identity), image.offset, image.length) for image in prompt.images]
        limits = {"output": prompt.output, "steps": prompt.steps}
        return self._ask({"ids": prompt.ids, "images": images, "salt": prompt.salt, "lora": prompt.lora, **limits})

    def _ask(self, message: Any) -> Any:
        asked, answers = self.process.stdin, self.process.stdout
        assert asked is not None
        assert answers is not None
        with suppress(BrokenPipeError):
            frames.write(asked, message)
        answer = frames.read(answers)
        if answer is None:
            self._log.seek(0)
            raise EngineError(self._log.read())
        return answer


class VllmProcess(EngineProcess):
    def plan(
        self, name: str, blocks: int = 0, offload: Mapping[str, Any] = MappingProxyType({})
    ) -> tuple[list[str], int]:
        """Begin with an empty cache of a layout, of its usual number of blocks or another; ``offload``: of a CPU tier.
        Return the kinds of its groups, and how many tokens after a block its hash covers. Raises ``AssertionError`` for
        blocks of other sizes than the layout's name says.
        """
        layers, block_size, usual = LAYOUTS[name]
        cache = {"layers": layers, "block_size": block_size, "blocks": blocks or usual}
        cache["retention"] = block_size if name.endswith("every block kept") else 0
        made = self._ask({**cache, "drafter": drafter(name), "offload": dict(offload)})
        assert made["sizes"] == sizes_of(name)
        return made["groups"], made["lookahead"]


class SglangProcess(EngineProcess):
    def plan(self, name: str, share: float = 1.0) -> None:
        """Begin with an empty cache of a page size, of a share of its usual number of pages."""
        block_size, blocks = PAGES[name]
        self._ask({"block_size": block_size, "blocks": int(blocks * share)})


class SglangHybridProcess(EngineProcess):
    def plan(self, name: str) -> None:
        """Begin with an empty cache of a layout."""
        block_size, blocks, window, states = HYBRIDS[name]
        self._ask({"block_size": block_size, "blocks": blocks, "window": window, "states": states})


def drafter(name: str) -> str:
    """Return the method of a layout's drafter, empty without one."""
    return "eagle" if name.endswith("EAGLE") else ""


@contextmanager
def running(env: Path) -> Iterator[VllmProcess]:
    with TemporaryFile("w+") as log, _ending(VllmProcess(log, env, HERE / "vllm_steps.py", MODEL)) as started:
        yield started


@contextmanager
def running_sglang(env: Path) -> Iterator[SglangProcess]:
    with TemporaryFile("w+") as log, _ending(SglangProcess(log, env, HERE / "sglang_steps.py")) as started:
        yield started


@contextmanager
def running_sglang_hybrids(env: Path) -> Iterator[SglangHybridProcess]:
    program = HERE / "sglang_hybrid_steps.py"
    with TemporaryFile("w+") as log, _ending(SglangHybridProcess(log, env, program)) as started:
        yield started


@contextmanager
def _ending(process: Started) -> Iterator[Started]:
    try:
        yield process
    finally:
        process.process.kill()
        process.process.wait()
