"""Where vLLM 0.32's own Phi-3-vision code puts images, and which ids it makes. Run by the engine environment's Python.

    python vllm_phi3v.py MODEL_FOLDER < request.json > answer.json

The request holds ``prompts``, each a ``text`` and ``counts``, the tokens of its images. The answer holds for each
``ids`` and ``places`` ([offset, length, image number] in prompt order), or ``null`` where vLLM finds no place.
The class runs as it is; of its surroundings it gets the tokenizer and the counts.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer
from vllm.model_executor.models.phi3v import Phi3VMultiModalProcessor
from vllm.multimodal.processing.processor import PromptReplacement

FILL = 32044


def answer(processor: Any, tokenizer: Any, text: str, counts: list[int]) -> dict[str, Any] | None:
    updates = []
    for number, count in enumerate(counts):
        target = tokenizer.encode(f"<|image_{number + 1}|>", add_special_tokens=False)
        updates.append([PromptReplacement(modality="image", target=target, replacement=[FILL] * count).resolve(number)])
    ids = tokenizer.encode(text, add_special_tokens=False)
    try:
        ids, placed = processor._apply_prompt_updates(ids, {"image": updates} if updates else {})
    except AssertionError:
        return None
    places = [[place.start_idx, len(place.tokens), place.item_idx] for place in placed.get("image", [])]
    return {"ids": ids, "places": places}


def main() -> None:
    request = json.load(sys.stdin)
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=False)
    processor = object.__new__(Phi3VMultiModalProcessor)
    processor.info = SimpleNamespace(get_tokenizer=lambda: tokenizer)
    json.dump([answer(processor, tokenizer, p["text"], p["counts"]) for p in request["prompts"]], sys.stdout)


if __name__ == "__main__":
    main()
