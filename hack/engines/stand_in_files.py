"""Files of model folders of families whose own tokenizer is at hand nowhere (``hack/engines/unknown_families.py``).

Geometry and processors are those of the published models, the network is of a few layers. A tokenizer of Qwen3-VL
stands in, with the tokens added that the family puts around and into its images; so these folders prove how many tokens
images become, which, and where, but not the family's text.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from hack.engines.family_tokens import ids
from hack.engines.shrink_model import HEADS, HIDDEN, TEXT

PIXELS = {"do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True}
CODE = {
    "internvl_chat": ["configuration.py"],
    "nemotron_vl": ["configuration.py"],
    "nemotron_omni": ["configuration.py"],
    "kimi_k25": ["tokenization_kimi.py", "kimi_k25_processor.py"],
}
"""Family -> code of its folder, files of ``folder_code``."""
TEXTS = {**TEXT, "head_dim": HIDDEN // HEADS, "max_position_embeddings": 32_768, "vocab_size": 151_936}


def _config(architecture: str, model_type: str, text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "text_config": {**TEXTS, **text},
        "vision_config": {
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_attention_heads": HEADS,
            **vision,
        },
    }


def glm4v() -> dict[str, dict[str, Any]]:
    of = ids("glm4v")
    config = _config(
        "Glm4vForConditionalGeneration",
        "glm4v",
        {"model_type": "glm4v_text", "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        {"model_type": "glm4v", "depth": 2, "num_heads": HEADS, "out_hidden_size": HIDDEN, "image_size": 336},
    )
    names = {"image": "<|image|>", "video": "<|video|>"}
    config |= {f"{name}_token_id": of[token] for name, token in names.items()}
    config |= {
        f"{kind}_{side}_token_id": of[f"<|{word}_of_{kind}|>"]
        for kind in names
        for side, word in (("start", "begin"), ("end", "end"))
    }
    geometry = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    size = {"size": {"shortest_edge": 12_544, "longest_edge": 9_633_792}}
    return {
        "config": config,
        "preprocessor_config": {**PIXELS, **geometry, **size, "image_processor_type": "Glm4vImageProcessor"},
        "video_preprocessor_config": {**PIXELS, **geometry, **size, "video_processor_type": "Glm4vVideoProcessor"},
        "processor_config": {"processor_class": "Glm4vProcessor"},
    }


def internvl() -> dict[str, dict[str, Any]]:
    square = {"height": 448, "width": 448}
    config = _config(
        "InternVLForConditionalGeneration",
        "internvl",
        {"model_type": "qwen3", "num_hidden_layers": 2},
        {"model_type": "internvl_vision", "num_hidden_layers": 2, "image_size": [448, 448], "patch_size": [14, 14]},
    )
    return {
        "config": config | {"image_token_id": ids("internvl")["<IMG_CONTEXT>"], "image_seq_length": 256},
        "preprocessor_config": {
            **PIXELS,
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": square,
            "min_patches": 1,
            "max_patches": 12,
        },
        "video_preprocessor_config": {**PIXELS, "video_processor_type": "InternVLVideoProcessor", "size": square},
        "processor_config": {"processor_class": "InternVLProcessor", "image_seq_length": 256},
    }


def llama4() -> dict[str, dict[str, Any]]:
    of = ids("llama4")
    config = _config(
        "Llama4ForConditionalGeneration",
        "llama4",
        {"model_type": "llama4_text", "num_local_experts": 2, "intermediate_size_mlp": 2 * HIDDEN},
        {"model_type": "llama4_vision_model", "num_hidden_layers": 2, "image_size": 336, "patch_size": 14},
    )
    config |= {"boi_token_index": of["<|image_start|>"], "eoi_token_index": of["<|image_end|>"]}
    return {
        "config": config | {"image_token_index": of["<|patch|>"]},
        "preprocessor_config": {
            **PIXELS,
            "image_processor_type": "Llama4ImageProcessor",
            "size": {"height": 336, "width": 336},
            "max_patches": 16,
            "resize_to_max_canvas": False,
        },
        "processor_config": {"processor_class": "Llama4Processor", "patch_size": 14, "pixel_shuffle_ratio": 0.5},
    }


GLOBAL = {"global_head_dim": HIDDEN // HEADS, "num_global_key_value_heads": HEADS // 2, "attention_k_eq_v": True}
"""Full attention with half the bytes of a window, as in larger models, with blocks twice as long."""


def gemma4() -> dict[str, dict[str, Any]]:
    of, geometry = ids("gemma4"), {"patch_size": 16, "pooling_kernel_size": 3, "max_soft_tokens": 280}
    config = _config(
        "Gemma4ForConditionalGeneration",
        "gemma4",
        {"model_type": "gemma4_text", "sliding_window": 1024, **GLOBAL},
        {
            "model_type": "gemma4_vision",
            "num_hidden_layers": 2,
            "num_key_value_heads": HEADS,
            "head_dim": HIDDEN // HEADS,
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "default_output_length": 280,
        },
    )
    names = {"image": "<|image|>", "boi": "<|image>", "eoi": "<image|>", "audio": "<|audio|>", "video": "<|video|>"}
    config |= {f"{name}_token_id": of[token] for name, token in names.items()}
    return {
        "config": config
        | {"audio_config": {"model_type": "gemma4_audio", "hidden_size": HIDDEN, "num_hidden_layers": 2}},
        "preprocessor_config": {
            **PIXELS,
            **geometry,
            "image_processor_type": "Gemma4ImageProcessor",
            "feature_extractor_type": "Gemma4AudioFeatureExtractor",
        },
        "video_preprocessor_config": {
            **PIXELS,
            **(geometry | {"max_soft_tokens": 70}),
            "video_processor_type": "Gemma4VideoProcessor",
        },
        "processor_config": {"processor_class": "Gemma4Processor", "image_seq_length": 280},
    }


def minicpmv4_6() -> dict[str, dict[str, Any]]:
    layers = {"layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 4}
    layers |= {f"linear_{name}": 32 for name in ("key_head_dim", "value_head_dim")}
    layers |= {f"linear_{name}": HEADS for name in ("num_key_heads", "num_value_heads")}
    config = _config(
        "MiniCPMV4_6ForConditionalGeneration",
        "minicpmv4_6",
        {"model_type": "qwen3_5_text", "num_hidden_layers": 2, **layers},
        {"model_type": "minicpmv4_6_vision", "num_hidden_layers": 2, "image_size": 980, "patch_size": 14},
    )
    geometry = {"patch_size": 14, "scale_resolution": 448, "max_slice_nums": 9, "slice_mode": True}
    return {
        "config": config | {"image_token_id": 151_655, "video_token_id": 151_656},
        "preprocessor_config": {**PIXELS, **geometry, "image_processor_type": "MiniCPMV4_6ImageProcessor"},
        "video_preprocessor_config": {**PIXELS, **geometry, "video_processor_type": "MiniCPMV4_6VideoProcessor"},
        "processor_config": {"processor_class": "MiniCPMV4_6Processor"},
    }


def paddleocr_vl() -> dict[str, dict[str, Any]]:
    config = _config(
        "PaddleOCRVLForConditionalGeneration",
        "paddleocr_vl",
        {"model_type": "paddleocr_vl_text", "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        {"model_type": "paddleocr_vl_vision", "num_hidden_layers": 2, "image_size": 384, "patch_size": 14},
    )
    limits = {"min_pixels": 147_384, "max_pixels": 2_822_400}
    return {
        "config": config | {"image_token_id": ids("paddleocr_vl")["<|IMAGE_PLACEHOLDER|>"]},
        "preprocessor_config": {
            **PIXELS,
            **limits,
            "size": limits,
            "image_processor_type": "PaddleOCRVLImageProcessor",
            "patch_size": 14,
            "merge_size": 2,
            "temporal_patch_size": 1,
        },
        "processor_config": {"processor_class": "PaddleOCRVLProcessor"},
    }


def deepseek_ocr(architecture: str = "DeepseekOCRForCausalLM") -> dict[str, dict[str, Any]]:
    """Files under the names of DeepSeek-VL2, whose configuration and processor vLLM takes for both models of OCR."""
    text = {key: value for key, value in TEXTS.items() if key != "head_dim"}
    ranks = dict.fromkeys(("kv_lora_rank", "q_lora_rank")) | dict.fromkeys(
        ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 0
    )
    return {
        "config": {
            "architectures": [architecture],
            "model_type": "deepseek_vl_v2",
            "candidate_resolutions": [[1024, 1024]],
            "global_view_pos": "head",
            "tile_tag": "2D",
            "language_config": {**text, **ranks, "architectures": ["DeepseekV2ForCausalLM"], "use_mla": False},
            "projector_config": {"input_dim": 2048, "n_embed": HIDDEN, "projector_type": "linear"},
            "vision_config": {"image_size": 1024, "model_name": "deeplip_b_l", "model_type": "vision"},
        },
        "processor_config": {
            "processor_class": "DeepseekVLV2Processor",
            "candidate_resolutions": [[1024, 1024]],
            "downsample_ratio": 4,
            "image_token": "<image>",
            "normalize": True,
            "patch_size": 16,
        },
    }


def internvl_chat() -> dict[str, dict[str, Any]]:
    return {
        "config": {
            "architectures": ["InternVLChatModel"],
            "model_type": "internvl_chat",
            "auto_map": {"AutoConfig": "configuration.Config"},
            "llm_config": {**TEXTS, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
            "vision_config": {
                "hidden_size": HIDDEN,
                "intermediate_size": 2 * HIDDEN,
                "num_attention_heads": HEADS,
                "num_hidden_layers": 2,
                "qkv_bias": True,
                "qk_normalization": False,
                "norm_type": "layer_norm",
                "image_size": 448,
                "patch_size": 14,
                "model_type": "intern_vit_6b",
            },
            "downsample_ratio": 0.5,
            "dynamic_image_size": True,
            "use_thumbnail": True,
            "min_dynamic_patch": 1,
            "max_dynamic_patch": 12,
        }
    }


def nemotron_vl(name: str = "NemotronH_Nano_VL_V2") -> dict[str, dict[str, Any]]:
    states = {"ssm_state_size": 16, "mamba_head_dim": 16, "mamba_num_heads": 8}
    config = {
        "architectures": [name],
        "model_type": name,
        "auto_map": {"AutoConfig": "configuration.Config"},
        "llm_config": {**TEXTS, **states, "model_type": "nemotron_h", "hybrid_override_pattern": "M-*"},
        "vision_config": {"args": {"model": "vit_huge_patch16_224"}, "model_type": "radio"},
        "force_image_size": 512,
        "patch_size": 16,
        "downsample_ratio": 0.5,
        "use_thumbnail": True,
        "norm_mean": [0.48145466, 0.4578275, 0.40821073],
        "norm_std": [0.26862954, 0.26130258, 0.27577711],
    }
    return {"config": config}


def nemotron_omni() -> dict[str, dict[str, Any]]:
    config = nemotron_vl("NemotronH_Nano_Omni_Reasoning_V3")["config"] | {"use_thumbnail": False}
    config["vision_config"]["args"] |= {"min_num_patches": 1024, "max_num_patches": 13_312}
    config["sound_config"] = {
        "model_type": "parakeet",
        "num_mel_bins": 128,
        "sampling_rate": 16_000,
        "subsampling_factor": 8,
        "subsampling_conv_kernel_size": 3,
        "subsampling_conv_stride": 2,
    }
    return {"config": config}


def kimi_k25() -> dict[str, dict[str, Any]]:
    config = _config(
        "KimiK25ForConditionalGeneration",
        "kimi_k25",
        {"model_type": "kimi_k2", "num_hidden_layers": 2},
        {"num_hidden_layers": 2, "patch_size": 14, "merge_kernel_size": [2, 2]},
    )
    geometry = {
        "patch_size": 14,
        "merge_kernel_size": 2,
        "in_patch_limit": 16_384,
        "patch_limit_on_one_side": 512,
        "fixed_output_tokens": None,
        "in_patch_limit_each_frame": 4096,
        "in_patch_limit_video": None,
        "temporal_merge_kernel_size": 4,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    return {
        "config": config
        | {"use_unified_vision_chunk": True, "video_placeholder": "<|kimi_k25_video_placeholder|>"}
        | {"media_placeholder_token_id": ids("kimi_k25")["<|media_pad|>"]},
        "preprocessor_config": {
            "media_proc_cfg": geometry,
            "auto_map": {
                "AutoImageProcessor": "kimi_k25_processor.KimiK25VisionProcessor",
                "AutoProcessor": "kimi_k25_processor.KimiK25Processor",
            },
        },
    }


def qwen3_omni_moe() -> dict[str, dict[str, Any]]:
    geometry = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    size = {"min_pixels": 3136, "max_pixels": 12_845_056}
    thinker = _config(
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        "qwen3_omni_moe_thinker",
        {
            "model_type": "qwen3_omni_moe_text",
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": HIDDEN,
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [2, 3, 3]},
        },
        {
            "model_type": "qwen3_omni_moe_vision_encoder",
            "depth": 2,
            "num_heads": HEADS,
            "out_hidden_size": HIDDEN,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "deepstack_visual_indexes": [],
        },
    )
    audio = {"model_type": "qwen3_omni_moe_audio_encoder", "encoder_layers": 2, "d_model": HIDDEN, "output_dim": HIDDEN}
    numbers = {"image": 151_655, "video": 151_656, "vision_start": 151_652, "vision_end": 151_653}
    numbers |= {name: ids("qwen3_omni_moe")[f"<|{name}|>"] for name in ("audio_start", "audio_end")}
    numbers |= {"audio": ids("qwen3_omni_moe")["<|audio_pad|>"]}
    thinker |= {"audio_config": audio, **{f"{name}_token_id": number for name, number in numbers.items()}}
    return {
        "config": {
            "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
            "model_type": "qwen3_omni_moe",
            "enable_audio_output": False,
            "thinker_config": thinker,
        },
        "preprocessor_config": {
            **PIXELS,
            **geometry,
            **size,
            "image_processor_type": "Qwen2VLImageProcessor",
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": 128,
            "sampling_rate": 16_000,
            "chunk_length": 300,
            "processor_class": "Qwen3OmniMoeProcessor",
        },
        "video_preprocessor_config": {**PIXELS, **geometry, **size, "video_processor_type": "Qwen2VLVideoProcessor"},
    }


def llava_onevision() -> dict[str, dict[str, Any]]:
    of, tiles = ids("llava_onevision"), {"image_grid_pinpoints": [[384, 384], [384, 768], [768, 384], [768, 768]]}
    config = _config(
        "LlavaOnevisionForConditionalGeneration",
        "llava_onevision",
        {"model_type": "qwen2", "num_hidden_layers": 2},
        {"model_type": "siglip_vision_model", "num_hidden_layers": 2, "image_size": 384, "patch_size": 14},
    )
    config |= {"image_token_index": of["<image>"], "video_token_index": of["<video>"], **tiles}
    square = {"size": {"height": 384, "width": 384}}
    return {
        "config": config,
        "preprocessor_config": {**PIXELS, **square, **tiles, "image_processor_type": "LlavaOnevisionImageProcessor"},
        "video_preprocessor_config": {**PIXELS, **square, "video_processor_type": "LlavaOnevisionVideoProcessor"},
        "processor_config": {
            "processor_class": "LlavaOnevisionProcessor",
            "num_image_tokens": 729,
            "vision_feature_select_strategy": "full",
        },
    }


def idefics3() -> dict[str, dict[str, Any]]:
    config = _config(
        "Idefics3ForConditionalGeneration",
        "idefics3",
        {"model_type": "llama", "num_hidden_layers": 2},
        {"model_type": "idefics3_vision", "num_hidden_layers": 2, "image_size": 364, "patch_size": 14},
    )
    return {
        "config": config | {"image_token_id": ids("idefics3")["<image>"], "scale_factor": 2, "pad_token_id": 151_643},
        "preprocessor_config": {
            **PIXELS,
            "image_processor_type": "Idefics3ImageProcessor",
            "do_image_splitting": True,
            "do_pad": True,
            "size": {"longest_edge": 728},
            "max_image_size": {"longest_edge": 364},
        },
        "processor_config": {"processor_class": "Idefics3Processor", "image_seq_len": 169},
    }


FILES: dict[str, Callable[[], dict[str, dict[str, Any]]]] = {
    "glm4v": glm4v,
    "internvl": internvl,
    "llama4": llama4,
    "gemma4": gemma4,
    "minicpmv4_6": minicpmv4_6,
    "paddleocr_vl": paddleocr_vl,
    "deepseek_ocr": deepseek_ocr,
    "deepseek_ocr2": partial(deepseek_ocr, "DeepseekOCR2ForCausalLM"),
    "internvl_chat": internvl_chat,
    "nemotron_vl": nemotron_vl,
    "nemotron_omni": nemotron_omni,
    "kimi_k25": kimi_k25,
    "qwen3_omni_moe": qwen3_omni_moe,
    "llava_onevision": llava_onevision,
    "idefics3": idefics3,
}
