"""Stands in for the processor that Phi-3-vision's repository brings as remote code: tests only.

vLLM asks it for the number of an image's tokens and for its tiles; it expands prompts itself. The number follows the
published formula (docs/engine-facts/vllm.md#placeholder-counts), so a run with this file proves the engine's
tokenisation, events and hashes, and the library against it, but not that formula: that is compared with an
implementation of others elsewhere.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate, pad
from transformers import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor
from transformers.processing_utils import ProcessorMixin

TILE = 336
ROW_TOKENS = 12
MOST_IMAGES = 1000
WHITE = 255.0


def fitted(width: int, height: int, crops: int) -> tuple[int, int]:
    """Return width and height of the picture that fills at most ``crops`` tiles. Raises ``ValueError`` at 0 pixels."""
    ratio = max(width, height) / min(width, height)
    tiles = max(n for n in range(1, crops + 1) if n * math.ceil(n / ratio) <= crops)
    long, short = TILE * tiles, int(TILE * tiles / ratio)
    if short == 0:
        raise ValueError(f"nothing is left of a picture of {width} x {height}")
    return (long, short) if width >= height else (short, long)


def tiled(side: int) -> int:
    return math.ceil(side / TILE)


class Phi3VImageProcessor(BaseImageProcessor):
    model_input_names = ("pixel_values", "image_sizes")

    def __init__(
        self,
        num_crops: int = 1,
        num_img_tokens: int = 144,
        image_mean: Sequence[float] = (0.5, 0.5, 0.5),
        image_std: Sequence[float] = (0.5, 0.5, 0.5),
        **fields: Any,
    ) -> None:
        super().__init__(**fields)
        self.num_crops = num_crops
        self.num_img_tokens = num_img_tokens
        self.image_mean = list(image_mean)
        self.image_std = list(image_std)

    def tokens(self, width: int, height: int) -> int:
        columns, rows = (tiled(side) for side in fitted(width, height, self.num_crops))
        return (rows * columns + 1) * self.num_img_tokens + 1 + (rows + 1) * ROW_TOKENS

    def preprocess(self, images: Any, return_tensors: str | None = None, **_: Any) -> BatchFeature:
        pictures = images if isinstance(images, list | tuple) else [images]
        done = [self.tiles(picture) for picture in pictures]
        sizes = torch.tensor([size for _, size in done])
        return BatchFeature({"pixel_values": torch.stack([crops for crops, _ in done]), "image_sizes": sizes})

    def tiles(self, picture: Image.Image) -> tuple[torch.Tensor, tuple[int, int]]:
        """Return the whole picture and its tiles, ``(crops + 1, 3, TILE, TILE)``, and height and width of all tiles."""
        width, height = fitted(*picture.size, self.num_crops)
        columns, rows = tiled(width), tiled(height)
        pixels = torch.from_numpy(np.array(picture.convert("RGB"), dtype=np.float32)).permute(2, 0, 1)[None]
        scaled = interpolate(pixels, size=(height, width), mode="bilinear", antialias=True)
        across, down = columns * TILE - width, rows * TILE - height
        edges = (across // 2, across - across // 2, down // 2, down - down // 2)
        page = pad(scaled, edges, value=WHITE) / WHITE
        mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (self.image_mean, self.image_std))
        page = (page - mean) / std
        whole = interpolate(page, size=(TILE, TILE), mode="bicubic", antialias=True)
        parts = page.view(3, rows, TILE, columns, TILE).permute(1, 3, 0, 2, 4).reshape(-1, 3, TILE, TILE)
        out = torch.zeros(self.num_crops + 1, 3, TILE, TILE)
        out[: 1 + len(parts)] = torch.cat((whole, parts))
        return out, (rows * TILE, columns * TILE)


class Phi3VProcessor(ProcessorMixin):
    attributes = ("image_processor", "tokenizer")
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"

    def __init__(self, image_processor: Phi3VImageProcessor, tokenizer: Any, **_: Any) -> None:
        self.image_processor = image_processor
        self.tokenizer = tokenizer
        self.chat_template = tokenizer.chat_template
        self.img_tokens = [f"<|image_{number}|>" for number in range(1, MOST_IMAGES + 1)]

    def calc_num_image_tokens_from_image_size(self, width: int, height: int) -> int:
        return self.image_processor.tokens(width, height)

    def __call__(self, text: Any = None, images: Any = None, **_: Any) -> BatchFeature:
        made = BatchFeature({})
        if images is not None:
            made.update(self.image_processor.preprocess(images))
        if text is not None:
            # vLLM expands the prompt itself, and replaces these.
            made["input_ids"] = torch.tensor([self.tokenizer(text).input_ids])
        return made
