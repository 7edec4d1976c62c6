"""What the Hugging Face processors make of sizes and pictures. Run by the engine environment's Python.

    python hugging_face.py < request.json > answer.json

The request holds ``models`` (folders), ``sizes`` ([width, height] pairs) and ``chats``. A chat is a list of picture
files and a text, which become one user message. The answer holds for each folder ``counts``, for each size its tokens
or ``null`` where the processor refuses it, and ``ids``, for each chat what the processor returns, with special tokens.
"""

import json
import sys
from typing import Any

from PIL import Image, ImageOps
from transformers import AutoProcessor


def count(processor: Any, width: int, height: int) -> int | None:
    try:
        return int(processor._get_num_multimodal_tokens(image_sizes=[(height, width)])["num_image_tokens"][0])
    except ValueError:
        return None


def ids(processor: Any, files: list[str], text: str) -> list[int]:
    content = [*({"type": "image"} for _ in files), {"type": "text", "text": text}]
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    # As the engine loads a picture: rotated by its EXIF orientation, then in RGB.
    pictures = [ImageOps.exif_transpose(Image.open(file)).convert("RGB") for file in files]
    return [int(value) for value in processor(text=[prompt], images=pictures)["input_ids"][0]]


def answer(folder: str, request: dict[str, Any]) -> dict[str, Any]:
    processor = AutoProcessor.from_pretrained(folder)
    return {
        "counts": [count(processor, width, height) for width, height in request["sizes"]],
        "ids": [ids(processor, chat["files"], chat["text"]) for chat in request["chats"]],
    }


def main() -> None:
    request = json.load(sys.stdin)
    json.dump({folder: answer(folder, request) for folder in request["models"]}, sys.stdout)


if __name__ == "__main__":
    main()
