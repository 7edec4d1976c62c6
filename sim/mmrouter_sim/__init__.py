"""Simulated engines without a GPU: commands with the names, flags and wire formats of the real ones.

The commands are installed into a given folder, not into the environment, where they would hide a real engine.
"""

import shlex
import sys
from pathlib import Path

COMMANDS = ("vllm", "sglang")


def install(directory: Path) -> list[Path]:
    """Write an executable for each simulated engine into ``directory``, created if necessary; return their paths. Put
    the folder first on the PATH of processes that should use the simulator. Each runs this interpreter.
    """
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for command in COMMANDS:
        path = directory / command
        fresh = directory / f".{command}.new"
        fresh.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m mmrouter_sim {command} "$@"\n')
        fresh.chmod(0o755)
        fresh.replace(path)  # atomic
        written.append(path)
    return written
