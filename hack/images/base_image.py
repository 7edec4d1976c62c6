"""Make a base image for ``make images`` on a machine that reaches no registry: this Debian's own packages. Prints it.

    python hack/base_image.py            # makes it, or finds it ready; prints the folder with base.tar
    python hack/base_image.py --where    # prints the path only, makes nothing

It holds a minimal Debian of the machine's own release with its Python, from the mirror that apt is set up with, as an
archive that docker, podman and buildah load. It lies in ``images/base`` of the cache (``vllm_env.py`` says where that
is) and is made under a lock, once: about 1 minute, 0.2 GB. Needs mmdebstrap, the mirror and, as mmdebstrap maps users,
root. Exit status as of ``vllm_env.py``.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from archives import write_image
from vllm_env import CannotMakeError, cache_dir, digest, failed, last_line, locked, main, note

NAME = "localhost/mmrouter-base:1"
ARCHIVE = "base.tar"
PACKAGES = ("ca-certificates", "python3", "python3-venv")
LEFT_OUT = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/info/*")
SOURCES = ("sources.list", "sources.list.d/debian.sources", "sources.list.d/ubuntu.sources")
APT = Path("/etc/apt")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
FREE_GB = 2


def env_dir() -> Path:
    return cache_dir() / "images" / "base"


def recipe() -> str:
    """Return a digest of everything that decides what the image holds."""
    return digest(NAME, *PACKAGES, *LEFT_OUT, release(), *(path.read_text() for path in sources()))


def release() -> str:
    """Return the name of the machine's own release (``bookworm``), empty where there is none."""
    return platform.freedesktop_os_release().get("VERSION_CODENAME", "")


def sources() -> list[Path]:
    """Return where apt is told of the distribution's own mirror."""
    return [path for name in SOURCES if (path := APT / name).is_file()]


def make(folder: Path) -> None:
    """Build the image unless it is there. Raises :class:`CannotMakeError`, :class:`FailedError`."""
    if shutil.which("mmdebstrap") is None:
        raise CannotMakeError("there is no mmdebstrap here (Debian: mmdebstrap)")
    if os.geteuid() != 0:
        raise CannotMakeError("a base image is made by root")
    if not (release() and sources()):
        raise CannotMakeError("apt is not set up here as on a Debian or an Ubuntu")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent / f"{folder.name}.lock"):
        stamp = folder / "mmrouter-recipe"
        if stamp.is_file() and stamp.read_text() == recipe():
            return
        free = shutil.disk_usage(folder.parent).free / 1e9
        if free < FREE_GB:
            raise CannotMakeError(f"{folder.parent} has {free:.1f} GB free, the base image needs {FREE_GB}")
        # A half-made folder is never mended: the stamp is written last, and without it everything is made anew.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        note(f"making a base image in {folder} (once, up to 3 minutes)")
        root = folder / "root.tar"
        bootstrap(root)
        write_image(folder / ARCHIVE, root, NAME, {"Env": [f"PATH={PATH}"], "Cmd": ["/bin/sh"]})
        root.unlink()
        stamp.write_text(recipe())


def bootstrap(root: Path) -> None:
    excluded = [f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT]
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(PACKAGES)}", *excluded]
    done = subprocess.run(
        [*command, release(), str(root), *map(str, sources())],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "SOURCE_DATE_EPOCH": "0"},
    )
    if done.returncode != 0:
        error = failed("mmdebstrap", done)
        if why := unreached():
            raise CannotMakeError(f"{why}: {error}")
        raise error


def unreached() -> str:
    """Return why apt reaches no mirror, empty where it reaches one. For after a failure: it asks."""
    with tempfile.TemporaryDirectory(prefix="mmrouter-apt-") as folder:
        for name in ("lists", "cache"):
            Path(folder, name, "partial").mkdir(parents=True)
        own = (f"--option=Dir::State::lists={folder}/lists", f"--option=Dir::Cache={folder}/cache")
        command = ["apt-get", *own, "--option=APT::Update::Error-Mode=any", "--option=APT::Sandbox::User=root"]
        done = subprocess.run([*command, "--quiet=2", "update"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"apt reaches no mirror ({last_line(done.stderr)})"


if __name__ == "__main__":
    sys.exit(main("the base image of the cluster tests", env_dir(), make))
