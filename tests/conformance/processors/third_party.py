"""What third parties make of sizes, pictures and texts. Run by the engine environment's Python.

    python third_party.py hugging_face < request.json > answer.json
    python third_party.py mlx_phi3v MLX_VLM_WHEEL < request.json > answer.json
    python third_party.py vllm_phi3v MODEL_FOLDER < request.json > answer.json
    python third_party.py vllm_handover PLUGIN_FOLDER < request.json > answer.json
    python third_party.py vllm_prompts < request.json > answer.json
    python third_party.py vllm_counts < request.json > answer.json

The functions of these names say what requests and answers hold.
"""

import json
import sys
import time
import traceback
import zipfile
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from PIL import Image, ImageOps

MLX_MODULE = "mlx_vlm.models.phi3_v.processing_phi3_v"
FILL = 32044


def opened(file: str) -> Image.Image:
    """Return a picture as the engine loads it: rotated by its EXIF orientation, then in RGB."""
    return ImageOps.exif_transpose(Image.open(file)).convert("RGB")


def hugging_face(request: dict[str, Any]) -> dict[str, Any]:
    """The processors of Hugging Face. The request holds ``models`` (folders), ``sizes`` ([width, height] pairs) and
    ``chats``. A chat is a list of picture files and a text, which become one user message. The answer holds for each
    folder ``counts``, for each size its tokens or ``None`` where the processor refuses it, and ``ids``, for each chat
    what the processor returns, with special tokens.
    """

    def count(processor: Any, width: int, height: int) -> int | None:
        own = COUNTS.get(type(processor).__name__, counted)
        try:
            return own(processor, width, height)
        except (ValueError, ZeroDivisionError):
            return None

    def ids(processor: Any, files: list[str], text: str) -> list[int]:
        prompt = prompt_of(processor, files, text, getattr(processor, "template", None))
        return [int(value) for value in processor(text=[prompt], images=list(map(opened, files)))["input_ids"][0]]

    def answer(folder: str) -> dict[str, Any]:
        processor = processor_of(folder)
        return {
            "counts": [count(processor, width, height) for width, height in request["sizes"]],
            "ids": [ids(processor, chat["files"], chat["text"]) for chat in request["chats"]],
        }

    return {folder: answer(folder) for folder in request["models"]}


def prompt_of(templated: Any, files: list[str], text: str, template: str | None = None) -> str:
    """Return the prompt of one user message. ``template``: vLLM's own, which takes a text, with images in front."""
    content: Any = [*({"type": "image"} for _ in files), {"type": "text", "text": text}]
    if template is not None:
        content = "\n".join([*("<image>" for _ in files), text])
    made: str = templated.apply_chat_template(
        [{"role": "user", "content": content}], chat_template=template, tokenize=False, add_generation_prompt=True
    )
    return made


def own_template(model_type: str, folder: str) -> str | None:
    """Return the template that vLLM has for folders without one."""
    from vllm.transformers_utils.chat_templates import get_chat_template_fallback_path

    path = get_chat_template_fallback_path(model_type, folder)
    return None if path is None else path.read_text()


def processor_of(folder: str) -> Any:
    """Return the processor of Hugging Face, or vLLM's own of DeepSeek-OCR, for whose folders there is no other."""
    from transformers import AutoProcessor

    (architecture,) = json.loads((Path(folder) / "config.json").read_text())["architectures"]
    info = DEEPSEEK_OCR.get(architecture)
    return AutoProcessor.from_pretrained(folder) if info is None else DeepseekOCR(folder, *info)


DEEPSEEK_OCR = {
    "DeepseekOCRForCausalLM": ("deepseek_ocr", "DeepseekOCRProcessingInfo"),
    "DeepseekOCR2ForCausalLM": ("deepseek_ocr2", "DeepseekOCR2ProcessingInfo"),
}
"""Architecture -> vLLM's module of it, which is also its ``model_type`` there, and the class that counts its tokens."""


class DeepseekOCR:
    """vLLM's own processor of DeepSeek-OCR and its formula, called as a processor of Hugging Face is."""

    def __init__(self, folder: str, module: str, name: str) -> None:
        self.template = own_template(module, folder)
        self.info = object.__new__(getattr(import_module(f"vllm.model_executor.models.{module}"), name))
        self.info.ctx = SimpleNamespace(get_hf_processor=lambda made, **kept: made.from_pretrained(folder, **kept))
        self.processor = self.info.get_hf_processor()

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        return self.processor.tokenizer.apply_chat_template(messages, **options)

    def __call__(self, text: list[str], images: list[Image.Image]) -> dict[str, Any]:
        made = self.processor(prompt=text[0], images=images)
        return {"input_ids": made["input_ids"][:, 1:]}  # it puts a begin before the template's


def counted_deepseek_ocr(processor: DeepseekOCR, width: int, height: int) -> int:
    """Return what vLLM's formula says."""
    return int(processor.info.get_num_image_tokens(image_width=width, image_height=height))


def counted(processor: Any, width: int, height: int) -> int:
    """Return what the processor itself says."""
    return int(processor._get_num_multimodal_tokens(image_sizes=[(height, width)])["num_image_tokens"][0])


def counted_pixtral(processor: Any, width: int, height: int) -> int | None:
    """Return the tokens of the picture that the image processor resizes to, ``None`` where a side vanishes. What the
    processor itself says takes three rows of pixels for three channels.
    """
    import numpy as np
    from transformers.models.pixtral.image_processing_pixtral import get_resize_output_image_size

    longest, unit = processor.image_processor.size["longest_edge"], processor.patch_size * processor.spatial_merge_size
    shape = np.broadcast_to(np.uint8(0), (3, height, width))
    high, wide = get_resize_output_image_size(shape, longest, unit, "channels_first")
    return high // unit * (wide // unit + 1) if high and wide else None


def counted_gemma4(processor: Any, width: int, height: int) -> int:
    """Return the tokens by vLLM's formula, with begin and end. The processor has to make the same number."""
    from vllm.model_executor.models.gemma4_mm import Gemma4ProcessingInfo

    images = processor.image_processor
    vision = SimpleNamespace(
        patch_size=images.patch_size,
        pooling_kernel_size=images.pooling_kernel_size,
        default_output_length=images.max_soft_tokens,
    )
    info = SimpleNamespace(get_hf_config=lambda: SimpleNamespace(vision_config=vision))
    tokens = Gemma4ProcessingInfo._compute_num_soft_tokens(info, width, height)  # type: ignore[arg-type]
    assert counted(processor, width, height) == tokens, (width, height)
    return tokens + 2


def counted_llama4(processor: Any, width: int, height: int) -> int:
    """Return the special tokens in the text that the processor writes for the canvas that it chooses."""
    import torch
    from transformers.image_utils import SizeDict
    from transformers.models.llama4.image_processing_llama4 import find_supported_resolutions, get_best_fit

    images, side = processor.image_processor, processor.image_processor.size["height"]
    canvases = find_supported_resolutions(images.max_patches, SizeDict(height=side, width=side))
    high, wide = get_best_fit((height, width), torch.tensor(canvases), images.resize_to_max_canvas).tolist()
    patches = (side // processor.patch_size) ** 2 // processor.downsample_ratio
    return processor._prompt_split_image((high // side, wide // side), patches).count("<|")


def counted_minicpmv(processor: Any, width: int, height: int) -> int:
    """Return the special tokens and line feeds of the text for the sizes that the image processor chooses, and three
    for the image's number.
    """
    import torch

    images, size = processor.image_processor, (height, width)
    side, patch = images.scale_resolution, images.patch_size
    grid = images.get_sliced_grid(size, images.max_slice_nums, side)
    pictures = [images.find_best_resize(size, side, patch, allow_upscale=grid is None)]
    if grid is not None:
        high, wide = images.get_refine_size(size, grid, side, patch, allow_upscale=True)
        pictures += [(high // grid[0], wide // grid[1])] * (grid[0] * grid[1])
    inputs = {
        "grids": [grid or [0, 0]],
        "num_patches_per_image": [len(pictures)],
        "target_sizes": torch.tensor([[high // patch, wide // patch] for high, wide in pictures]),
    }
    text = processor.replace_image_token(inputs, 0, image_token_divisor=processor.image_token_divisor)
    return text.count("<") + text.count("\n") + 3


def counted_paddleocr(processor: Any, width: int, height: int) -> int:
    """Return the tokens of the patches that the image processor states."""
    images = processor.image_processor
    return int(images.get_number_of_image_patches(height, width)) // images.merge_size**2


COUNTS = {
    "DeepseekOCR": counted_deepseek_ocr,
    "Gemma4Processor": counted_gemma4,
    "Llama4Processor": counted_llama4,
    "MiniCPMV4_6Processor": counted_minicpmv,
    "PaddleOCRVLProcessor": counted_paddleocr,
    "PixtralProcessor": counted_pixtral,
}
"""Processors that state no number of tokens, or not the engine's."""


def vllm_prompts(request: dict[str, Any]) -> list[list[dict[str, Any]] | str]:
    """Prompts by vLLM's own front end. The request holds ``models`` (folders) and ``chats``, each a list of
    picture ``files`` and a ``text``, which become one user message. The answer holds for each folder and chat ``ids``
    and ``places``, [offset, length, number of its file] of each image; a text where vLLM does not take a folder.
    """
    answers: list[list[dict[str, Any]] | str] = []
    for folder in request["models"]:
        try:
            answers.append(own_prompts(folder, request["chats"]))
        except Exception as error:  # of one folder, by vLLM's own code; the others have answers
            traceback.print_exc()
            answers.append(f"{type(error).__name__}: {error}")
    return answers


def front_end(folder: str) -> Any:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.model_executor.models import registry
    from vllm.renderers import renderer_from_config

    registry._run_in_subprocess = lambda look: look()  # each process would import all of vLLM again
    config = ModelConfig(model=folder, dtype="float32", trust_remote_code=any(Path(folder).glob("*.py")))
    return renderer_from_config(VllmConfig(model_config=config))


def own_prompts(folder: str, chats: list[dict[str, Any]]) -> list[dict[str, Any]]:
    renderer, made = front_end(folder), []
    own = renderer.tokenizer.chat_template is None
    template = own_template(renderer.model_config.hf_config.model_type, folder) if own else None
    for at, chat in enumerate(chats):
        text = prompt_of(renderer.tokenizer, chat["files"], chat["text"], template)
        ids = renderer.tokenizer.encode(text, add_special_tokens=False)
        names = [f"{at}.{number}" for number, _ in enumerate(chat["files"])]  # one name is one image to vLLM
        pictures: list[Any] = list(map(opened, chat["files"]))
        kind = "image"
        if "vision_chunk" in renderer.mm_processor.info.supported_mm_limits:  # images and parts of videos alike
            kind, pictures = "vision_chunk", [{"type": "image", "image": picture} for picture in pictures]
        done = renderer._process_multimodal(ids, {kind: pictures}, {kind: names}, None, skip_mm_cache=True)
        named = zip(done["mm_placeholders"][kind], done["mm_hashes"][kind], strict=True)
        places = [[place.offset, place.length, int(name.partition(".")[2])] for place, name in named]
        made.append({"ids": list(done["prompt_token_ids"]), "places": places})
    return made


def vllm_counts(request: dict[str, Any]) -> dict[str, list[int | None]]:
    """The tokens of sizes by vLLM's own processors, of families that Hugging Face has none for; ``None`` for one that
    ends in an error. The request holds ``models`` (folders) and ``sizes`` ([width, height] pairs).
    """
    return {
        folder: [OWN_COUNTS[type(info).__name__](info, *size) for size in request["sizes"]]
        for folder in request["models"]
        for info in [front_end(folder).mm_processor.info]
    }


def counted_nemotron(info: Any, width: int, height: int) -> int | None:
    from PIL import Image

    processor = info.get_hf_processor()
    if tiler := processor.dynamic_tiler:
        sized = Image.Image()
        sized._size = width, height
        try:
            (found,) = tiler.compute_params([sized], tiler.max_num_tokens_available(0))
        except ZeroDivisionError:
            return None
        return len(processor.get_image_repl(found.num_embeddings, None).full)
    count = processor.get_num_image_tokens(
        image_width=width, image_height=height, max_num_tiles=processor.max_num_tiles
    )
    return len(processor.get_image_repl(count, None).full)


def counted_kimi(info: Any, width: int, height: int) -> int:
    picture = {"type": "image", "image": SimpleNamespace(size=(width, height))}
    return int(info.image_processor.get_resize_config(picture)["num_tokens"])


def counted_internvl(info: Any, width: int, height: int) -> int:
    processor = info.get_hf_processor()
    tokens = processor.get_num_image_tokens(image_width=width, image_height=height)
    return len(processor.get_image_repl(None, tokens).full)


OWN_COUNTS = {
    "InternVLProcessingInfo": counted_internvl,
    "NanoNemotronVLProcessingInfo": counted_nemotron,
    "KimiK25ProcessingInfo": counted_kimi,
}


def mlx_phi3v(request: dict[str, Any], wheel: str) -> dict[str, Any]:
    """The Phi-3-vision processor of mlx-vlm. The request holds ``crops`` (values of num_crops), ``sizes`` ([width,
    height] pairs), ``pictures`` (files) and ``picture_crops``. The answer holds ``counts``, for each value of num_crops
    the sizes' tokens or ``None`` for a size of which nothing would be left, and ``pictures``, for each file the tokens
    and the number of tiles that it really cut.
    """
    module = load_mlx(wheel)

    def count(processor: Any, width: int, height: int) -> int | None:
        if 0 in module._calc_hd_transform_size(width, height, processor.num_crops):
            return None
        return int(processor.calc_num_image_tokens(SimpleNamespace(size=(width, height))))

    def whole(processor: Any, file: str) -> dict[str, int]:
        picture = opened(file)
        tiles = processor(picture)["pixel_values"].shape[1] - 1  # the first is the whole picture
        return {"tokens": int(processor.calc_num_image_tokens(picture)), "tiles": int(tiles)}

    counts = {}
    for crops in request["crops"]:
        processor = module.Phi3VImageProcessor(num_crops=crops)
        counts[crops] = [count(processor, width, height) for width, height in request["sizes"]]
    processor = module.Phi3VImageProcessor(num_crops=request["picture_crops"])
    return {"counts": counts, "pictures": [whole(processor, file) for file in request["pictures"]]}


def load_mlx(wheel: str) -> ModuleType:
    """Take one module out of the wheel. Of mlx it uses the array type alone, and there numpy's does as well."""
    import numpy as np
    import transformers.image_processing_utils  # noqa: F401 - before mlx is stood in for: it looks whether mlx is there

    for name in ("mlx", "mlx.core", "mlx_vlm", "mlx_vlm.models", "mlx_vlm.models.phi3_v", "mlx_vlm.models.base"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = []  # type: ignore[attr-defined]
    sys.modules["mlx"].core = sys.modules["mlx.core"]  # type: ignore[attr-defined]
    sys.modules["mlx.core"].array = np.asarray  # type: ignore[attr-defined]
    sys.modules["mlx_vlm.models.base"].install_auto_processor_patch = lambda *_: None  # type: ignore[attr-defined]
    module = ModuleType(MLX_MODULE)
    module.__package__ = "mlx_vlm.models.phi3_v"
    sys.modules[MLX_MODULE] = module
    path = MLX_MODULE.replace(".", "/") + ".py"
    exec(compile(zipfile.ZipFile(wheel).read(path), path, "exec"), module.__dict__)
    return module


def vllm_phi3v(request: dict[str, Any], folder: str) -> list[dict[str, Any] | None]:
    """Where vLLM 0.32's own Phi-3-vision class puts images, and which ids it makes. The request holds ``prompts``, each
    a ``text`` and ``counts``, the tokens of its images. The answer holds for each ``ids`` and ``places`` ([offset,
    length, image number] in prompt order), or ``None`` where vLLM finds no place. The class runs as it is; of its
    surroundings it gets the tokenizer and the counts.
    """
    from transformers import AutoTokenizer
    from vllm.model_executor.models.phi3v import Phi3VMultiModalProcessor
    from vllm.multimodal.processing.processor import PromptReplacement

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    processor = object.__new__(Phi3VMultiModalProcessor)
    processor.info = SimpleNamespace(get_tokenizer=lambda: tokenizer)

    def answer(text: str, counts: list[int]) -> dict[str, Any] | None:
        updates = []
        for number, count in enumerate(counts):
            target = tokenizer.encode(f"<|image_{number + 1}|>", add_special_tokens=False)
            filled = PromptReplacement(modality="image", target=target, replacement=[FILL] * count)
            updates.append([filled.resolve(number)])
        ids = tokenizer.encode(text, add_special_tokens=False)
        try:
            ids, placed = processor._apply_prompt_updates(ids, {"image": updates} if updates else {})
        except AssertionError:
            return None
        places = [[place.start_idx, len(place.tokens), place.item_idx] for place in placed.get("image", [])]
        return {"ids": ids, "places": places}

    return [answer(prompt["text"], prompt["counts"]) for prompt in request["prompts"]]


def vllm_handover(request: dict[str, Any], plugin: str) -> dict[str, Any]:
    """Images of every family through a packed item and vLLM's own front end. The request holds ``models`` (folders) and
    ``pictures`` (files). For each model all pictures become one prompt, twice: processed by vLLM itself, and
    handed over by our plugin with nothing but names in it. The answer holds for each folder ``differences``, what is
    unequal of the two (ids, places, masks, tensors and how they are batched), ``again``, the same for a second prompt
    that finds them in vLLM's cache, ``changed``, whether a changed pixel is seen, ``fields`` (name, kind) and
    ``bytes``.
    """
    sys.path.insert(0, plugin)
    return {folder: handed_over(folder, request["pictures"]) for folder in request["models"]}


def handed_over(folder: str, files: list[str]) -> dict[str, Any]:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.renderers import renderer_from_config

    from mmrouter_handover.plugin import vllm_items
    from mmrouter_handover.plugin.item_exchange import from_cache
    from mmrouter_handover.plugin.processor_cache import HandedOverCache, PendingItems
    from mmrouter_handover.plugin.wire import read_header

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


if __name__ == "__main__":
    output, sys.stdout = sys.stdout, sys.stderr  # logs are no part of the answer
    json.dump(globals()[sys.argv[1]](json.load(sys.stdin), *sys.argv[2:]), output)
