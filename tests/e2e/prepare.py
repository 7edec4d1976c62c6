"""Make what the tests of real pods need, before their time is taken: what is built once per machine, and the images.

    python tests/e2e/prepare.py

Exit status 1 when something that was tried failed (:func:`artefacts.status_of`).
"""

import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path[:1] = map(str, Path(__file__).resolve().parents[1:3])

from artefacts import build_images, made, prepared, status_of

make = partial(made, live=True)


def prepare() -> None:
    """Make everything, up to what cannot be made. Raises :class:`artefacts.NotMadeError`."""
    if os.environ.get("MMROUTER_KUBECONFIG"):
        if shutil.which("kubectl") is None:
            make("kube_env.py")
        make("helm_env.py")
        return
    for script in ("node_env.py", "kube_env.py", "helm_env.py"):  # the first says what the machine lacks
        make(script)
    if (kept := prepared()) is None:  # the builder keeps the layers, the tests make archives of them
        with tempfile.TemporaryDirectory(prefix="mmrouter-images-") as folder:
            build_images(Path(folder), make)
        return
    part = kept.with_suffix(".part")
    build_images(part, make)
    part.rename(kept)  # all of them, or none


if __name__ == "__main__":
    sys.exit(status_of(prepare))
