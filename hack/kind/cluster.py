"""``make kind``: a cluster of kind on this machine, and the workflow's job with real pods on it.

    python -m hack.kind.cluster [COMMAND...]    # in place of the job's last step, the level e2e

It runs a Docker daemon of its own, builds the node's image with it and creates the cluster. Then it runs the job's
steps in the daemon's network, with ``KUBECONFIG`` and ``MMROUTER_KUBECONFIG`` set and kubectl, helm and kind on the
path, and removes the cluster and the daemon. Docker's data stays in the cache. Exit status: ``hack/build_once.py``, or
that of the step that failed.
"""

import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

import yaml

from hack.build_once import ROOT, CannotMakeError, build_once, cache_dir, digest, note, status_of
from hack.cluster.go_programs import SETS, kubernetes_go, kubernetes_recipe, make
from hack.images import base_image
from hack.kind import node_image
from hack.kind.docker_daemon import Docker, daemon, require

NAME = "mmrouter"
RANGES = ("10.96.0.0/12", "10.244.0.0/16")
"""Of kind's Services and pods. Outside the node they lead nowhere, and not to the machine's default route."""
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yaml"


def built() -> tuple[str, list[Path]]:
    """Build all programs, or find them ready; return Go and the folders. Raises :class:`CannotMakeError`."""
    require()
    if shutil.which("mmdebstrap") is None:
        raise CannotMakeError("there is no mmdebstrap here (Debian: mmdebstrap)")
    go, folders = kubernetes_go(), []
    for name in ("kubernetes", "node", "helm"):
        make(SETS[name], SETS[name].folder())
        folders.append(SETS[name].folder())
    recipe = digest(kubernetes_recipe("kubeadm"), node_image.KIND)
    folder = cache_dir() / "kind" / f"tools-{recipe[:8]}"
    build_once(folder, recipe, partial(node_image.build_tools, go), what="kind and kubeadm (once)", free_gb=3)
    return go, [*folders, folder]


def create(docker: Docker, image: str, kind: Path, kubeconfig: Path) -> None:
    for network in RANGES:
        docker.run("ip", "route", "add", "unreachable", network)
    config = Path(__file__).with_name("cluster.yaml")
    options = (f"--name={NAME}", f"--image={image}", f"--config={config}", f"--kubeconfig={kubeconfig}")
    docker.run(kind, "delete", "cluster", f"--name={NAME}", f"--kubeconfig={kubeconfig}")  # of a run that was killed
    docker.run(kind, "create", "cluster", *options)


def steps() -> list[list[str]]:
    """Return the commands of the workflow's job, in its order, but those of a failed or published run."""
    job = yaml.safe_load(WORKFLOW.read_text())["jobs"]["e2e"]
    return [["bash", "-ec", step["run"]] for step in job["steps"] if "run" in step and "if" not in step]


def builder_env() -> dict[str, str]:
    """Return what has `make images` build with docker, on the base that it makes here."""
    folder = base_image.env_dir()
    base_image.make(folder)
    return {"MMROUTER_BUILDER": "docker", "MMROUTER_BASE_IMAGE": str(folder / base_image.ARCHIVE)}


def act(command: list[str]) -> None:
    go, programs = built()
    kind = programs[-1] / "kind"
    with tempfile.TemporaryDirectory(prefix="mmrouter-kind-") as name:
        folder = Path(name)
        kubeconfig = folder / "kubeconfig"
        with daemon(cache_dir() / "kind" / "docker", folder) as docker:
            image = node_image.build(docker, go, programs)
            try:
                create(docker, image, kind, kubeconfig)
                note("kind has created the cluster")
                env = builder_env() | {
                    "KUBECONFIG": str(kubeconfig),
                    "MMROUTER_KUBECONFIG": str(kubeconfig),
                    "PATH": os.pathsep.join([*map(str, programs), docker.env["PATH"]]),
                }
                *preparing, tests = steps()
                for step in (*preparing, command or tests):
                    note(f"$ {' '.join(step)}")
                    if status := docker.attend(step, **env):
                        sys.exit(status)
            finally:
                docker.run(kind, "delete", "cluster", f"--name={NAME}", f"--kubeconfig={kubeconfig}")


def main() -> int:
    try:
        return status_of(partial(act, sys.argv[1:]))
    except KeyboardInterrupt:
        note("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main())
