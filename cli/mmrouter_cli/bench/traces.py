"""Readers of playable load files: Mooncake traces, and image statistics (bench/encoders/servegen_images.json).

The content tells them apart. A line of a Mooncake trace has ``timestamp`` (ms), ``input_length`` and ``output_length``
(tokens) and ``hash_ids``, one per 512 prompt tokens: equal ids are equal prefixes. Statistics have, per client, its
share of the requests, the probabilities of 0, 1, .. images, and equally likely values of an image's visual tokens, a
request's text tokens and an answer's tokens.
"""

import hashlib
import math
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from mmrouter_cli.bench.types import BenchError, Conversation, LoadSpec, Picture, Turn, Words
from mmrouter_cli.bench.workload import PATCH, arrival_gap, catalogue_index, pause, turn_count

BLOCK = 512
"""Tokens per block of Mooncake's traces."""
INSTRUCTIONS = 0.85
"""Share of a client's shortest text that all its requests start with; in trace_c of ServeGen 368 of 404 to 455."""
FROM_TRACE = (
    *("system_prompts", "system_tokens", "text_tokens", "output_tokens"),
    *("image_share", "image_width", "image_height"),
)
"""Fields of a :class:`LoadSpec` that any trace determines."""
MOST_BYTES = 512 * 2**20

Size = Annotated[int, msgspec.Meta(ge=1, le=2**22)]
Kind = TypeVar("Kind")
Share = Annotated[float, msgspec.Meta(ge=0)]


class TraceLine(msgspec.Struct, frozen=True):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Size
    output_length: Annotated[int, msgspec.Meta(ge=0, le=2**22)]
    hash_ids: list[int]


class Client(msgspec.Struct, frozen=True):
    share: Share
    counts: Annotated[list[Share], msgspec.Meta(min_length=1, max_length=64)]
    tokens: Annotated[list[Size], msgspec.Meta(min_length=1)]
    texts: Annotated[list[Size], msgspec.Meta(min_length=1)]
    outputs: Annotated[list[Size], msgspec.Meta(min_length=1)]


class Statistics(msgspec.Struct, frozen=True):
    clients: Annotated[list[Client], msgspec.Meta(min_length=1)]


class Trace(msgspec.Struct, frozen=True):
    """A file's content and digest. Exactly one of ``lines`` and ``clients`` is not empty."""

    digest: str
    lines: tuple[TraceLine, ...] = ()
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
    texts = raw.split(b"\n")
    if b'"clients"' in texts[0] or not texts[0].rstrip().endswith(b"}"):
        return Trace(digest, clients=tuple(_decode(file.name, raw, Statistics).clients))
    lines = []
    for number, text in enumerate(texts, 1):
        if text.strip():
            where = f"{file.name}, line {number}"
            line = _decode(where, text, TraceLine)
            if len(line.hash_ids) != math.ceil(line.input_length / BLOCK):
                raise BenchError(f"{where}: {len(line.hash_ids)} hash_ids do not make {line.input_length} tokens")
            lines.append(line)
    return Trace(digest, lines=tuple(sorted(lines, key=lambda line: line.timestamp)))


def load_of(trace: Trace, load: LoadSpec, concurrency: int) -> LoadSpec:
    """Return the load of a trace, with 0 for what the trace determines.

    Statistics have no times: without a rate, ``concurrency`` conversations run at a time.
    """
    if trace.lines:
        fields = (*FROM_TRACE, "turns", "think", "image_reuse", "seed")
        return msgspec.structs.replace(load, kind="mooncake", trace=trace.digest, **dict.fromkeys(fields, 0))
    if load.paced and load.rate is None:
        load = msgspec.structs.replace(load, concurrency=concurrency)
    return msgspec.structs.replace(load, kind="statistics", trace=trace.digest, **dict.fromkeys(FROM_TRACE, 0))


def conversations(trace: Trace, load: LoadSpec) -> Iterator[Conversation]:
    """Yield a trace's conversations: those of a recording, or drawn from statistics without end."""
    return _recorded(trace.lines) if trace.lines else _drawn(trace.clients, load)


def _recorded(lines: Iterable[TraceLine]) -> Iterator[Conversation]:
    for number, line in enumerate(lines):
        parts = tuple(
            Words(f"b{name}", min(BLOCK, line.input_length - place * BLOCK)) for place, name in enumerate(line.hash_ids)
        )
        yield Conversation(line.timestamp / 1000, (), (Turn(parts, Words(f"a{number}", max(1, line.output_length))),))


def _drawn(clients: tuple[Client, ...], load: LoadSpec) -> Iterator[Conversation]:
    rnd = random.Random(load.seed)
    shares = [client.share for client in clients]
    at = 0.0
    number = 0
    while True:
        number += 1
        at += arrival_gap(rnd, load)
        which = rnd.choices(range(len(clients)), shares)[0]
        client = clients[which]
        system = Words(f"i{which}", max(1, int(min(client.texts) * INSTRUCTIONS)))
        (count,) = rnd.choices(range(len(client.counts)), client.counts)
        pictures = []
        for place in range(count):
            index = catalogue_index(rnd, load.image_reuse)
            name = f"p{number}.{place}" if index is None else f"u{which}k{index}"
            pictures.append(_picture(name, client, load.seed))
        turns = []
        for turn in range(turn_count(rnd, load.turns)):
            words = Words(f"c{number}t{turn}", max(1, rnd.choice(client.texts) - system.tokens))
            answer = Words(f"c{number}a{turn}", rnd.choice(client.outputs))
            turns.append(Turn((*(pictures if not turn else ()), words), answer, pause(rnd, load, turn)))
        yield Conversation(at, (system,), tuple(turns))


def _picture(name: str, client: Client, seed: int) -> Picture:
    """Return a picture with a client's visual tokens; one name always has one size."""
    tokens = random.Random(f"{seed}/{name}").choice(client.tokens)
    across = max(1, round(math.sqrt(tokens)))
    return Picture(name, across * PATCH, math.ceil(tokens / across) * PATCH)


def _decode(where: str, raw: bytes, kind: type[Kind]) -> Kind:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise BenchError(f"{where}: {error}") from error
