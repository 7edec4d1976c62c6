"""Make a small checkpoint of LLaVA as its authors publish it (``LlavaLlamaForCausalLM``).

    python llava_checkpoint.py SHRUNK_FOLDER OUT_FOLDER {pad|anyres}

Run by the engine environment's Python. Tokenizer and image processor are those of llava-hf, as SGLang's documentation
has it; configuration and names of the weights are the authors', and so is a vision tower in a folder of its own. SGLang
takes the tower's geometry from its weights' configuration, so dummy weights do not do.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

HIDDEN, LAYERS, VOCABULARY = 64, 2, 32064
TOWER = "clip-vit-large-patch14-336"
PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
TEMPLATE = """{% for message in messages %}{{ message.role | upper }}: {% if message.content is string %}
{{- message.content }}{% else %}{% for part in message.content %}{% if part.type == "image" %}<image>
{%- elif part.type == "text" %}{{ part.text }}{% endif %}{% endfor %}{% endif %} {% endfor %}
{%- if add_generation_prompt %}ASSISTANT:{% endif %}"""
"""Authors' folders have none, and that of llava-hf shows no text that is not in parts."""


def configuration(out: Path, mode: str) -> dict[str, Any]:
    text = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": LAYERS, "hidden_act": "silu"}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    ids = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    vision = {
        "image_aspect_ratio": mode,
        "mm_hidden_size": HIDDEN,
        "mm_projector_type": "mlp2x_gelu",
        "mm_vision_select_feature": "patch",
        "mm_vision_select_layer": -2,
        "mm_vision_tower": str(out / TOWER),
    }
    if mode == "anyres":
        vision |= {"mm_patch_merge_type": "spatial_unpad", "image_grid_pinpoints": PINPOINTS}
    named = {"architectures": ["LlavaLlamaForCausalLM"], "model_type": "llava", "torch_dtype": "float16"}
    return {**named, **text, **heads, **ids, **vision, "tie_word_embeddings": False}


def main() -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import CLIPVisionConfig, CLIPVisionModel

    source, out, mode = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    unwanted = shutil.ignore_patterns("config.json", "chat_template*", "generation_config.json", "README.md")
    shutil.copytree(source, out, ignore=unwanted)
    (out / "config.json").write_text(json.dumps(configuration(out, mode)))
    (out / "chat_template.jinja").write_text(TEMPLATE)
    torch.manual_seed(7)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": 3, "num_attention_heads": 2}
    CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=336, patch_size=14)).save_pretrained(out / TOWER)
    square, up, down = (HIDDEN, HIDDEN), (2 * HIDDEN, HIDDEN), (HIDDEN, 2 * HIDDEN)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        **{f"model.mm_projector.{at}.weight": square for at in (0, 2)},
        **{f"model.mm_projector.{at}.bias": (HIDDEN,) for at in (0, 2)},
    }
    if mode == "anyres":
        shapes["model.image_newline"] = (HIDDEN,)
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": square for name in "qkvo"}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": up for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": down}
        shapes |= {f"{layer}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    weights = {name: (torch.randn(shape) / 16).to(torch.float16) for name, shape in shapes.items()}
    save_file(weights, out / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main()
