"""``make cluster``: a one-node cluster that has the project's images and stands until ctrl-C.

    python tests/e2e/one_node_cluster.py [--images DIR]    # DIR: archives that were made before, by `make images`

It writes ``build/cluster.sh``, which a shell sources to have kubectl and helm for it. Exit status as of
``hack/build_once.py``: 3 where it cannot be made on this machine, 1 where something was not built.
"""

import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path[:1] = map(str, Path(__file__).resolve().parents[1:3])

from artefacts import NotMadeError, build_images, run_tool
from e2e.images import write_pause
from e2e.node import Programs, node

from hack.cluster.go_programs import cni_folder

ROOT = Path(__file__).resolve().parents[2]
run_live = partial(run_tool, live=True)


@contextmanager
def sourced(file: Path, kubeconfig: Path, programs: list[Path]) -> Iterator[None]:
    """Keep a file that a shell sources to reach the cluster, for as long as the block runs."""
    path = ":".join(map(str, programs))
    text = f'export KUBECONFIG={shlex.quote(str(kubeconfig))}\nexport PATH={shlex.quote(path)}:"$PATH"\n'
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    try:
        yield
    finally:
        if file.is_file() and file.read_text() == text:  # not that of a cluster which began later
            file.unlink()


@contextmanager
def kept(logs: Path, where: Path | None) -> Iterator[None]:
    """Copy what lies in the folder ``logs`` to one that stays, when the block ends and however it does."""
    try:
        yield
    finally:
        if where is not None and logs.is_dir():
            shutil.copytree(logs, where, dirs_exist_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a one-node cluster until ctrl-C.")
    parser.add_argument("--images", type=Path, metavar="DIR", help="archives of the images, instead of building them")
    parser.add_argument(
        "--env", type=Path, metavar="FILE", default=ROOT / "build" / "cluster.sh", help="what to source"
    )
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="keep the logs there; without, they go with the cluster"
    )
    chosen = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        node_bin = Path(run_live("cluster.go_programs", "node"))  # first: it names what the machine lacks
        kube, helm = Path(run_live("cluster.go_programs", "kubernetes")), Path(run_live("cluster.go_programs", "helm"))
        with tempfile.TemporaryDirectory(prefix="mmrouter-cluster-") as name:
            folder = Path(name)
            images = sorted(chosen.images.glob("*.tar")) if chosen.images else build_images(folder / "images", run_live)
            write_pause(folder / "pause.tar")
            began = time.monotonic()
            cni = cni_folder()
            assert cni  # the build of the node's commands has checked
            programs = Programs(kube, node_bin, cni)
            run = folder / "run"
            with kept(run / "log", chosen.logs), node(run, programs, folder / "pause.tar") as plane:
                for image in images:
                    plane.load(image)
                with sourced(chosen.env, plane.kubeconfig, [kube, helm]):
                    seconds = time.monotonic() - began
                    where = os.path.relpath(chosen.env)
                    print(f"ready in {seconds:.0f} s. In another terminal:\n\n  source {where}\n", flush=True)
                    print("ctrl-C ends the cluster and leaves nothing behind.", flush=True)
                    signal.pause()
    except NotMadeError as error:
        return error.status  # the tool has printed the reason
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
