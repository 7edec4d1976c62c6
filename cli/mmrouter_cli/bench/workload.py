"""What is asked, and when: conversations from a load's numbers. Pure; the same load gives the same conversations.

A conversation is a system prompt (one of a few), turns, and in a share of them a picture in the first one; later turns
show it again, as clients do. Between the turns stand answers of drawn words, not those that came: so the prompts of two
runs are equal, whatever the endpoints answer.
"""

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from mmrouter_cli.bench.types import BenchError, Conversation, Load, Shown, Turn, Words

CATALOGUE = 40
"""Pictures that are shown again and again, the n-th in proportion to 1/n."""
POPULARITY = [1 / (rank + 1) for rank in range(CATALOGUE)]
PATCH = 28
"""Side in pixels of what Qwen2-VL and Qwen2.5-VL make one token of."""
GIVE_UP = 1_000
"""Conversations in a row that are too long, after which none is expected to fit."""


def synthetic(load: Load) -> Iterator[Conversation]:
    """Yield the synthetic mix, without end."""
    rnd = random.Random(load.seed)
    at = 0.0
    number = 0
    while True:
        number += 1
        at += arrival(rnd, load)
        system = Words(f"s{rnd.randrange(load.system_prompts)}", load.system_tokens)
        pictures: tuple[Shown, ...] = ()
        if rnd.random() < load.image_share:
            kept = picked(rnd, load.image_reuse)
            name = f"p{number}" if kept is None else f"k{kept}"
            pictures = (Shown(name, load.image_width, load.image_height),)
        turns = []
        for turn in range(turn_count(rnd, load.turns)):
            words = Words(f"c{number}t{turn}", around(rnd, load.text_tokens))
            answer = Words(f"c{number}a{turn}", around(rnd, load.output_tokens))
            turns.append(Turn((*(pictures if not turn else ()), words), answer, pause(rnd, load, turn)))
        yield Conversation(at, (system,) if load.system_tokens else (), tuple(turns))


def arrival(rnd: random.Random, load: Load) -> float:
    """Return the seconds from one conversation's beginning to the next one's: Poisson, 0 without a rate."""
    return rnd.expovariate(load.rate / load.turns) if load.rate else 0.0


def turn_count(rnd: random.Random, mean: float) -> int:
    """Return a number of turns with this mean, at least 1: each turn may be the last one with the same chance."""
    return 1 if mean <= 1 else 1 + int(math.log(1 - rnd.random()) / math.log(1 - 1 / mean))


def around(rnd: random.Random, mean: int) -> int:
    """Return a length from half the mean to one and a half of it, at least 1."""
    return max(1, round(mean * rnd.uniform(0.5, 1.5)))


def pause(rnd: random.Random, load: Load, turn: int) -> float:
    """Return the seconds that a user thinks before a turn; nobody waits before the first one."""
    return rnd.expovariate(1 / load.think) if load.think and turn else 0.0


def picked(rnd: random.Random, reuse: float) -> int | None:
    """Return which picture of a catalogue is shown, or ``None`` for a new one."""
    return rnd.choices(range(CATALOGUE), POPULARITY)[0] if rnd.random() < reuse else None


def visual_tokens(shown: Shown) -> int:
    """Return about how many tokens a picture is."""
    return math.ceil(shown.width / PATCH) * math.ceil(shown.height / PATCH)


def prompt_tokens(conversation: Conversation, turn: int) -> int:
    """Return about how many prompt tokens a turn has, with all that stands before it."""
    said = sum(words.tokens for words in conversation.system)
    for number, each in enumerate(conversation.turns[: turn + 1]):
        said += sum(part.tokens if isinstance(part, Words) else visual_tokens(part) for part in each.parts)
        said += each.answer.tokens if number < turn else 0
    return said


def planned(found: Iterable[Conversation], load: Load) -> tuple[list[Conversation], int]:
    """Return the first conversations that make ``load.requests`` turns, and how many turns too long were left out.

    The last conversation is cut where the number is reached; of one that grows too long the rest is left out. What a
    trace recorded is stretched to ``load.rate``. Raises :class:`BenchError` where nothing is left.
    """
    kept: list[Conversation] = []
    left_out = room = 0
    fruitless = 0
    room = load.requests
    for conversation in found:
        fitting = len(conversation.turns)
        if load.longest is not None:
            sizes = (prompt_tokens(conversation, turn) for turn in range(fitting))
            fitting = next((turn for turn, size in enumerate(sizes) if size > load.longest), fitting)
        left_out += len(conversation.turns) - fitting
        fruitless = 0 if fitting else fruitless + 1
        if fruitless > GIVE_UP and not kept:
            break
        if fitting:
            kept.append(replace(conversation, turns=conversation.turns[: min(fitting, room)]))
            room -= len(kept[-1].turns)
        if not room:
            break
    if not kept:
        raise BenchError(f"no request is left: {left_out} are longer than {load.longest} tokens")
    return (stretched(kept, load.rate) if load.rate and load.kind == "mooncake" else kept), left_out


def stretched(conversations: Sequence[Conversation], rate: float) -> list[Conversation]:
    """Return the conversations with their beginnings moved so that they are ``rate`` per second on the whole."""
    begin = conversations[0].at
    span = conversations[-1].at - begin
    factor = (len(conversations) - 1) / rate / span if span else 0.0
    return [replace(each, at=(each.at - begin) * factor) for each in conversations]
