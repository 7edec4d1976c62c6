"""The processor of the stand-in for Kimi K2.5: padded patches of each image, as many as its settings allow.

SGLang counts an image's tokens by ``media_processor.media_tokens_calculator`` where it has no GPU, and by the same
formula of its own where it has one, which ``tests/conformance/sglang/test_images.py`` compares with the library.
"""

import math
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import BatchFeature, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor


class KimiK25VisionProcessor(BaseImageProcessor):
    model_input_names: ClassVar[list[str]] = ["pixel_values", "grid_thws"]

    def __init__(self, media_proc_cfg: dict[str, Any], **others: Any) -> None:
        super().__init__(**others)
        self.media_proc_cfg = media_proc_cfg

    def sides(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Return width and height in pixels of an image that is scaled down, and in squares of what it is padded to."""
        patch, most, longest = (
            self.media_proc_cfg[name] for name in ("patch_size", "in_patch_limit", "patch_limit_on_one_side")
        )
        patches = max(1.0, width // patch) * max(1.0, height // patch)
        scale = min(1.0, math.sqrt(most / patches), longest * patch / width, longest * patch / height)
        wide, high = (min(max(1, int(side * scale)), longest * patch) for side in (width, height))
        square = patch * self.media_proc_cfg["merge_kernel_size"]
        return wide, high, -(-wide // square), -(-high // square)

    def media_tokens_calculator(self, media: dict[str, Any]) -> int:
        return math.prod(self.sides(*media["image"].size)[2:])

    def preprocess(self, medias: list[dict[str, Any]], return_tensors: str | None = None, **_: Any) -> BatchFeature:
        patch, merge = self.media_proc_cfg["patch_size"], self.media_proc_cfg["merge_kernel_size"]
        patches, grids = [], []
        for image in (media["image"].convert("RGB") for media in medias):
            wide, high, columns, rows = self.sides(*image.size)
            padded = np.zeros((rows * merge * patch, columns * merge * patch, 3), np.float32)
            padded[:high, :wide] = np.asarray(image.resize((wide, high))) / 127.5 - 1
            grid = 1, rows * merge, columns * merge
            cut = padded.reshape(grid[1], patch, grid[2], patch, 3).transpose(0, 2, 4, 1, 3)
            patches.append(cut.reshape(-1, 3, patch, patch))
            grids.append(grid)
        return BatchFeature({"pixel_values": torch.tensor(np.concatenate(patches)), "grid_thws": torch.tensor(grids)})


class KimiK25Processor(ProcessorMixin):
    attributes: ClassVar[list[str]] = ["image_processor", "tokenizer"]
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, **others: Any) -> None:
        super().__init__(image_processor, tokenizer, **others)
        self.media_processor = image_processor

    def __call__(self, text: list[str], medias: list[dict[str, Any]] | None = None, **_: Any) -> BatchFeature:
        ids = torch.tensor([self.tokenizer(each)["input_ids"] for each in text])
        shown = self.media_processor.preprocess(medias) if medias else {}
        return BatchFeature({"input_ids": ids, **shown})
