"""Programs that run an engine's own code in its environment, without a model.

The code of a pinned release gives the same answer to the same program and input, and takes minutes of CPU for all of
them. So answers are kept in the cache, by a digest of all three; the long form asks anew.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from long_form import IS_LONG

from hack.build_once import cache_dir, digest, last_line

_ERROR = re.compile(r"^[\w.]*(?:Error|Exception)\b.*(?:\n  \S.*?(?= \[type=|$))?", re.MULTILINE)
"""With the beginning of the next line where that is further in: pydantic's first one only counts the errors."""
VARIABLES = {"HF_HUB_OFFLINE": "1", "VLLM_TARGET_DEVICE": "cpu"}
UNUSED_SECONDS = 30 * 24 * 3600.0
"""Answers that were not used for so long are removed."""
FORM = "2"
"""Of a kept answer: the paths of its input are ``<path N>``, as another run has the same files elsewhere."""


class EngineError(Exception):
    """The engine's code ended without an answer; the text is its last error, or else the last line that it wrote."""

    def __init__(self, written: str) -> None:
        errors = _ERROR.findall(written)
        super().__init__(" ".join(errors[-1].split())[:300] if errors else last_line(written))


@dataclass(frozen=True)
class Prompts:
    """What an engine answered for a model folder: prompts and refusals, or why it does not take the folder."""

    found: list[Any] | str

    def listed(self) -> list[Any]:
        """Raises :class:`EngineError`."""
        if isinstance(self.found, str):
            raise EngineError(self.found)
        return self.found


def answer_of(env: Path, command: Sequence[str | Path], asked: Any = None) -> Any:
    """Run Python of an environment, or take its answer from an earlier run: the last line of its output, which is JSON.

    ``command``: a program, whose text is all that it reads of this project, and its arguments. ``asked``: its input, as
    JSON. Raises :class:`EngineError`.
    """
    paths = {f"<path {number}>": path for number, path in enumerate(_paths([*map(str, command), asked]))}
    kept = cache_dir() / "answers" / f"{digest(*_parts(env, command, asked))}.json"
    if kept.is_file() and not IS_LONG:
        kept.touch()
        return json.loads(_replaced(kept.read_text(), paths))
    done = subprocess.run(
        [env / "bin" / "python", *command],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | VARIABLES,
    )
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)
        raise EngineError(done.stderr)
    answer = done.stdout.strip().rpartition("\n")[2]
    longest_first = sorted(paths.items(), key=lambda item: -len(item[1]))
    _keep(kept, _replaced(answer, {path: name for name, path in longest_first}))
    return json.loads(answer)


def _parts(env: Path, command: Sequence[str | Path], asked: Any) -> Iterator[str]:
    """Yield what an answer depends on, with the contents of files and folders instead of their places."""
    # The recipes of the environment and of what was added to it.
    yield from (FORM, env.name, json.dumps(VARIABLES), *(file.read_text() for file in sorted(env.glob("mmrouter-*"))))
    yield from (_contents(str(part)) for part in command)
    yield _contents_of(asked)


def _contents_of(value: Any) -> str:
    match value:
        case str():
            return _contents(value)
        case dict():
            return digest("{", *(part for key, each in value.items() for part in (_contents(key), _contents_of(each))))
        case list() | tuple():
            return digest("[", *map(_contents_of, value))
    return json.dumps(value)


def _paths(value: Any) -> Iterator[str]:
    """Yield the paths of files and folders in a value, in its order."""
    match value:
        case str():
            if _is_path(value):
                yield value
        case dict():
            for key, each in value.items():
                yield from (*_paths(key), *_paths(each))
        case list() | tuple():
            for each in value:
                yield from _paths(each)


def _is_path(text: str) -> bool:
    return text.startswith("/") and Path(text).exists()


def _replaced(text: str, replacements: dict[str, str]) -> str:
    for old, new in replacements.items():
        text = text.replace(old, new)
    return text


def _contents(text: str) -> str:
    """Return a text, or where it is the path of a file or folder, its name and a digest of what is in it."""
    if not _is_path(text):
        return text
    path = Path(text)
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    found = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        found.update(f"{file.relative_to(path)} {len(content)}\n".encode() + content)
    return f"{path.name} {found.hexdigest()}"


def _keep(file: Path, answer: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    for old in file.parent.iterdir():
        if time.time() - old.stat().st_mtime > UNUSED_SECONDS:
            old.unlink(missing_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(answer)
    part.replace(file)  # another session may read it
