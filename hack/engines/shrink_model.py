"""Make a model folder small enough for a CPU engine with dummy weights.

    python hack/engines/shrink_model.py MODEL_FOLDER OUT_FOLDER
    ENGINE_PYTHON hack/engines/shrink_model.py --weights FOLDER    # gives a shrunk folder weights

Everything that decides a prompt stays as it is: tokenizer, chat template, preprocessor, special ids, patch and merge
sizes, context length. Only the network shrinks (two layers, hidden size 64), so that ``vllm serve --load-format dummy``
holds it in the memory of a test machine. The source needs no weights. vLLM's own dummy weights are so small that all
logits are zero: two images then have one answer. With random ones every pixel shows in the probabilities; they need an
engine's environment, which has torch and transformers.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HIDDEN = 64
HEADS = 2  # of 32 each: the CPU attention wants a multiple of 16
TEXT = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "intermediate_size": 2 * HIDDEN,
}
# The vision tower must end in the text network's width; each family names its sizes differently.
VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 2, "embed_dim": HIDDEN, "hidden_size": HIDDEN, "num_heads": HEADS, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "depth": 2,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_heads": HEADS,
        "out_hidden_size": HIDDEN,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "depth": 2,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_heads": HEADS,
        "out_hidden_size": HIDDEN,
        "deepstack_visual_indexes": [0],
    },
}
# The tower of LLaVA is a CLIP; its features are those of the last layer but one.
CLIP = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_attention_heads": HEADS, "num_hidden_layers": 3}
VISION |= {"llava": CLIP, "llava_next": CLIP}
STAND_INS = Path(__file__).with_name("phi3v")
# A head of Phi-3 keeps its width, because there is a factor of the position encoding for each half of it.
PHI3_HEAD = 96
COPIED = {".json", ".jinja", ".txt", ".model"}


def shrink(source: Path, out: Path, tower: Mapping[str, Any] | None = None) -> None:
    """Write the shrunk folder. ``tower`` overrides sizes of its vision tower, for images that take time to encode.

    Raises ``ValueError`` for a family it does not know, ``OSError`` without the files.
    """
    config = json.loads((source / "config.json").read_text())
    small = shrink_config(config)
    if tower:
        small["vision_config"].update(tower)
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.suffix in COPIED and file.name != "config.json":
            shutil.copyfile(file, out / file.name)
    (out / "config.json").write_text(json.dumps(small, indent=1) + "\n")
    if config["model_type"] == "phi3_v":
        add_stand_ins(out)


def add_stand_ins(out: Path) -> None:
    """Put two test-only modules where the published Phi-3-vision has remote code (``--trust-remote-code``)."""
    for file in STAND_INS.glob("*.py"):
        shutil.copyfile(file, out / file.name)
    path = out / "preprocessor_config.json"
    names = {"AutoProcessor": "Phi3VProcessor", "AutoImageProcessor": "Phi3VImageProcessor"}
    made = {"auto_map": {auto: f"processing_phi3_v.{name}" for auto, name in names.items()}}
    path.write_text(json.dumps(json.loads(path.read_text()) | made, indent=1) + "\n")


def shrink_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a ``config.json`` with the same ids and geometry and a small network."""
    family = config.get("model_type")
    if family == "phi3_v":
        return shrink_phi3(config)
    if family not in VISION:
        raise ValueError(f"model_type {family!r} is none of {', '.join(VISION)}, phi3_v")
    small: dict[str, Any] = json.loads(json.dumps(config))
    text = small.get("text_config", small)
    text.update(TEXT)
    if "head_dim" in text:
        text["head_dim"] = HIDDEN // HEADS
    # Layers beyond the shrunk network; two layers need no list of which use a window.
    text.pop("max_window_layers", None)
    shrink_rope(text)
    for part in (small, text):
        for name in ("torch_dtype", "dtype"):
            if name in part:
                part[name] = "float32"
    small["vision_config"].update(VISION[family])
    return small


def shrink_phi3(config: dict[str, Any]) -> dict[str, Any]:
    width = HEADS * PHI3_HEAD
    small = config | TEXT | {"hidden_size": width, "intermediate_size": 2 * width, "torch_dtype": "float32"}
    small["auto_map"] = {"AutoConfig": "configuration_phi3_v.Phi3VConfig"}
    # vLLM knows the tower's width; it builds no more layers than up to this one.
    small["img_processor"] = config["img_processor"] | {"layer_idx": 0}
    for name in ("_name_or_path", "_attn_implementation"):
        small.pop(name, None)
    return small


def shrink_rope(text: dict[str, Any]) -> None:
    """Divide half a head's width between time, height and width as the original does (it must add up exactly)."""
    scaling = text.get("rope_scaling")
    if not scaling or "mrope_section" not in scaling:
        return
    half, old = HIDDEN // HEADS // 2, scaling["mrope_section"]
    spatial = [part * half // sum(old) for part in old[1:]]
    scaling["mrope_section"] = [half - sum(spatial), *spatial]


def add_weights(folder: Path) -> None:
    """Write weights of the size that training begins with, the same in every run; the configuration stays as it is."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText  # type: ignore[import-not-found]

    torch.manual_seed(7)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        model.save_pretrained(made)
        Path(made, "model.safetensors").rename(folder / "model.safetensors")


def main() -> int:
    if len(sys.argv) != 3:
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    if sys.argv[1] == "--weights":
        add_weights(Path(sys.argv[2]))
        return 0
    try:
        shrink(Path(sys.argv[1]), Path(sys.argv[2]))
    except (OSError, ValueError) as error:
        print(f"cannot shrink {sys.argv[1]}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
