"""The tokenizers of examples/models, which demos, the simulator and the tests use.

They are trained on a text of this project. The other files of tiny-qwen2-vl are written by hand: the layout of Qwen2-VL
with two narrow layers, and the image geometry that Qwen2-VL publishes, so image token counts are the real ones. It has
no weights: a real vLLM serves it with ``--load-format dummy``. The same tokenizers release makes the same bytes.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCABULARY = 1024  # tokens learned from the text below, the 256 bytes among them
SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Their ids stand in each folder's config.json."""

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


def tokenizer_json() -> str:
    """Return a byte-level BPE tokenizer: what the text above teaches it, then the special tokens."""
    return _trained(Tokenizer(models.BPE()), VOCABULARY)


def byte_tokenizer_json() -> str:
    """Return a tokenizer with a token per byte, for tiny-qwen3.5.

    For that family transformers splits a text in a way of its own, whatever ``tokenizer.json`` says, and normalizes it;
    bytes are the same however a text is split.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    return _trained(tokenizer, len(pre_tokenizers.ByteLevel.alphabet()))


def _trained(tokenizer: Tokenizer, vocabulary: int) -> str:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return tokenizer.to_str(pretty=False) + "\n"
