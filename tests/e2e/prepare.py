"""Make what the tests of real pods need, before their time is taken: what is built once per machine, and the images.

    python tests/e2e/prepare.py

Exit status 1 when something that was tried failed. What this machine cannot make is no failure: the tests say of
themselves that they are not run, and why.
"""

import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from making import NotMadeError, build_images, made, prepared
from tools.vllm_env import CANNOT

make = partial(made, live=True)


def prepare() -> None:
    """Make everything, up to what cannot be made. Raises :class:`making.NotMadeError`."""
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


def main() -> int:
    """The command line; returns the exit status."""
    try:
        prepare()
    except NotMadeError as error:
        return 0 if error.status == CANNOT else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
