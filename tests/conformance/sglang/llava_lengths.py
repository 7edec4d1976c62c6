"""Lengths of LLaVA's images by the method of SGLang's scheduler that expands them, without an engine.

    python llava_lengths.py < {"pinpoints": [[width, height], ...], "sizes": [[width, height], ...]}

Run by the engine environment's Python. The last line of the output is a JSON list: for each size the number of tokens
that take the place of one placeholder.
"""

import json
import sys
from array import array
from types import SimpleNamespace


def main() -> None:
    from sglang.srt.models.llava import LlavaLlamaForCausalLM

    asked = json.load(sys.stdin)
    model = LlavaLlamaForCausalLM.__new__(LlavaLlamaForCausalLM)
    model.__dict__.update(
        config=SimpleNamespace(image_aspect_ratio="anyres", image_token_index=32000),
        vision_tower=SimpleNamespace(config=SimpleNamespace(image_size=336)),
        image_grid_pinpoints=asked["pinpoints"],
        image_size=336,
        patch_size=14,
        image_feature_len=576,
    )

    def length(size: list[int]) -> int:
        item = SimpleNamespace(
            image_sizes=[tuple(size)], pad_value=1_000_001, model_specific_data={"image_aspect_ratio": "anyres"}
        )
        return len(model.pad_input_ids(array("q", [1, 32000]), SimpleNamespace(mm_items=[item]))) - 1

    print("\n" + json.dumps([length(size) for size in asked["sizes"]]))


if __name__ == "__main__":
    main()
