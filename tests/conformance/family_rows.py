"""The table of families of docs/conformance.md: how exactly each is predicted on each engine, by the library itself."""

from collections.abc import Iterator, Mapping
from typing import Any

from conformance.releases import PASSED, Row, line, read
from conformance.setups import ENGINES
from packaging.version import Version

from mmrouter_lib import families

GROUPS: dict[str, tuple[str, ...]] = {
    "Qwen3.5, Qwen3.6": ("qwen3_5", "qwen3_5_moe"),
    "Qwen2-VL, Qwen2.5-VL, Qwen3-VL": ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"),
    "Qwen3-VL MoE": ("qwen3_vl_moe",),
    "Gemma 4": ("gemma4",),
    "Gemma 3": ("gemma3",),
    "Mistral 3": ("mistral3",),
    "GLM-4.1V, 4.5V, 4.6V, GLM-OCR": ("glm4v", "glm4v_moe", "glm_ocr"),
    "InternVL 3, 3.5 (`-hf`)": ("internvl",),
    "InternVL 3, 3.5 of its authors": ("internvl_chat",),
    "Llama 4": ("llama4",),
    "MiniCPM-V 4.6": ("minicpmv4_6",),
    "PaddleOCR-VL": ("paddleocr_vl",),
    "DeepSeek-OCR, DeepSeek-OCR-2": ("DeepseekOCRForCausalLM", "DeepseekOCR2ForCausalLM"),
    "Nemotron Nano VL v2": ("NemotronH_Nano_VL_V2",),
    "Nemotron 3 Omni": tuple(f"NemotronH_{size}Omni_Reasoning_V3" for size in ("Nano_", "Super_", "")),
    "Kimi K2.5, K2.6": ("kimi_k25",),
    "Qwen3-Omni": ("qwen3_omni_moe",),
    "LLaVA-1.5, Pixtral": ("llava",),
    "LLaVA-NeXT": ("llava_next",),
    "LLaVA of its authors": ("LlavaLlamaForCausalLM",),
    "Phi-3-vision, Phi-3.5-vision": ("phi3_v",),
}
"""Families as they are called -> their names in the library (``model_type`` or architecture), those in use first."""
BOUNDED = {
    ("Gemma 4", "sglang"): "bounded: no overlap is promised, because evictions from its windows are in no event",
    ("Qwen3.5, Qwen3.6", "sglang"): "bounded: no overlap is promised, because its states are in no event",
}
"""Families of which an engine's events do not tell all that it hits."""
NOT_SERVED = {("LLaVA of its authors", "vllm"), ("Phi-3-vision, Phi-3.5-vision", "sglang")}
FRONT_END = "vLLM's front end"
STAND_IN = f"{FRONT_END}, with a stand-in tokenizer"
PROOFS = {
    "Qwen3-VL MoE": "vLLM: the configuration of Qwen3-VL; SGLang's image processor",
    "Qwen3.5, Qwen3.6": f"{STAND_IN}; SGLang's image processor",
    "Gemma 3": "real engines, on vLLM once beside a renderer",
    "Mistral 3": f"{FRONT_END}, with Pixtral's tokenizer, and a real SGLang with the same",
    "MiniCPM-V 4.6": STAND_IN,
    "PaddleOCR-VL": f"{STAND_IN}, and a real SGLang with the same",
    "DeepSeek-OCR, DeepSeek-OCR-2": STAND_IN,
    "Nemotron Nano VL v2": STAND_IN,
    "Nemotron 3 Omni": STAND_IN,
    "Kimi K2.5, K2.6": f"{STAND_IN}; SGLang's image processor, with a stand-in for the folder's",
    "InternVL 3, 3.5 (`-hf`)": STAND_IN,
    "InternVL 3, 3.5 of its authors": f"{STAND_IN}, and a real SGLang with the same",
    "GLM-4.1V, 4.5V, 4.6V, GLM-OCR": f"GLM-4.1V alone: {STAND_IN}, and a real SGLang with the same",
    "Llama 4": STAND_IN,
    "Gemma 4": f"{STAND_IN}; SGLang's image processor with the same",
    "Qwen3-Omni": f"{STAND_IN}; SGLang's image processor",
    "LLaVA-1.5, Pixtral": f"real engines; Pixtral: {FRONT_END}",
}
"""What images were compared with, where it was not real engines with the family's own tokenizer."""
TEXT_ONLY = "text-only models (Qwen3, Llama 3, Mistral, DeepSeek-V3 and others)"
EXCEPT = "[but for some](text-models.md#models-without-a-family-here)"
HARMONY, MISTRAL = "gpt-oss", "Mistral's format (`tekken.json`)"
WITHOUT_FAMILY = {
    TEXT_ONLY: ("any", f"exact, {EXCEPT}", f"exact, {EXCEPT}", "-"),
    HARMONY: (
        "`gpt_oss`",
        "exact with the extra [`harmony`](text-models.md#gpt-oss)",
        "bounded: no overlap is promised, because evictions from its windows are in no event",
        "-",
    ),
    MISTRAL: (
        "any",
        "exact with the extra [`mistral`](text-models.md#mistrals-own-tokenizer)",
        "exact with the same extra, from 0.5.21 on: texts, and images of Mistral 3",
        f"{FRONT_END}, with Pixtral's tokenizer, and a real SGLang with the same",
    ),
}
"""Models whose prompts do not depend on a family of the library: ``model_type``, vLLM, SGLang, images compared with."""
CHECKS = {
    "prompts of text models": TEXT_ONLY,
    "prompts of SentencePiece models": TEXT_ONLY,
    "prompts in the Harmony format": HARMONY,
    "responses in the Harmony format": HARMONY,
    "prompts of Mistral's tokenizers": MISTRAL,
    "images in Mistral's format": MISTRAL,
    "responses by Mistral's tokenizers": MISTRAL,
    "prompts of Kimi K2.5": "Kimi K2.5, K2.6",
}
"""Check of a release -> the models that it is about, where it is not about the family of its case."""
CASES: dict[str | tuple[str, str], str] = {
    "pixtral": "llava",
    "deepseek_ocr": "DeepseekOCRForCausalLM",
    "deepseek_ocr2": "DeepseekOCR2ForCausalLM",
    ("sglang", "llava"): "LlavaLlamaForCausalLM",
    "nemotron_vl": "NemotronH_Nano_VL_V2",
    "nemotron_omni": "NemotronH_Nano_Omni_Reasoning_V3",
}
"""Case of a release's row, also beside its engine -> the family whose prompts it has, where that is not the case."""
COMPARED = ("prompts", "equal", "conversations")
AFFINITY = ("by affinity",)
"""Figures of a release's rows: equal prompts, and those that are not predicted there."""


def family_rows() -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"| family | `model_type` | {' | '.join(ENGINES.values())} | images compared with |"
    yield "|" + "---|" * (3 + len(ENGINES))
    yield from (line(shown, *cells) for shown, cells in WITHOUT_FAMILY.items())
    for shown, names in GROUPS.items():
        types = ", ".join(f"`{name}`" for name in names)
        exactness = " | ".join(_exactness(shown, names, engine) for engine in ENGINES)
        yield f"| {shown} | {types} | {exactness} | {PROOFS.get(shown, 'real engines')} |"
    yield f"| other vision models | any | texts exact, {EXCEPT}; all exact with a renderer | affinity | - |"


def _exactness(shown: str, names: tuple[str, ...], engine: str) -> str:
    if (shown, engine) in NOT_SERVED:
        return "not served"
    proved = [families.is_proved(name, engine) for name in names]
    if all(proved):
        return BOUNDED.get((shown, engine), "exact")
    assert not any(proved), f"{shown} is to be split: {engine} has some of {names}"
    return "texts exact" if engine == "vllm" else "affinity"


def release_tables(releases: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a table per engine: how exact the prompts of each family were on each release, and how many were compared.
    ``releases``: as in :func:`conformance.releases.tables`.
    """
    for engine, found in releases.items():
        order = sorted(found, key=Version)
        yield from ("", line("family", *(f"{ENGINES[engine]} {release}" for release in order)))
        yield "|" + "---|" * (1 + len(order))
        of_rows: dict[str, dict[str, list[Row]]] = {}
        for release in order:
            for row in read(found[release]):
                if "prompts" in row.check or row.check in ("front end", *CHECKS):
                    of_rows.setdefault(_family(engine, row), {}).setdefault(release, []).append(row)
        for shown in (*WITHOUT_FAMILY, *GROUPS):
            if shown in of_rows:
                yield line(shown, *(_weakest(shown, engine, of_rows[shown].get(release, [])) for release in order))


def _family(engine: str, row: Row) -> str:
    if row.check in CHECKS:
        return CHECKS[row.check]
    case, _, _ = row.case.partition("-")
    name = CASES.get((engine, case)) or CASES.get(case, case)
    return next(shown for shown, names in GROUPS.items() if name in names)


def _weakest(shown: str, engine: str, rows: list[Row]) -> str:
    """Return the result of the weakest row, without the reason that the row has."""
    wrong = sorted(row.result.partition(":")[0] for row in rows if row.result != PASSED)
    if wrong or not rows:
        return wrong[0] if wrong else "-"
    equal, affinity = (
        sum(row.figures.get(name, 0) for row in rows for name in names) for names in (COMPARED, AFFINITY)
    )
    others = f", {affinity} by affinity" * bool(affinity)
    return f"{BOUNDED.get((shown, engine), 'exact').partition(':')[0]}: {equal}{others}"
