"""Record what an engine publishes, with its own hits, for consumers of other projects too (docs/kv-events.md).

    PYTHONPATH=.:tests .venv/bin/python -m conformance.nomodel.record [--only LAYOUT] [--into FOLDER]

Writes FOLDER, by default ``tests/kv_events/recordings``: from vLLM's own scheduler and cache manager every layout on
the tested release, and on the newer one those that it treats otherwise, with two that it does not; from SGLang's own
radix tree two page sizes. Two runs differ in the time of each batch only.
"""

import argparse
import json
import lzma
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from artefacts import run_tool
from conformance.nomodel.layouts import LAYOUTS, PAGES, SglangProcess, VllmProcess, drafter, running, running_sglang
from conformance.nomodel.prompts import Drawn, Prompts
from kv_events.check import RECORDINGS, VERSION

from hack.engines.newer_vllm_env import NEWER
from hack.engines.sglang_env import SGLANG
from hack.engines.vllm_env import VLLM
from mmrouter_lib.engines.sglang.identity import run_ids, sentinels

REQUESTS = 50
BOOK = 3_600  # tokens of which all texts are pieces
RECORDED = {
    (VLLM, "engines.vllm_env"): [*LAYOUTS],
    (NEWER, "engines.newer_vllm_env"): [
        name for name in LAYOUTS if drafter(name) or name in ("full attention", "mamba beside full attention")
    ],
}
"""Release, and the tool that makes its environment -> layouts."""
RECORDED_PAGES = [
    name for name, (tokens, _) in PAGES.items() if tokens > 1
]  # a hash per token takes ten times the bytes


def recorded(engine: VllmProcess, release: str, name: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of a layout's recording."""
    layers, block_size, blocks = LAYOUTS[name]
    engine.plan(name, blocks * 2 // 3)  # fewer, because there are few requests and some blocks have to be evicted
    about = {"kv_events": VERSION, "engine": "vllm", "release": release, "layout": name}
    yield {**about, "layers": layers, "block_size": block_size, "hash": "sha256_cbor", "drafter": drafter(name)}
    source = random.Random(name)
    prompts = Prompts(source, block_size, source.choices(range(1000), k=BOOK))
    for _ in range(REQUESTS):
        prompt = prompts.next()
        sent = replace(prompt, salt=prompt.salt and f"dynamo-cache-salt:{prompt.salt}")
        answer = engine.run(sent, identity_text)
        yield {"request": request(sent), "hit": answer["cached"]}
        yield from ({"events": batch.hex()} for batch in answer["batches"])
        prompts.answered(prompt, answer["output"])


def recorded_pages(engine: SglangProcess, release: str, name: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of a recording of SGLang."""
    engine.plan(name, share=2 / 3)
    about = {"kv_events": VERSION, "engine": "sglang", "release": release, "layout": f"full attention, {name}"}
    yield {**about, "layers": [("full", {})], "block_size": PAGES[name][0], "hash": "sha256", "drafter": ""}
    source = random.Random(name)
    prompts = Prompts(source, PAGES[name][0], source.choices(range(1000), k=BOOK))
    for _ in range(REQUESTS):
        prompt = prompts.next()
        answer = engine.run(prompt, bytes.hex)
        yield {"request": {**request(prompt), "tokens": with_sentinels(prompt), "images": []}, "hit": answer["cached"]}
        yield from ({"events": batch.hex()} for batch in answer["batches"])
        prompts.answered(prompt, answer["output"])


def with_sentinels(prompt: Drawn, *, legacy: bool = False) -> list[int]:
    """Return the ids of a prompt as SGLang has them: an image's are the sentinels of its hash."""
    ids = list(prompt.ids)
    for image in prompt.images:
        values = sentinels(int.from_bytes(image.identity[:8], "big"), legacy=legacy)
        ids[image.offset : image.end] = run_ids(values, image.length)
    return ids


def identity_text(identity: bytes) -> str:
    """Return an identity as Dynamo recognises one in an event, as it does a salt by its prefix; to others they are any
    texts.
    """
    return identity[:8].hex().ljust(64, "0")


def request(sent: Drawn) -> dict[str, Any]:
    images = [(identity_text(image.identity), image.offset, image.length) for image in sent.images]
    return {"tokens": sent.ids, "images": images, "salt": sent.salt, "adapter": sent.lora}


def write(file: Path, lines: Iterator[dict[str, Any]]) -> None:
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    file.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def main() -> None:
    parser = argparse.ArgumentParser(description="Record the KV events of engines' caches.")
    parser.add_argument(
        "--only", choices=[*LAYOUTS, *RECORDED_PAGES], metavar="LAYOUT", help="record this layout alone"
    )
    parser.add_argument("--into", type=Path, default=RECORDINGS, metavar="FOLDER", help="write the recordings here")
    options = parser.parse_args()
    options.into.mkdir(parents=True, exist_ok=True)

    def wanted(names: Iterable[str]) -> list[str]:
        return [name for name in names if options.only in (None, name)]

    def file(engine: str, release: str, name: str) -> Path:
        slug = name.lower().replace(",", "").replace(" ", "-")
        return Path(options.into / f"{engine}-{release}-{slug}.jsonl.xz")

    for (release, tool), layouts in RECORDED.items():
        if names := wanted(layouts):
            with running(Path(run_tool(tool))) as engine:
                for name in names:
                    write(file("vllm", release, name), recorded(engine, release, name))
    if names := wanted(RECORDED_PAGES):
        with running_sglang(Path(run_tool("engines.sglang_env"))) as pages:
            for name in names:
                write(file("sglang", SGLANG, name), recorded_pages(pages, SGLANG, name))


if __name__ == "__main__":
    main()
