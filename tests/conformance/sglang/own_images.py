"""Prompts with images by SGLang's own image processors, without an engine.

    python own_images.py < {"cache": ..., "asked": [{"folder": ..., "prompts": [[text, [image, ...]], ...]}, ...]}

Run by the engine environment's Python. ``cache``: the megabytes of ``--mm-preprocess-cache-size-mb``. A text has a
place for each of its images, which are ``data:`` URIs. The last line of the output is a JSON list of an object for each
folder: ``answers``, for each prompt the ids with its images expanded, and the first and last place and the hash of each
image, or why it is refused; and ``processor``, the class that makes them.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")


def answers(folder: str, prompts: list[tuple[str, list[str]]]) -> dict[str, Any]:
    from sglang.srt.managers.multimodal_processor import get_mm_processor
    from sglang.srt.utils.hf_transformers_utils import get_config, get_processor

    trusted = {"trust_remote_code": any(Path(folder).glob("*.py"))}
    config = get_config(folder, **trusted)
    processor = get_mm_processor(config, SimpleNamespace(), get_processor(folder, **trusted), "default")

    async def answer(text: str, images: list[str]) -> dict[str, Any]:
        request = SimpleNamespace(video_data=None, audio_data=None, rid="r", mm_content_hashes=None)
        try:
            made = await processor.process_mm_data_async(
                image_data=images, input_text=text, request_obj=request, max_req_input_len=100_000
            )
        except Exception as error:  # as the engine's server does, which answers any of them with an error
            return {"refused": f"{type(error).__name__}: {error}"}
        for item in made.mm_items:
            item.set_pad_value()
        items = [
            (*offset, item.hash)
            for item in made.mm_items
            for offset in item.offsets  # several images may share an item
        ]
        return {"ids": list(made.input_ids), "images": sorted(items)}

    async def every() -> list[dict[str, Any]]:
        return [await answer(text, images) for text, images in prompts]

    return {
        "answers": asyncio.run(every()),
        "processor": type(getattr(processor, "inner", processor)._processor).__qualname__,
    }


def main() -> None:
    from sglang.srt.managers.multimodal_processor import import_processors
    from sglang.srt.runtime_context import get_context

    given = json.load(sys.stdin)
    with get_context().override_server_args(mm_preprocess_cache_size_mb=given["cache"], mm_process_config={}):
        import_processors("sglang.srt.multimodal.processors")
        print("\n" + json.dumps([answers(**asked) for asked in given["asked"]]))


if __name__ == "__main__":
    main()
