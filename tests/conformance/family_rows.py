"""The table of families of docs/conformance.md: how exactly each is predicted on each engine, by the library itself."""

from collections.abc import Iterator

from conformance.setups import ENGINES

from mmrouter_lib import families

GROUPS: dict[str, tuple[str, ...]] = {
    "Qwen2-VL, Qwen2.5-VL, Qwen3-VL": ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"),
    "Qwen3-VL MoE": ("qwen3_vl_moe",),
    "Qwen3.5, Qwen3.6": ("qwen3_5", "qwen3_5_moe"),
    "Gemma 4": ("gemma4",),
    "Gemma 3": ("gemma3",),
    "Mistral 3": ("mistral3",),
    "GLM-4.1V, 4.5V, 4.6V, GLM-OCR": ("glm4v", "glm4v_moe", "glm_ocr"),
    "InternVL 3, 3.5 (`-hf`)": ("internvl",),
    "Llama 4": ("llama4",),
    "MiniCPM-V 4.6": ("minicpmv4_6",),
    "LLaVA-1.5, Pixtral": ("llava",),
    "LLaVA-NeXT": ("llava_next",),
    "LLaVA of its authors": ("LlavaLlamaForCausalLM",),
    "Phi-3-vision, Phi-3.5-vision": ("phi3_v",),
}
"""Families as they are called -> their names in the library (``model_type`` or architecture), those in use first."""
BOUNDED = {
    "Gemma 4": "bounded: no overlap is promised, because groups have blocks of different sizes",
    "Llama 4": "bounded: its layers attend in chunks",
}
"""Families of which an engine's events do not tell all that it hits."""
NOT_SERVED = {("LLaVA of its authors", "vllm"), ("Phi-3-vision, Phi-3.5-vision", "sglang")}
FRONT_END = "vLLM's front end"
STAND_IN = f"{FRONT_END}, with a stand-in tokenizer"
PROOFS = {
    "Qwen3-VL MoE": "the configuration of Qwen3-VL",
    "Qwen3.5, Qwen3.6": STAND_IN,
    "Gemma 3": "real engines, once beside a renderer",
    "Mistral 3": f"{FRONT_END}, with Pixtral's tokenizer",
    "MiniCPM-V 4.6": STAND_IN,
    "InternVL 3, 3.5 (`-hf`)": STAND_IN,
    "GLM-4.1V, 4.5V, 4.6V, GLM-OCR": f"{STAND_IN}, on GLM-4.1V",
    "Llama 4": STAND_IN,
    "Gemma 4": STAND_IN,
    "LLaVA-1.5, Pixtral": f"real engines; Pixtral: {FRONT_END}",
}
"""What images were compared with, where it was not real engines with the family's own tokenizer."""


def family_rows() -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"| family | `model_type` | {' | '.join(ENGINES.values())} | images compared with |"
    yield "|" + "---|" * (3 + len(ENGINES))
    for shown, names in GROUPS.items():
        types = ", ".join(f"`{name}`" for name in names)
        exactness = " | ".join(_exactness(shown, names, engine) for engine in ENGINES)
        yield f"| {shown} | {types} | {exactness} | {PROOFS.get(shown, 'real engines')} |"
    yield "| text-only models | any | exact | exact | - |"
    yield "| other vision models | any | texts exact; all exact with a renderer | affinity | - |"


def _exactness(shown: str, names: tuple[str, ...], engine: str) -> str:
    if (shown, engine) in NOT_SERVED:
        return "not served"
    proved = [families.is_proved(name, engine) for name in names]
    if all(proved):
        return BOUNDED.get(shown, "exact")
    assert not any(proved), f"{shown} is to be split: {engine} has some of {names}"
    return "texts exact" if engine == "vllm" else "affinity"
