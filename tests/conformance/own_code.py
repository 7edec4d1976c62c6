"""Programs that run an engine's own code in its environment, without a model."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hack.build_once import last_line

VARIABLES = {"HF_HUB_OFFLINE": "1", "VLLM_TARGET_DEVICE": "cpu"}


class EngineError(Exception):
    """The engine's code ended without an answer; the text is the last line that it wrote."""


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
        raise EngineError(last_line(done.stderr))
    return json.loads(done.stdout.strip().rpartition("\n")[2])
