"""What is sent and when: conversations drawn from a load's numbers, and their request bodies. Pure.

A conversation is a system prompt (one of a few), turns, and in a share of them a picture in the first turn, which later
turns repeat as clients do. Answers within a conversation are drawn words instead of the endpoint's, so the prompts of
two runs are equal whatever the endpoints answer. Equal loads give equal conversations; equal salts give equal bytes.
"""

import base64
import functools
import io
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
from PIL import Image

from mmrouter_cli.bench.types import BenchError, Conversation, LoadSpec, Picture, Turn, Words

CATALOGUE = 40
"""Number of pictures that are shown repeatedly, the n-th in proportion to 1/n."""
POPULARITY = [1 / (rank + 1) for rank in range(CATALOGUE)]
PATCH = 28
"""Side in pixels of one visual token of Qwen2-VL and Qwen2.5-VL."""
GIVE_UP = 1_000
"""Consecutive conversations that are too long, after which none is expected to fit."""
NOISE = 8
"""Pixels per cell of a picture's noise: a file has about as many bytes as a photograph of its size."""
QUALITY = 85
CACHED_TEXTS, CACHED_PICTURES = 512, 64
VOCABULARY = (  # noqa: SIM905
    "able about above across after again air all along also always among animal answer area around ask back base "
    "bear because been before began begin behind best better between big bird black blue boat body book both bring "
    "build busy call came car carry change check children city class clear close cold colour come common complete "
    "country course cover cross dark day deep door down draw drive early earth east easy eat end enough even every "
    "example eye face fact family far farm fast feel few field figure fill final find fine fire first fish five fly "
    "follow food form four free front full game gave girl give glass go gold good great green ground group grow half "
    "hand happy hard head hear heat help here high hold home horse hot hour house idea inch island keep kind king "
    "know land language large last late laugh lead learn leave left letter life light like line list listen little "
    "live long look love low machine made main make many map mark mean measure might mile mind minute money moon more "
    "morning most mother mountain move much music name near need never new next night north note nothing notice now "
    "number object ocean often old once only open order other over own page paint paper part pass people picture "
    "piece place plain plan plane plant play point power press problem produce pull question quick rain reach read"
).split()


def synthetic(load: LoadSpec) -> Iterator[Conversation]:
    """Yield the synthetic mix, without end."""
    rnd = random.Random(load.seed)
    at = 0.0
    number = 0
    while True:
        number += 1
        at += arrival_gap(rnd, load)
        system = Words(f"s{rnd.randrange(load.system_prompts)}", load.system_tokens)
        pictures: tuple[Picture, ...] = ()
        if rnd.random() < load.image_share:
            index = catalogue_index(rnd, load.image_reuse)
            name = f"p{number}" if index is None else f"k{index}"
            pictures = (Picture(name, load.image_width, load.image_height),)
        turns = []
        for turn in range(turn_count(rnd, load.turns)):
            words = Words(f"c{number}t{turn}", length_around(rnd, load.text_tokens))
            answer = Words(f"c{number}a{turn}", length_around(rnd, load.output_tokens))
            turns.append(Turn((*(pictures if not turn else ()), words), answer, pause(rnd, load, turn)))
        yield Conversation(at, (system,) if load.system_tokens else (), tuple(turns))


def arrival_gap(rnd: random.Random, load: LoadSpec) -> float:
    """Return the seconds between the starts of two conversations: Poisson arrivals, 0 without a rate."""
    return rnd.expovariate(load.rate / load.turns) if load.rate else 0.0


def turn_count(rnd: random.Random, mean: float) -> int:
    """Return a geometrically distributed number of turns with this mean, at least 1."""
    return 1 if mean <= 1 else 1 + int(math.log(1 - rnd.random()) / math.log(1 - 1 / mean))


def length_around(rnd: random.Random, mean: int) -> int:
    """Return a length from half the mean to one and a half of it, at least 1."""
    return max(1, round(mean * rnd.uniform(0.5, 1.5)))


def pause(rnd: random.Random, load: LoadSpec, turn: int) -> float:
    """Return the seconds that a user thinks before a turn, 0 before the first one."""
    return rnd.expovariate(1 / load.think) if load.think and turn else 0.0


def catalogue_index(rnd: random.Random, reuse: float) -> int | None:
    """Return which picture of the catalogue is shown, ``None`` for a new one."""
    return rnd.choices(range(CATALOGUE), POPULARITY)[0] if rnd.random() < reuse else None


def prompt_tokens(conversation: Conversation, turn: int) -> int:
    """Return about how many prompt tokens a turn has, with everything before it."""
    total = sum(words.tokens for words in conversation.system)
    for number, each in enumerate(conversation.turns[: turn + 1]):
        total += sum(part.tokens if isinstance(part, Words) else _visual_tokens(part) for part in each.parts)
        total += each.answer.tokens if number < turn else 0
    return total


def _visual_tokens(picture: Picture) -> int:
    return math.ceil(picture.width / PATCH) * math.ceil(picture.height / PATCH)


def select(conversations: Iterable[Conversation], load: LoadSpec) -> tuple[list[Conversation], int]:
    """Return the first conversations that make ``load.requests`` turns, and how many turns were left out as too long.

    The last conversation is cut at that number; one that grows too long is cut before. A recorded trace is stretched
    to ``load.rate``. Raises :class:`BenchError` where no turn fits.
    """
    selected: list[Conversation] = []
    left_out = consecutive_misses = 0
    missing = load.requests
    for conversation in conversations:
        fitting = len(conversation.turns)
        if load.longest is not None:
            sizes = (prompt_tokens(conversation, turn) for turn in range(fitting))
            fitting = next((turn for turn, size in enumerate(sizes) if size > load.longest), fitting)
        left_out += len(conversation.turns) - fitting
        consecutive_misses = 0 if fitting else consecutive_misses + 1
        if consecutive_misses > GIVE_UP and not selected:
            break
        if fitting:
            selected.append(replace(conversation, turns=conversation.turns[: min(fitting, missing)]))
            missing -= len(selected[-1].turns)
        if not missing:
            break
    if not selected:
        raise BenchError(f"no request is left: {left_out} are longer than {load.longest} tokens")
    if load.rate and load.kind == "mooncake":
        begin = selected[0].at
        span = selected[-1].at - begin
        factor = (len(selected) - 1) / load.rate / span if span else 0.0
        selected = [replace(each, at=(each.at - begin) * factor) for each in selected]
    return selected, left_out


def draw_text(salt: str, tokens_per_word: float, words: Words) -> str:
    """Return words that make about ``words.tokens`` tokens; a shorter text of a name is a prefix of a longer one."""
    count = max(1, round(words.tokens / tokens_per_word))
    return " ".join(random.Random(f"{salt}/{words.name}").choices(VOCABULARY, k=count))


def draw_picture(salt: str, picture: Picture) -> str:
    cells = (max(1, picture.width // NOISE), max(1, picture.height // NOISE))
    noise = random.Random(f"{salt}/{picture.name}").randbytes(3 * cells[0] * cells[1])
    out = io.BytesIO()
    image = Image.frombytes("RGB", cells, noise)
    image.resize((picture.width, picture.height), Image.Resampling.BICUBIC).save(out, "JPEG", quality=QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()


class BodyWriter:
    """Writes the request bodies of one run; caches texts and pictures, most of which are repeated."""

    def __init__(self, salt: str, tokens_per_word: float, model: str, *, ignore_eos: bool) -> None:
        self._text = functools.lru_cache(CACHED_TEXTS)(functools.partial(draw_text, salt, tokens_per_word))
        self._picture = functools.lru_cache(CACHED_PICTURES)(functools.partial(draw_picture, salt))
        self._fields: dict[str, Any] = {
            "model": model,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ignore_eos:
            self._fields["ignore_eos"] = True

    def body(self, conversation: Conversation, number: int) -> bytes:
        """Return the chat request of one turn, with the whole conversation before it."""
        messages: list[dict[str, Any]] = []
        if conversation.system:
            messages.append({"role": "system", "content": self._join(conversation.system)})
        for turn in conversation.turns[:number]:
            messages.append({"role": "user", "content": self._content(turn.parts)})
            messages.append({"role": "assistant", "content": self._text(turn.answer)})
        last = conversation.turns[number]
        messages.append({"role": "user", "content": self._content(last.parts)})
        return msgspec.json.encode({**self._fields, "messages": messages, "max_tokens": last.answer.tokens})

    def _content(self, parts: tuple[Words | Picture, ...]) -> str | list[dict[str, Any]]:
        words = tuple(part for part in parts if isinstance(part, Words))
        pictures = [part for part in parts if isinstance(part, Picture)]
        if not pictures:
            return self._join(words)
        images: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": self._picture(p)}} for p in pictures]
        return [*images, {"type": "text", "text": self._join(words)}]

    def _join(self, words: tuple[Words, ...]) -> str:
        return " ".join(map(self._text, words))
