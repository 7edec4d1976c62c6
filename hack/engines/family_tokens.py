"""Tokens and templates of families whose own tokenizer is at hand nowhere (``stand_in_files.py``).

They are added to a tokenizer of Qwen3-VL, which stands in for each family's own.
"""

FIRST_ID = 151_669
"""Of the added tokens: Qwen3-VL's tokenizer ends before it."""
TOKENS = {
    "glm4v": [
        "<|image|>",
        "<|video|>",
        *(f"<|{side}_of_{kind}|>" for kind in ("image", "video") for side in ("begin", "end")),
    ],
    "internvl": ["<IMG_CONTEXT>", "<img>", "</img>", "<video>"],
    "internvl_chat": ["<IMG_CONTEXT>", "<img>", "</img>"],
    "llama4": [
        f"<|{name}|>" for name in ("image", "patch", "image_start", "image_end", "tile_x_separator", "tile_y_separator")
    ],
    "gemma4": ["<|image|>", "<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>", "<|video|>"],
    "minicpmv4_6": ["<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>"],
    "paddleocr_vl": ["<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>"],
    "deepseek_ocr": ["<image>", "<|ref|>", "<|/ref|>", "<|grounding|>"],
    "deepseek_ocr2": ["<image>", "<|ref|>", "<|/ref|>", "<|grounding|>"],
    "nemotron_vl": ["<image>", "<img>", "</img>", "<video>"],
    "nemotron_omni": ["<image>", "<img>", "</img>", "<video>", "<so_embedding>", "<so_start>", "<so_end>"],
    "kimi_k25": [f"<|media_{name}|>" for name in ("begin", "content", "pad", "end")],
    "qwen3_omni_moe": ["<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"],
    "llava_onevision": ["<image>", "<video>"],
    "idefics3": [
        *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
        *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    ],
}
"""Family -> tokens that are added, in the order of their ids."""
NAMED: dict[str, dict[str, str]] = {
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
    "gemma4": {
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
    },
    "minicpmv4_6": {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "image_start_token": "<image>",
        "image_end_token": "</image>",
        "slice_start_token": "<slice>",
        "slice_end_token": "</slice>",
        "image_id_start_token": "<image_id>",
        "image_id_end_token": "</image_id>",
    },
    "paddleocr_vl": {"image_token": "<|IMAGE_PLACEHOLDER|>"},
    "qwen3_omni_moe": {
        "image_token": "<|image_pad|>",
        "audio_token": "<|audio_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
    },
}
"""Family -> names under which its processor finds tokens at the tokenizer."""
IMAGES = {
    "glm4v": "<|begin_of_image|><|image|><|end_of_image|>",
    "internvl": "<IMG_CONTEXT>\\n",
    "internvl_chat": "<image>",
    "llama4": "<|image|>",
    "gemma4": "\\n\\n<|image|>\\n\\n",
    "minicpmv4_6": "<|image_pad|>\\n",
    "paddleocr_vl": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    "nemotron_vl": "<image>\\n",
    "nemotron_omni": "<image>\\n",
    "kimi_k25": "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
    "qwen3_omni_moe": "<|vision_start|><|image_pad|><|vision_end|>",
    "llava_onevision": "<image>\\n",
    "idefics3": "<image>",
}
"""Family -> what its chat template writes for an image. The others are published without a template."""
AUDIO = {
    "gemma4": "<|audio|>",
    "qwen3_omni_moe": "<|audio_start|><|audio_pad|><|audio_end|>",
    "nemotron_omni": "<so_embedding>\\n",
}
"""Family -> what its chat template writes for audio."""
AROUND = {
    "kimi_k25": (
        "{%- if tools_ts_str %}{{- tools_ts_str }}{%- elif tools %}{{- tools | tojson }}{%- endif %}",
        "{%- if add_generation_prompt and thinking %}{{- '<think>' }}{%- endif %}",
    )
}
"""Family -> what stands before and behind its template: of Kimi, variables that its tokenizer's code sets."""
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'text' %}{{- part.text }}{%- elif part.type == 'audio' %}{{- 'AUDIO' }}"
    "{%- else %}{{- 'IMAGE' }}{%- endif %}"
    "{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def ids(family: str) -> dict[str, int]:
    """Return the added tokens of a family with their ids."""
    return {token: FIRST_ID + number for number, token in enumerate(TOKENS[family])}
