"""The tokenizer that transformers 5.19 makes of a model folder: tokenizer.json as it is, or a class's own parts around
the vocabulary of it.

Which of the two it is depends on the class that tokenizer_config.json declares and on the ``model_type``. The rules are
compared with the real library by ``tests/conformance/test_text_models.py``.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from blake3 import blake3
from tokenizers import Tokenizer

AS_FILE: Final = "TokenizersBackend"
"""The class that takes tokenizer.json as it is."""
_BASE_CLASSES = frozenset({"PreTrainedTokenizer", "PythonBackend", AS_FILE})

FORCED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp"), "Qwen3_5Tokenizer"),
    "hyperclovax_vision_v2": "GPT2Tokenizer",
    "qwen2": "Qwen2Tokenizer",
}
"""``model_type`` -> class whatever is declared."""

_TAKE_FILE: Final = frozenset(
    " ".join(
        (
            "EvollaModel arctic aria bigbird_pegasus camembertv2-base canary chameleon chatlm cohere_asr deepseek_ocr",
            "deepseek_ocr2 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 deepseek_vl deepseek_vl_hybrid",
            "deepseek_vl_v2 ernie4_5 ernie4_5_moe flex_olmo fuyu glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe",
            "glm_image glmasr got_ocr2 gpt_bigcode granite granitemoe granitemoehybrid granitemoeshared h2ovl_chat",
            "hyperclovax hyperclovax_vlm internlm2 jamba janus kimi_k25 kimi_linear kosmos-2 llava llava_next",
            "mimo_v2_flash minicpm3 minicpmv minicpmv4_6 minicpmv4_7 minimax_m2 ministral ministral3 mistral mistral3",
            "mixtral modernbert modernbert-decoder molmo molmo2 nemotron nvfp4 nystromformer olmo2 olmo3 olmo_hybrid",
            "opencua openvla paddleocr_vl pegasus_x persimmon phi3 phi3_v phimoe pix2struct pixtral smolvlm stablelm",
            "step3_vl step3p5 step3p7 umt5 unlimited-ocr unlimited_ocr vipllava voxtral voxtral_realtime",
            "xlm-roberta-xl",
        )
    ).split()
)
"""``model_type``s whose tokenizer.json is taken as it is, whatever class is declared: three by vLLM 0.32 alone."""

_OWN_PARTS: Final[Mapping[str, str]] = {
    "Qwen2Tokenizer": "10112c177db5b6be609bca5ae9b6f3e8",
    "Qwen3_5Tokenizer": "9bf5a914cc50590c54a38b64d24d581a",
    "GemmaTokenizer": "ebd37c67c628c8a14ac2b25cc1ae4aff",
}
"""Class -> digest of the parts that it puts around the vocabulary. Published files have the same parts."""


class TokenizerClassError(ValueError):
    """The engine's tokenizer is not modelled; the message is a short name of what it is."""


def tokenizer_class(model_type: str, declared: object) -> str:
    """Return the class that transformers chooses. Raises :class:`TokenizerClassError` where none is declared."""
    if model_type in FORCED:
        return FORCED[model_type]
    return AS_FILE if model_type in _TAKE_FILE else declared_class(declared)


def declared_class(declared: object) -> str:
    """Return the class that a declaration names. Raises :class:`TokenizerClassError` for none."""
    if not isinstance(declared, str):
        raise TokenizerClassError("no_class")
    name = declared.removesuffix("Fast")
    return AS_FILE if name in _BASE_CLASSES else name


def as_class(tokenizer: Tokenizer, name: str, config: Mapping[str, Any]) -> Tokenizer:
    """Return a tokenizer as a class has it. ``config``: tokenizer_config.json.

    Raises :class:`TokenizerClassError` for a class that is not modelled.
    """
    if name == AS_FILE:
        return tokenizer
    if name == "LlamaTokenizer":
        return _llama(tokenizer, config)
    if (
        name in _OWN_PARTS
        and config.get("add_prefix_space") in (None, False)
        and _digest(tokenizer) == _OWN_PARTS[name]
    ):
        return tokenizer
    raise TokenizerClassError(name)


def _llama(tokenizer: Tokenizer, config: Mapping[str, Any]) -> Tokenizer:
    """A text gets a blank at its beginning only, not behind a special token, whatever tokenizer.json says."""
    parts = json.loads(tokenizer.to_str())
    first = "always" if config.get("legacy") else "first"
    blank = config.get("add_prefix_space") in (None, True)
    parts["normalizer"] = None
    parts["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": first if blank else "never",
        "split": False,
    }
    parts["model"] |= {"unk_token": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False}
    made = Tokenizer.from_str(json.dumps(parts))
    made.encode_special_tokens = tokenizer.encode_special_tokens
    return made


def _digest(tokenizer: Tokenizer) -> str:
    """Return the digest of all parts but vocabulary, added tokens and what is put around a text."""
    parts = json.loads(tokenizer.to_str())
    model = {key: value for key, value in parts["model"].items() if key not in ("vocab", "merges")}
    model = {key: value or None for key, value in model.items()}  # false, empty and absent are the same
    kept = [_trimmed(parts["normalizer"]), _trimmed(parts["pre_tokenizer"]), _trimmed(model)]
    return blake3(json.dumps(kept, sort_keys=True).encode()).hexdigest(length=16)


def _trimmed(value: Any) -> Any:
    """Return settings without those that change no id: ``trim_offsets``, and absent ones."""
    if isinstance(value, dict):
        return {key: _trimmed(item) for key, item in value.items() if key != "trim_offsets" and item is not None}
    return [_trimmed(item) for item in value] if isinstance(value, list) else value
