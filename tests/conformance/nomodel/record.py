"""Record what an engine publishes, with its own hits, for consumers of other projects too (docs/kv-events.md).

    PYTHONPATH=.:tests .venv/bin/python -m conformance.nomodel.record [--only LAYOUT] [--into FOLDER]

Writes FOLDER, by default ``tests/kv_events/recordings``, from vLLM's own scheduler and cache manager: every layout on
the tested release, and on the newer one those that it treats otherwise, with two that it does not. Two runs differ in
the time of each batch only.
"""

import argparse
import json
import lzma
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from artefacts import run_tool
from conformance.nomodel.layouts import LAYOUTS, EngineProcess, drafter, running
from conformance.nomodel.prompts import Drawn, Prompts
from kv_events.check import RECORDINGS, VERSION

from hack.engines.newer_vllm_env import NEWER
from hack.engines.vllm_env import VLLM

REQUESTS = 50
BOOK = 3_600  # tokens of which all texts are pieces
RECORDED = {
    (VLLM, "engines.vllm_env"): [*LAYOUTS],
    (NEWER, "engines.newer_vllm_env"): [
        name for name in LAYOUTS if drafter(name) or name in ("full attention", "mamba beside full attention")
    ],
}
"""Release, and the tool that makes its environment -> layouts."""


def recorded(engine: EngineProcess, release: str, name: str) -> Iterator[dict[str, Any]]:
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
    parser = argparse.ArgumentParser(description="Record the KV events of vLLM's cache manager.")
    parser.add_argument("--only", choices=list(LAYOUTS), metavar="LAYOUT", help="record this layout alone")
    parser.add_argument("--into", type=Path, default=RECORDINGS, metavar="FOLDER", help="write the recordings here")
    options = parser.parse_args()
    options.into.mkdir(parents=True, exist_ok=True)
    for (release, tool), names in RECORDED.items():
        wanted = [name for name in names if options.only in (None, name)]
        if not wanted:
            continue
        with running(Path(run_tool(tool))) as engine:
            for name in wanted:
                slug = name.lower().replace(",", "").replace(" ", "-")
                write(options.into / f"vllm-{release}-{slug}.jsonl.xz", recorded(engine, release, name))


if __name__ == "__main__":
    main()
