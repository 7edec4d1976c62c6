"""Make the tiny Qwen2-VL folder that the demo, the simulator and the tests use.

    python examples/models/make_tiny.py [FOLDER]

The folder (default: ``tiny-qwen2-vl`` beside this script) has no weights: a real vLLM serves it with ``--load-format
dummy``, a network of two narrow layers. Tokenizer, template and text are this project's own; the image geometry is the
one that Qwen2-VL publishes, so image token counts are the real ones. The same tokenizers release makes the same bytes.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 1024  # tokens learned from the text below, the 256 bytes among them
CONTEXT = 32768
END, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
SPECIALS = (END, TURN_START, TURN_END, VISION_START, VISION_END, IMAGE, VIDEO)

TEXT = """
A router stands in front of several copies of one model. Every copy keeps the blocks that it has computed, and a
request that begins like an earlier one can take them over. The router knows which copy keeps which blocks, because
every copy tells it, and it sends the request to the copy where most of the work is already done.

What is in this picture? Describe the image in one sentence. Please describe what you see, and name the colours in
the image. How many people are in the photo? Where was the photograph taken? Compare the first picture and the
second picture. Which of the two images is brighter? What has changed between them? Read the text on the sign. Is
there a dog or a cat in the image? Answer with yes or no. Explain the chart step by step. What does the curve show
after the third quarter? Count the bicycles that lean against the wall.

The picture shows a small harbour in the evening. Three boats lie at the pier, a red one, a white one and a green
one. An old man mends a net and a child watches him. Behind the houses the mountains are blue, and there is snow on
the highest of them. The second picture shows the same harbour in the morning: the green boat has left, and the
water is grey.

You are a helpful assistant. You answer briefly and say so when you do not know. The user asks a question about an
image, and the assistant looks at it closely before it answers. When a tool is needed, call the tool with its
arguments and wait for the result. Never guess a number that you can look up.

On Monday it rained until noon. On Tuesday the wind came from the west, and by Wednesday the roads were dry again.
The train leaves at 7:45, 9:15 and 11:30; the last one at 22:05. A ticket costs 3.20, a day ticket 8.50, and
children under 6 travel free. In 2019 there were 1,284 passengers a day, in 2024 there were 2,967.

To make bread you need flour, water, salt and time. Mix 500 grams of flour with 350 grams of water, let it rest for
half an hour, add 10 grams of salt and fold the dough four times. Leave it in a cool place over night. Bake it in a
hot oven for forty minutes, the first fifteen of them with steam.

def overlap(prompt, cache):
    count = 0
    for key in prompt:
        if key not in cache:
            break
        count += 1
    return count

{"name": "weather", "description": "The weather of a town", "parameters": {"type": "object", "properties": {"town":
{"type": "string"}, "day": {"type": "string"}}, "required": ["town"]}}
{"name": "weather", "arguments": {"town": "Bergen", "day": "tomorrow"}}

Ein Bild sagt mehr als tausend Worte. Was ist auf dem Bild zu sehen? Bitte beschreibe das Foto in einem Satz.
Que voit-on sur cette image ? Décris la photo en une phrase, s'il te plaît.
¿Qué hay en esta imagen? Describe la foto en una frase, por favor.

Blocks of sixteen tokens fill a page of memory. A block is complete or it does not exist, so the end of a prompt
that fills no block is computed again every time. Two images that lie next to each other are two runs of
placeholders with some text between them; swap the images, and every block from the first of them on is another
block. The same image under another address is the same image, and another image under the same address is another
one.
"""

TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\nThese tools can be called. A call is one JSON object with name and arguments '
        ~ 'between <call> and </call>.\\n' }}
    {%- for tool in tools %}
        {{- (tool.function if tool.function is defined else tool) | tojson ~ '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for document in documents or [] %}
    {{- '<|im_start|>system\\n' ~ document.title ~ ':\\n' ~ document.text ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant', 'tool') %}
        {{- raise_exception('unknown role ' ~ message.role) }}
    {%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part.type == 'video' %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- else %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<call>' ~ {'name': call.function.name, 'arguments': call.function.arguments} | tojson ~ '</call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

ABOUT = """\
# tiny-qwen2-vl

Made by `make_tiny.py` beside this folder; edit the script, not the files.
It has no weights: serve it with `--load-format dummy`.
"""


def train() -> Tokenizer:
    """Return a byte-level BPE tokenizer: what the text above teaches it, then the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return tokenizer


def config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return config.json: Qwen2-VL's layout, 2 layers of width 64 and a vocabulary rounded up to a multiple of 64."""
    return {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "torch_dtype": "float32",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        # Sections of half a head (32 / 2): time, height, width.
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "vocab_size": -(-tokenizer.get_vocab_size() // 64) * 64,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "pad_token_id": tokenizer.token_to_id(END),
        "image_token_id": tokenizer.token_to_id(IMAGE),
        "video_token_id": tokenizer.token_to_id(VIDEO),
        "vision_start_token_id": tokenizer.token_to_id(VISION_START),
        "vision_end_token_id": tokenizer.token_to_id(VISION_END),
        "vision_config": {
            "model_type": "qwen2_vl_vision",
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": 64,
            "num_heads": 2,
            "mlp_ratio": 2,
            "in_channels": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }


def processor(kind: str, name: str) -> dict[str, Any]:
    """Return the settings of the image or the video processor: the geometry that Qwen2-VL publishes."""
    return {
        f"{kind}_processor_type": name,
        "processor_class": "Qwen2VLProcessor",
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.25, 0.25, 0.25],
    }


def write(folder: Path) -> None:
    """Write the whole folder, replacing files of the same names."""
    tokenizer = train()
    files = {
        "config.json": config(tokenizer),
        "generation_config.json": {"do_sample": False, "eos_token_id": tokenizer.token_to_id(TURN_END)},
        "preprocessor_config.json": processor("image", "Qwen2VLImageProcessor"),
        "video_preprocessor_config.json": processor("video", "Qwen2VLVideoProcessor"),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "processor_class": "Qwen2VLProcessor",
            "model_max_length": CONTEXT,
            "eos_token": TURN_END,
            "pad_token": END,
            "clean_up_tokenization_spaces": False,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=False) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    (folder / "README.md").write_text(ABOUT, encoding="utf-8")


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "tiny-qwen2-vl"
    write(target)
    print(f"made {target}")
