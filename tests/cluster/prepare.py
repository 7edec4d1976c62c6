"""Build what the tests on a control plane need before their time limit starts: commands, once per machine.

    python tests/cluster/prepare.py

Exit status 1 when a build was tried and failed (:func:`artefacts.status_of`).
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:1] = map(str, Path(__file__).resolve().parents[1:3])

from artefacts import run_tool, status_of
from long_form import IS_LONG


def prepare() -> None:
    """Build everything, up to the first thing that cannot be built here. Raises :class:`artefacts.NotMadeError`."""
    for programs in ("kubernetes", "helm", "definitions", *(("istio", "picker", "envoy-gateway") if IS_LONG else ())):
        run_tool("cluster.go_programs", programs, live=True)


if __name__ == "__main__":
    sys.exit(status_of(prepare))
