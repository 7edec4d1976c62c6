"""Images of every family through a packed item and vLLM's own front end. Run by the engine environment's Python.

    python vllm_handover.py PLUGIN_FOLDER < request.json > answer.json

The request holds ``models`` (folders) and ``pictures`` (files). For each model all pictures become one prompt, twice:
processed by vLLM 0.32 itself, and handed over by our plugin with nothing but names in it. The answer holds
for each folder ``differences``, what is unequal of the two (ids, places, masks, tensors and how they are batched),
``again``, the same for a second prompt that finds them in vLLM's cache, ``changed``, whether a changed pixel is seen,
``fields`` (name, kind) and ``bytes``.
"""

import json
import sys
import time
from typing import Any

from PIL import Image


def compare(own: dict[str, Any], other: dict[str, Any], *, tensors: bool = True) -> list[str]:
    from vllm.multimodal.inputs import nested_tensors_equal

    wrong = [key for key in ("prompt_token_ids", "mm_hashes", "mm_placeholders") if own[key] != other[key]]
    for number, (mine, theirs) in enumerate(zip(own["mm_kwargs"]["image"], other["mm_kwargs"]["image"], strict=True)):
        if not tensors:
            wrong += [f"{number}: sent again"] * (theirs is not None)
            continue
        if theirs is None or list(mine) != list(theirs):
            wrong.append(f"{number}: other fields")
            continue
        for key, element in mine.items():
            kept = element.field.keep_on_cpu == theirs[key].field.keep_on_cpu
            if element != theirs[key] or not kept or not nested_tensors_equal(element.data, theirs[key].data, True):
                wrong.append(f"{number}: {key}")
    return wrong


def answer(folder: str, files: list[str]) -> dict[str, Any]:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.renderers import renderer_from_config

    from mmrouter_handover.plugin import vllm_items
    from mmrouter_handover.plugin.packed_item import read_header
    from mmrouter_handover.plugin.processor_cache import HandedOverCache, PendingItems
    from mmrouter_handover.plugin.renderer_side import from_cache

    config = ModelConfig(model=folder, dtype="float32", trust_remote_code=True)
    renderer: Any = renderer_from_config(VllmConfig(model_config=config))
    pictures = [Image.open(file).convert("RGB") for file in files]
    names = [f"name-{number}" for number in range(len(files))]
    text = renderer.mm_processor.dummy_inputs.get_dummy_text({"image": len(files)})
    ids = renderer.tokenizer.encode(f"What is this? {text} Say it.", add_special_tokens=False)

    def processed(images: list[Any], skip: bool) -> dict[str, Any]:
        return renderer._process_multimodal(ids, {"image": images}, {"image": names}, None, skip_mm_cache=skip)

    own = processed(pictures, True)
    kept: PendingItems[Any] = PendingItems(1 << 40, time.monotonic)
    renderer._mm_processor_cache = HandedOverCache(renderer._mm_processor_cache, kept)
    settings, total = vllm_items.settings_digest("0.32.0", renderer), 0
    for name, item in from_cache(renderer._mm_processor_only_cache, names).items():
        plan = vllm_items.pack(settings, name, item)
        data = memoryview(bytearray(b"\xee" * plan.length))
        plan.write(data)
        header, tensors = read_header(data, name=name, settings=settings)
        kept.put(name, vllm_items.unpack(header, tensors), plan.length, 60)
        total += plan.length
    nothing: list[Any] = [None] * len(files)
    differences = compare(own, processed(nothing, False))
    again = compare(own, processed(nothing, False), tensors=False)
    for picture in pictures:
        picture.putpixel((3, 3), (1, 2, 3))
    renderer._mm_processor_only_cache.clear_cache()
    return {
        "differences": differences,
        "again": again,
        "changed": bool(compare(own, processed(pictures, True))),
        "fields": sorted((field.name, field.kind) for field in header.fields),
        "bytes": total,
    }


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    request = json.load(sys.stdin)
    said, sys.stdout = sys.stdout, sys.stderr  # vLLM's log is no part of the answer
    json.dump({folder: answer(folder, request["pictures"]) for folder in request["models"]}, said)


if __name__ == "__main__":
    main()
