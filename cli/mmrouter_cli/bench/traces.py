"""Readers of playable load files: Mooncake traces, and image statistics (bench/encoders/servegen_images.json).

Which one a file is shows in its text. A line of a Mooncake trace has ``timestamp`` (ms), ``input_length`` and
``output_length`` (tokens) and ``hash_ids``, one per 512 tokens of the prompt: equal ids, equal beginnings. Statistics
have of each client its share of the requests, probabilities of 0, 1, .. images, and equally likely values of an image's
visual tokens, of a request's text tokens and of an answer's.
"""

import hashlib
import math
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from mmrouter_cli.bench.types import BenchError, Conversation, Load, Shown, Turn, Words
from mmrouter_cli.bench.workload import PATCH, arrival, pause, picked, turn_count

BLOCK = 512
"""Tokens per block of Mooncake's traces."""
INSTRUCTIONS = 0.85
"""Share of a client's shortest text that all its requests begin with."""
SAID = ("system_prompts", "system_tokens", "text_tokens", "output_tokens", "image_share", "image_width", "image_height")
"""Numbers of the synthetic mix that a trace has in their place."""
MOST_BYTES = 512 * 2**20

Size = Annotated[int, msgspec.Meta(ge=1, le=2**22)]
Kind = TypeVar("Kind")
Share = Annotated[float, msgspec.Meta(ge=0)]


class Line(msgspec.Struct, frozen=True):
    """One request of a Mooncake trace."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Size
    output_length: Annotated[int, msgspec.Meta(ge=0, le=2**22)]
    hash_ids: list[int]


class Client(msgspec.Struct, frozen=True):
    """One client of a service."""

    share: Share
    counts: Annotated[list[Share], msgspec.Meta(min_length=1, max_length=64)]
    tokens: Annotated[list[Size], msgspec.Meta(min_length=1)]
    texts: Annotated[list[Size], msgspec.Meta(min_length=1)]
    outputs: Annotated[list[Size], msgspec.Meta(min_length=1)]


class Statistics(msgspec.Struct, frozen=True):
    """A service's clients."""

    clients: Annotated[list[Client], msgspec.Meta(min_length=1)]


class Trace(msgspec.Struct, frozen=True):
    """What a file says, and its digest. Exactly one of ``lines`` and ``clients`` is not empty."""

    digest: str
    lines: tuple[Line, ...] = ()
    clients: tuple[Client, ...] = ()


def read(file: Path) -> Trace:
    """Return a file's trace. Raises :class:`BenchError`, which names the line and the field."""
    try:
        if file.stat().st_size > MOST_BYTES:
            raise BenchError(f"{file} has more than {MOST_BYTES >> 20} MiB")
        raw = file.read_bytes()
    except OSError as error:
        raise BenchError(f"cannot read {file}: {error.strerror}") from error
    digest = hashlib.sha256(raw).hexdigest()[:16]
    lines = raw.split(b"\n")
    if b'"clients"' in lines[0] or not lines[0].rstrip().endswith(b"}"):
        return Trace(digest, clients=tuple(_decoded(file.name, raw, Statistics).clients))
    found = [
        _decoded(f"{file.name}, line {number}", line, Line) for number, line in enumerate(lines, 1) if line.strip()
    ]
    for number, line in enumerate(found, 1):
        if len(line.hash_ids) != math.ceil(line.input_length / BLOCK):
            said = f"{len(line.hash_ids)} hash_ids do not make {line.input_length} tokens in blocks of {BLOCK}"
            raise BenchError(f"{file.name}, line {number}: {said}")
    return Trace(digest, lines=tuple(sorted(found, key=lambda line: line.timestamp)))


def load_of(trace: Trace, load: Load, concurrency: int) -> Load:
    """Return the load of a trace: what the trace says by itself is 0 in it.

    Statistics say nothing of times: without a rate, so many conversations go on at a time.
    """
    if trace.lines:
        own = (*SAID, "turns", "think", "image_reuse", "seed")
        return msgspec.structs.replace(load, kind="mooncake", trace=trace.digest, **dict.fromkeys(own, 0))
    if load.paced and load.rate is None:
        load = msgspec.structs.replace(load, concurrency=concurrency)
    return msgspec.structs.replace(load, kind="statistics", trace=trace.digest, **dict.fromkeys(SAID, 0))


def conversations(trace: Trace, load: Load) -> Iterator[Conversation]:
    """Yield a trace's conversations: of a recorded one all, of statistics without end."""
    return _recorded(trace.lines) if trace.lines else _drawn(trace.clients, load)


def _recorded(lines: Iterable[Line]) -> Iterator[Conversation]:
    for number, line in enumerate(lines):
        parts = tuple(
            Words(f"b{name}", min(BLOCK, line.input_length - place * BLOCK)) for place, name in enumerate(line.hash_ids)
        )
        yield Conversation(line.timestamp / 1000, (), (Turn(parts, Words(f"a{number}", max(1, line.output_length))),))


def _drawn(clients: tuple[Client, ...], load: Load) -> Iterator[Conversation]:
    rnd = random.Random(load.seed)
    shares = [client.share for client in clients]
    at = 0.0
    number = 0
    while True:
        number += 1
        at += arrival(rnd, load)
        which = rnd.choices(range(len(clients)), shares)[0]
        client = clients[which]
        system = Words(f"i{which}", max(1, int(min(client.texts) * INSTRUCTIONS)))
        (count,) = rnd.choices(range(len(client.counts)), client.counts)
        pictures = []
        for place in range(count):
            kept = picked(rnd, load.image_reuse)
            name = f"p{number}.{place}" if kept is None else f"u{which}k{kept}"
            pictures.append(_picture(name, client, load.seed))
        turns = []
        for turn in range(turn_count(rnd, load.turns)):
            words = Words(f"c{number}t{turn}", max(1, rnd.choice(client.texts) - system.tokens))
            answer = Words(f"c{number}a{turn}", rnd.choice(client.outputs))
            turns.append(Turn((*(pictures if not turn else ()), words), answer, pause(rnd, load, turn)))
        yield Conversation(at, (system,), tuple(turns))


def _picture(name: str, client: Client, seed: int) -> Shown:
    """Return a picture of about as many visual tokens as the client's have; one name has one size."""
    tokens = random.Random(f"{seed}/{name}").choice(client.tokens)
    across = max(1, round(math.sqrt(tokens)))
    return Shown(name, across * PATCH, math.ceil(tokens / across) * PATCH)


def _decoded(where: str, raw: bytes, kind: type[Kind]) -> Kind:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise BenchError(f"{where}: {error}") from error
