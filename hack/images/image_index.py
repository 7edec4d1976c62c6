"""Join the images of several architectures under one name each: an index, by which a node finds its own.

    python -m hack.images.image_index DESTINATION FOLDER...

Each folder has the archives of one architecture, as ``make images ARGS="--export FOLDER"`` writes them. ``DESTINATION``
is ``docker://REGISTRY/PATH``, to which buildah pushes the images and their index, or a folder, where each index becomes
an OCI archive with all its images. Prints what was written. Exit status: ``hack/build_once.py``.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hack.build_once import CannotMakeError, FailedError, captured, failed, status_of
from hack.images.build_images import name_in


def join_all(destination: str, folders: Sequence[Path]) -> None:
    """Write an index of each image. Raises :class:`CannotMakeError`, :class:`FailedError`."""
    program = shutil.which("buildah")
    if program is None:
        raise CannotMakeError("there is no buildah here")
    names = [sorted(file.name for file in folder.glob("*.tar")) for folder in folders]
    if not names[0] or any(others != names[0] for others in names):
        raise FailedError(f"the folders {', '.join(map(str, folders))} do not have the same archives")
    with tempfile.TemporaryDirectory(prefix="mmrouter-index-") as storage:
        buildah = [program, f"--root={storage}/root", f"--runroot={storage}/run", "--storage-driver=vfs"]
        for name in names[0]:
            print(join(buildah, destination, [folder / name for folder in folders]), flush=True)


def join(buildah: Sequence[str], destination: str, archives: Sequence[Path]) -> str:
    """Write an image's index; return its place. Raises :class:`FailedError` where archives differ in name or do not in
    architecture.
    """
    names = {name_in(archive) for archive in archives}
    if len(names) > 1:
        raise FailedError(f"the images have several names: {', '.join(sorted(names))}")
    (name,) = names
    call(buildah, "manifest", "create", name)
    for archive in archives:
        call(buildah, "manifest", "add", name, f"docker-archive:{archive}")
    if destination.startswith("docker://"):
        place = f"{destination}/{name.partition('/')[2]}"
    else:
        Path(destination).mkdir(parents=True, exist_ok=True)
        file = Path(destination, archives[0].name)
        file.unlink(missing_ok=True)
        place = f"oci-archive:{file}:{name}"
    call(buildah, "manifest", "push", "--quiet", "--all", name, place)
    return place


def call(buildah: Sequence[str], *arguments: str) -> None:
    """Run buildah. Raises :class:`FailedError`."""
    done = captured([*buildah, *arguments])
    if done.returncode != 0:
        raise failed(f"buildah {' '.join(arguments[:2])}", done)


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Join images of several architectures.")
    parser.add_argument("destination", help="docker://REGISTRY/PATH, or a folder")
    parser.add_argument("folders", nargs="+", type=Path, help="archives of one architecture each")
    chosen = parser.parse_args()
    return status_of(partial(join_all, chosen.destination, chosen.folders))


if __name__ == "__main__":
    sys.exit(main())
