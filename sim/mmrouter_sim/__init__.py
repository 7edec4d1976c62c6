"""Simulated engines: commands named like the real ones, with the real flags and the real wire, and no GPU.

The commands are installed into a folder of the caller's choice rather than into the environment, where they would stand
in front of a real engine.
"""

import shlex
import sys
from pathlib import Path

COMMANDS = ("vllm", "sglang")


def install(directory: Path) -> list[Path]:
    """Write an executable for each simulated engine into ``directory`` (made if need be) and return their paths.

    Put the folder first on PATH of what should run the simulator. Each runs this interpreter.
    """
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for command in COMMANDS:
        path = directory / command
        fresh = directory / f".{command}.new"
        fresh.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m mmrouter_sim {command} "$@"\n')
        fresh.chmod(0o755)
        fresh.replace(path)  # a reader never sees half a script
        written.append(path)
    return written
