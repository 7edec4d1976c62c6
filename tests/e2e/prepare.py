"""Build what the tests of real pods need: programs, once per machine, and the images.

    python tests/e2e/prepare.py            # what every test needs
    python tests/e2e/prepare.py gateways   # what only tests of gateways need, which takes as long again

Exit status 1 when a build was tried and failed (:func:`artefacts.status_of`).
"""

import argparse
import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path[:1] = map(str, Path(__file__).resolve().parents[1:3])

from artefacts import build_images, run_tool, shared_images, status_of
from long_form import IS_LONG

run = partial(run_tool, live=True)


def prepare() -> None:
    """Build what every test needs, up to the first thing that cannot be built here.

    Raises :class:`artefacts.NotMadeError`.
    """
    if os.environ.get("MMROUTER_KUBECONFIG"):
        if shutil.which("kubectl") is None:
            run("cluster.go_programs", "kubernetes")
        run("cluster.go_programs", "helm")
        return
    for programs in ("node", "kubernetes", "helm", "policies"):  # the first names what the machine lacks
        run("cluster.go_programs", programs)
    build_shared_images()


def prepare_gateways() -> None:
    """Build the programs of gateways, which only a node of this machine can run.

    Raises :class:`artefacts.NotMadeError`.
    """
    if os.environ.get("MMROUTER_KUBECONFIG"):
        return
    for programs in ("istio", "suite") if IS_LONG else ("istio",):
        run("cluster.go_programs", programs)


def build_shared_images() -> None:
    if (images := shared_images()) is None:  # the builder keeps the layers, the tests make archives of them
        with tempfile.TemporaryDirectory(prefix="mmrouter-images-") as folder:
            build_images(Path(folder), run)
        return
    part = images.with_suffix(".part")
    build_images(part, run)
    part.rename(images)  # all of them, or none


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build what the tests of real pods need.")
    parser.add_argument("part", nargs="?", choices=["gateways"], help="what only tests of gateways need")
    sys.exit(status_of(prepare_gateways if parser.parse_args().part else prepare))
