"""The corpus: inputs that every run checks first, one for each outcome that a campaign has seen, in one file of text.

A line is one input, with its target and outcome. Bytes are characters of the same number. An input that once failed
is kept under its present outcome.
"""

import json
from collections.abc import Mapping
from pathlib import Path

FILE = Path(__file__).with_name("corpus.jsonl")
MAX_BYTES = 2048  # of an input: longer ones are drawn again in every run
MAX_OUTCOMES = 60  # of a target

Corpus = dict[str, dict[str, bytes]]
"""Target -> outcome -> input."""


def load(file: Path = FILE) -> Corpus:
    """Return the inputs of every target."""
    corpus: Corpus = {}
    for line in file.read_text().splitlines() if file.is_file() else ():
        entry = json.loads(line)
        corpus.setdefault(entry["target"], {})[entry["outcome"]] = entry["input"].encode("latin-1")
    return corpus


def merge(corpus: Corpus, target: str, shortest: Mapping[str, bytes]) -> None:
    """Add outcomes that the corpus lacks. Inputs that it has stay, so that each campaign changes few lines."""
    known = corpus.setdefault(target, {})
    for outcome, data in sorted(shortest.items()):
        if len(data) <= MAX_BYTES and len(known) < MAX_OUTCOMES:
            known.setdefault(outcome, data)


def write(corpus: Corpus, file: Path = FILE) -> None:
    lines = [
        json.dumps({"target": target, "outcome": outcome, "input": data.decode("latin-1")})
        for target, inputs in sorted(corpus.items())
        for outcome, data in sorted(inputs.items())
    ]
    file.write_text("".join(f"{line}\n" for line in lines))
