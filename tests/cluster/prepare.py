"""Make what the tests on a control plane need, before their time is taken: commands that are built once per machine.

    python tests/cluster/prepare.py

Exit status 1 when something that was tried failed (:func:`artefacts.status_of`).
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:1] = map(str, Path(__file__).resolve().parents[1:3])

from artefacts import made, status_of


def prepare() -> None:
    """Make everything, up to what cannot be made. Raises :class:`artefacts.NotMadeError`."""
    for script in ("kube_env.py", "helm_env.py"):
        made(script, live=True)


if __name__ == "__main__":
    sys.exit(status_of(prepare))
