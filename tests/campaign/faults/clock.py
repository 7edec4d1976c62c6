"""Steps of the wall clock of one container, by a library (``clock.c``) that is preloaded into all of a deployment.

Debian's libfaketime is not used: under it, Python's ``time.sleep`` raises ``EINVAL`` after a step if the monotonic
clock is left as it is.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

SOURCE = Path(__file__).with_name("clock.c")
COMPILER = "cc"
STEP_SECONDS = 3600
"""Size of a step: above all periods and deadlines of a deployment, and of a test."""


def missing() -> str:
    """Return what this machine lacks to set clocks; empty: nothing."""
    return "" if shutil.which(COMPILER) else f"there is no {COMPILER}"


def build(folder: Path) -> Path:
    """Compile the library. Raises ``subprocess.CalledProcessError``."""
    library = folder / "libclock.so"
    subprocess.run((COMPILER, "-shared", "-fPIC", "-O2", "-o", library, SOURCE, "-ldl"), check=True)
    return library


def preload(resource: dict[str, Any], library: Path) -> None:
    """Make routers, sidecars and engines of a resource load the library."""
    # Two slashes, as a local pod replaces the paths of its mounts, of which the folder for temporary files is one.
    env = [{"name": "LD_PRELOAD", "value": f"/{library}"}]
    spec = resource["spec"]
    spec["frontend"]["podTemplate"] = {"spec": {"containers": [{"name": "router", "env": env}]}}
    engine, sidecar = {"name": "engine", "env": env}, {"name": "sidecar", "env": env}
    for pool in spec["pools"]:
        pool["podTemplate"] = {"spec": {"containers": [engine], "initContainers": [sidecar]}}


def home_of(process: psutil.Process) -> Path:
    """Return the folder of a process's container, in which the library finds the step of its clock."""
    return Path(process.environ()["HOME"])


def set_clock(home: Path, seconds: int) -> None:
    """Set the clock of a container to this much more than the machine's. Raises ``OSError`` without the library."""
    file = os.open(home / "clock-step", os.O_WRONLY)
    try:
        os.pwrite(file, seconds.to_bytes(8, sys.byteorder, signed=True), 0)
    finally:
        os.close(file)


def unstepped(at: float, now: float) -> float:
    """Return the machine's time of a moment near ``now`` that was read from a clock which may have been set."""
    return at - STEP_SECONDS * round((at - now) / STEP_SECONDS)
