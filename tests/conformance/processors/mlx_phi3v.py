"""What mlx-vlm's Phi-3-vision processor makes of sizes and pictures. Run by the engine environment's Python.

    python mlx_phi3v.py MLX_VLM_WHEEL < request.json > answer.json

The request holds ``crops`` (values of num_crops), ``sizes`` ([width, height] pairs), ``pictures`` (files) and
``picture_crops``. The answer holds ``counts``, for each value of num_crops the sizes' tokens or ``null`` for a size of
which nothing would be left, and ``pictures``, for each file the tokens and the number of tiles that it really cut.

Only this one module is taken out of the wheel. Of mlx it uses the array type alone, and there numpy's does as well.
"""

import json
import sys
import zipfile
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import transformers.image_processing_utils  # noqa: F401 - before mlx is stood in for: it looks whether mlx is there
from PIL import Image, ImageOps

MODULE = "mlx_vlm.models.phi3_v.processing_phi3_v"


def load(wheel: str) -> ModuleType:
    for name in ("mlx", "mlx.core", "mlx_vlm", "mlx_vlm.models", "mlx_vlm.models.phi3_v", "mlx_vlm.models.base"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = []  # type: ignore[attr-defined]
    sys.modules["mlx"].core = sys.modules["mlx.core"]  # type: ignore[attr-defined]
    sys.modules["mlx.core"].array = np.asarray  # type: ignore[attr-defined]
    sys.modules["mlx_vlm.models.base"].install_auto_processor_patch = lambda *_: None  # type: ignore[attr-defined]
    module = ModuleType(MODULE)
    module.__package__ = "mlx_vlm.models.phi3_v"
    sys.modules[MODULE] = module
    path = MODULE.replace(".", "/") + ".py"
    source = zipfile.ZipFile(wheel).read(path)
    exec(compile(source, path, "exec"), module.__dict__)
    return module


def count(module: ModuleType, processor: Any, width: int, height: int) -> int | None:
    if 0 in module._calc_hd_transform_size(width, height, processor.num_crops):
        return None
    return int(processor.calc_num_image_tokens(SimpleNamespace(size=(width, height))))


def whole(processor: Any, file: str) -> dict[str, int]:
    picture = ImageOps.exif_transpose(Image.open(file)).convert("RGB")
    tiles = processor(picture)["pixel_values"].shape[1] - 1  # the first is the whole picture
    return {"tokens": int(processor.calc_num_image_tokens(picture)), "tiles": int(tiles)}


def main() -> None:
    module, request = load(sys.argv[1]), json.load(sys.stdin)
    counts = {}
    for crops in request["crops"]:
        processor = module.Phi3VImageProcessor(num_crops=crops)
        counts[crops] = [count(module, processor, width, height) for width, height in request["sizes"]]
    processor = module.Phi3VImageProcessor(num_crops=request["picture_crops"])
    json.dump({"counts": counts, "pictures": [whole(processor, file) for file in request["pictures"]]}, sys.stdout)


if __name__ == "__main__":
    main()
