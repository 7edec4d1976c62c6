"""Check a consumer of KV events against recorded streams. Needs Python 3.11 and nothing else; docs/kv-events.md.

    python tests/kv_events/check.py [--json] [--only TEXT] -- CONSUMER [ARGUMENT ...]

Each recording is played to a process of its own: the consumer reads lines of JSON from standard input and answers each
request with a line ``{"hit": TOKENS}``, the tokens of the prompt that it expects the engine to have. Exit status: 0; 1
if an answer is above the engine's hit; 2 if the consumer ends or answers something else, or no recording is named so.
"""

import argparse
import json
import lzma
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VERSION = 1
RECORDINGS = Path(__file__).with_name("recordings")
Line = dict[str, Any]
Take = Callable[[Line], int | None]
"""Takes the next line of a recording, without the engine's hit; returns the consumer's for a request."""


class ConsumerError(Exception):
    """A consumer ended, or its answer is no number of tokens of the prompt."""


@dataclass
class Result:
    """A consumer's answers to the requests of one recording. ``equal``, ``below`` and ``above`` the engine's hit."""

    recording: str
    engine: str
    layout: str
    requests: int = 0
    equal: int = 0
    below: int = 0
    above: int = 0
    hit_tokens: int = 0
    answered_tokens: int = 0

    def count(self, hit: int, answer: int) -> None:
        self.requests += 1
        self.equal += answer == hit
        self.below += answer < hit
        self.above += answer > hit
        self.hit_tokens += hit
        self.answered_tokens += answer


def recordings(only: str = "") -> list[Path]:
    """Return the recordings whose names contain a text. Raises ``FileNotFoundError`` if there is none."""
    if found := [path for path in sorted(RECORDINGS.glob("*.jsonl.xz")) if only in path.name]:
        return found
    raise FileNotFoundError(f"no recording in {RECORDINGS} has {only!r} in its name")


def read(path: Path) -> Iterator[Line]:
    """Yield the lines of a recording. Raises ``ValueError`` for a version that this file does not know."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            one = json.loads(line)
            if number == 0 and one.get("kv_events") != VERSION:
                raise ValueError(f"{path.name} has version {one.get('kv_events')}, this file knows {VERSION}")
            yield one


def compare(name: str, lines: Iterable[Line], take: Take) -> Result:
    """Play a recording to a consumer. Raises :class:`ConsumerError`."""
    result = Result(name, "", "")
    for line in lines:
        answer = take({key: value for key, value in line.items() if key != "hit"})
        if "kv_events" in line:
            result.engine, result.layout = f"{line['engine']} {line['release']}", line["layout"]
        elif "request" in line:
            tokens = len(line["request"]["tokens"])
            if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer <= tokens:
                raise ConsumerError(f"{name}: the answer to request {result.requests} is {answer!r}")
            result.count(line["hit"], answer)
    return result


@contextmanager
def started(command: Sequence[str]) -> Iterator[Take]:
    """Run a consumer as a process."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    asked, answers = process.stdin, process.stdout
    assert asked is not None
    assert answers is not None

    def take(line: Line) -> int | None:
        try:
            asked.write(json.dumps(line, separators=(",", ":")) + "\n")
            if "request" not in line:
                return None
            asked.flush()
            answer = answers.readline()
        except OSError as error:
            raise ConsumerError(f"the consumer ended: {error}") from error
        if not answer:
            raise ConsumerError(f"the consumer ended with status {process.wait()}")
        try:
            return json.loads(answer)["hit"]  # type: ignore[no-any-return]
        except (ValueError, KeyError, TypeError) as error:
            raise ConsumerError(f'the consumer answered {answer[:200]!r}, not {{"hit": TOKENS}}') from error

    try:
        yield take
    finally:
        process.kill()
        process.communicate()


def table(results: Sequence[Result]) -> Iterator[str]:
    head = ("engine", "layout", "requests", "equal", "below", "above", "tokens answered", "tokens hit")
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for one in results:
        counts = (one.requests, one.equal, one.below, one.above, one.answered_tokens, one.hit_tokens)
        yield f"| {' | '.join(map(str, (one.engine, one.layout, *counts)))} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--only", default="", metavar="TEXT", help="only recordings with this text in their name")
    parser.add_argument("consumer", nargs="+", help="the consumer's command, behind --")
    given = parser.parse_args()
    results = []
    try:
        for path in recordings(given.only):
            with started(given.consumer) as take:
                results.append(compare(path.name, read(path), take))
    except (ConsumerError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps([asdict(one) for one in results]) if given.json else "\n".join(table(results)))
    return int(any(one.above for one in results))


if __name__ == "__main__":
    sys.exit(main())
