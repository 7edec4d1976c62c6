"""Build a base image for ``make images`` where no registry is reachable, from the machine's own Debian packages.

    python -m hack.images.base_image            # builds it, or finds it ready; prints the folder with base.tar
    python -m hack.images.base_image --where    # prints the folder only

The image is a minimal Debian of the machine's own release with its Python, from the mirror that apt is set up with, as
an archive that docker, podman and buildah load. It lies in ``images/base`` of the cache; the build takes about 1 minute
and 0.2 GB. Needs mmdebstrap, the mirror and, as mmdebstrap maps users, root. ``MMROUTER_ARCHITECTURE`` (``arm64``)
names another architecture than the machine's, whose programs QEMU has to run (Debian: qemu-user-static, arch-test); its
image lies in ``images/base-arm64``. Exit status: ``hack/build_once.py``.
"""

import hashlib
import io
import json
import os
import platform
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hack.build_once import CannotMakeError, build_once, cache_dir, captured, digest, failed, last_line, main

NAME = "localhost/mmrouter-base:1"
ARCHIVE = "base.tar"
PACKAGES = ("ca-certificates", "python3", "python3-venv")
LEFT_OUT = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/info/*")
SOURCES = ("sources.list", "sources.list.d/debian.sources", "sources.list.d/ubuntu.sources")
APT = Path("/etc/apt")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
FREE_GB = 2
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
EPOCH = "1970-01-01T00:00:00Z"


def env_dir() -> Path:
    return cache_dir() / "images" / "-".join(["base", *other_architecture()])


def recipe() -> str:
    return digest(NAME, *PACKAGES, *LEFT_OUT, release(), *(path.read_text() for path in sources()))


def architecture() -> str:
    """Return the architecture of the images, in the words of image indexes: by default the machine's own."""
    machine = platform.machine()
    return os.environ.get("MMROUTER_ARCHITECTURE") or ARCHITECTURES.get(machine, machine)


def other_architecture() -> list[str]:
    """Return :func:`architecture` in a list, which is empty where it is the machine's own."""
    chosen = architecture()
    return [] if chosen == ARCHITECTURES.get(platform.machine()) else [chosen]


def release() -> str:
    """Return the name of the machine's own release (``bookworm``), empty where there is none."""
    return platform.freedesktop_os_release().get("VERSION_CODENAME", "")


def sources() -> list[Path]:
    return [path for name in SOURCES if (path := APT / name).is_file()]


def make(folder: Path) -> None:
    """Build the image unless it is there. Raises :class:`CannotMakeError`, :class:`FailedError`."""
    if shutil.which("mmdebstrap") is None:
        raise CannotMakeError("there is no mmdebstrap here (Debian: mmdebstrap)")
    if os.geteuid() != 0:
        raise CannotMakeError("a base image is made by root")
    if not (release() and sources()):
        raise CannotMakeError("apt is not set up here as on a Debian or an Ubuntu")
    build_once(folder, recipe(), build, what="a base image (once, up to 3 minutes)", free_gb=FREE_GB)


def build(folder: Path) -> None:
    root = folder / "root.tar"
    bootstrap(root)
    name = "-".join([NAME, *other_architecture()])
    write_image(folder / ARCHIVE, root, name, {"Env": [f"PATH={PATH}"], "Cmd": ["/bin/sh"]})
    root.unlink()


def bootstrap(root: Path) -> None:
    excluded = [f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT]
    foreign = [f"--architectures={each}" for each in other_architecture()]
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(PACKAGES)}", *foreign, *excluded]
    done = captured(
        [*command, release(), str(root), *map(str, sources())], env={**os.environ, "SOURCE_DATE_EPOCH": "0"}
    )
    if done.returncode != 0:
        error = failed("mmdebstrap", done)
        if foreign and ("arch-test" in done.stderr or "executed natively" in done.stderr):
            why = f"this machine runs no programs of {architecture()} (Debian: qemu-user-static, arch-test)"
            raise CannotMakeError(f"{why}: {error}")
        if why := unreached():
            raise CannotMakeError(f"{why}: {error}")
        raise error


def unreached() -> str:
    """Return why apt reaches no mirror, empty where it reaches one. Tries to; called after a failure only."""
    with tempfile.TemporaryDirectory(prefix="mmrouter-apt-") as folder:
        for name in ("lists", "cache"):
            Path(folder, name, "partial").mkdir(parents=True)
        own = (f"--option=Dir::State::lists={folder}/lists", f"--option=Dir::Cache={folder}/cache")
        command = ["apt-get", *own, "--option=APT::Update::Error-Mode=any", "--option=APT::Sandbox::User=root"]
        done = captured([*command, "--quiet=2", "update"])
    return "" if done.returncode == 0 else f"apt reaches no mirror ({last_line(done.stderr)})"


def write_image(archive: Path, layer: Path, name: str, config: Mapping[str, object]) -> None:
    """Write an image of one layer as ``docker save`` does, the same for the same layer; ``config``: ``Env`` etc."""
    with layer.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    image = {
        "architecture": architecture(),
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        "created": EPOCH,
        # Without a time, buildah would take none of its cached layers over this one.
        "history": [{"created": EPOCH, "created_by": "mmrouter"}],
    }
    text = json.dumps(image).encode()
    path = f"{hashlib.sha256(text).hexdigest()}.json"
    manifest = [{"Config": path, "RepoTags": [name], "Layers": [f"{digest}/layer.tar"]}]
    with tarfile.open(archive, "w") as out, layer.open("rb") as file:
        for entry, content in ((path, text), ("manifest.json", json.dumps(manifest).encode())):
            out.addfile(_entry(entry, len(content)), io.BytesIO(content))
        out.addfile(_entry(f"{digest}/layer.tar", layer.stat().st_size), file)


def _entry(path: str, size: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(path)
    entry.size = size
    return entry


if __name__ == "__main__":
    sys.exit(main("the base image of the cluster tests", env_dir(), make))
