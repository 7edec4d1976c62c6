"""Programs that run an engine's own code in its environment, without a model."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hack.build_once import last_line

_ERROR = re.compile(r"^[\w.]*(?:Error|Exception)\b.*", re.MULTILINE)
VARIABLES = {"HF_HUB_OFFLINE": "1", "VLLM_TARGET_DEVICE": "cpu"}


class EngineError(Exception):
    """The engine's code ended without an answer; the text is its last error, or else the last line that it wrote."""

    def __init__(self, written: str) -> None:
        errors = _ERROR.findall(written)
        super().__init__(errors[-1][:300] if errors else last_line(written))


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
    """Run Python of an environment; return the last line of its output, which is JSON. ``asked``: its input, as JSON.
    Raises :class:`EngineError`.
    """
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
    return json.loads(done.stdout.strip().rpartition("\n")[2])
