"""Build the images ``mmrouter/mmrouter`` and ``mmrouter/sim`` with docker, podman or buildah, whichever works here.

    python -m hack.images.build_images [--export DIR] [--storage DIR] [mmrouter] [sim]

Prints one line per image: its name and, with ``--export``, the archive (as of ``docker save``), which
``ctr -n k8s.io images import`` and ``kind load image-archive`` take. ``--storage`` keeps the layers of podman and
buildah in a folder of its own. What decides the build, beside the sources:

- ``MMROUTER_BASE_IMAGE``: the base, a name or the path of an archive as of ``docker save`` (``base_image.py`` makes
  one). By default the one that the Dockerfile names, from its registry.
- ``MMROUTER_EXTRAS``: more extras of pyproject.toml for ``mmrouter``, separated by blanks.
- ``MMROUTER_BUILDER``: the builder; by default the first that works.
- ``MMROUTER_ARCHITECTURE``: ``arm64`` or ``amd64``, by default the machine's. Programs of another architecture are run
  by QEMU (Debian: qemu-user-static). ``image_index.py`` joins the images of several.
- Rust on this machine: where the compiled form can be built (``native_wheel.py``), its wheel goes into ``mmrouter``,
  except for another architecture.
- ``SOURCE_DATE_EPOCH``: the time that the layers carry, in seconds since 1970; by default that of the last commit to
  ``requirements.lock``, so that the large layer stays what it is until its content changes.

The build fetches packages as this machine's pip does: its index, proxy and authority come to the build as secrets, and
so are in no layer and in no history. Exit status: ``hack/build_once.py``; a machine without a working builder or
without a reachable index ends with 3.
"""

import argparse
import json
import os
import shutil
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from hack import native_wheel
from hack.build_once import ROOT, CannotMakeError, FailedError, captured, failed, index_of, last_line, note, status_of
from hack.images.base_image import other_architecture

IMAGES = ("mmrouter", "sim")
REGISTRY = "docker.io"  # what a name without one means to Kubernetes; podman and buildah would say localhost
SECRETS = "/run/secrets"
PIP_OPTIONS = ("index-url", "extra-index-url", "trusted-host", "proxy", "timeout", "default-timeout", "retries")


Secrets = dict[str, Path]
"""Name below ``/run/secrets`` -> a file that a build step sees there and that no layer holds."""


class Builder:
    """Buildah, which needs no daemon and, with chroot isolation, no container runtime; Podman builds with it."""

    def __init__(self, program: str, storage: Path | None) -> None:
        self.program = program
        folders = [f"--root={storage / 'root'}", f"--runroot={storage / 'run'}"] if storage else []
        self._place = [*folders, "--storage-driver=overlay"] if storage else []

    def why_not(self) -> str:
        """Return why it cannot build here, empty where it can."""
        done = captured([self.program, *self._place, "images"])
        return "" if done.returncode == 0 else f"{self.program} does not work here: {last_line(done.stderr)}"

    def load(self, archive: Path) -> str:
        """Load the one image of an archive and return its name. Raises :class:`FailedError`."""
        self.call(*self._place, "pull", "--quiet", f"docker-archive:{archive}")
        return name_in(archive)

    def build(self, target: str, tag: str, arguments: dict[str, str], secrets: Secrets, epoch: str) -> None:
        """Build a stage of the Dockerfile. Raises :class:`FailedError`."""
        isolation = ["--isolation=chroot"] if self.program.endswith("buildah") else []
        options = [*isolation, "--layers", f"--timestamp={epoch}", *common(target, tag, arguments, secrets)]
        with tempfile.NamedTemporaryFile("w", suffix=".Dockerfile") as file:
            file.write(labelled((ROOT / "Dockerfile").read_text(), arguments))
            file.flush()
            self.call(*self._place, "build", "--format=docker", f"--file={file.name}", *options, ".")

    def export(self, tag: str, archive: Path) -> None:
        """Write an image to an archive. Raises :class:`FailedError`."""
        self.call(*self._place, "push", "--quiet", tag, f"docker-archive:{archive}:{tag}")

    def call(self, *arguments: str, **environment: str) -> None:
        """Run the program. Raises :class:`FailedError`."""
        done = captured([self.program, *arguments], cwd=ROOT, env={**os.environ, **environment})
        if done.returncode != 0:
            note(done.stdout)  # the steps that went well before
            raise failed(f"{Path(self.program).name} {next(each for each in arguments if each[0] != '-')}", done)


class Docker(Builder):
    """Docker with BuildKit; a client without a daemon does not count."""

    def why_not(self) -> str:
        done = captured([self.program, "info"])
        return "" if done.returncode == 0 else f"docker has no daemon: {last_line(done.stderr)}"

    def load(self, archive: Path) -> str:
        self.call("load", "--quiet", "--input", str(archive))
        return name_in(archive)

    def build(self, target: str, tag: str, arguments: dict[str, str], secrets: Secrets, epoch: str) -> None:
        options = common(target, tag, {**arguments, "SOURCE_DATE_EPOCH": epoch}, secrets)
        self.call("build", *options, ".", DOCKER_BUILDKIT="1")

    def export(self, tag: str, archive: Path) -> None:
        self.call("save", "--output", str(archive), tag)


def common(target: str, tag: str, arguments: dict[str, str], secrets: Secrets) -> list[str]:
    """Return the options that all builders take."""
    values = [f"--build-arg={name}={value}" for name, value in arguments.items()]
    files = [f"--secret=id={name},src={file}" for name, file in secrets.items()]
    platform = [f"--platform=linux/{each}" for each in other_architecture()]
    # As this machine reaches the index, so does the build: on a host's loopback, through its proxy.
    return ["--network=host", *platform, f"--target={target}", f"--tag={tag}", *values, *files]


BUILDERS: dict[str, type[Builder]] = {"docker": Docker, "podman": Builder, "buildah": Builder}


def labelled(dockerfile: str, arguments: dict[str, str]) -> str:
    """Return a Dockerfile with its arguments' values where it uses them as ``${NAME}`` between quotes: in its labels.
    Buildah takes a LABEL from its cache by the text of the line, whatever the arguments in it are worth now.
    """
    for name, value in arguments.items():
        dockerfile = dockerfile.replace(f'"${{{name}}}"', f'"{value}"')
    return dockerfile


def builder(storage: Path | None) -> Builder:
    """Return the first builder that works. Raises :class:`CannotMakeError` with what keeps each from it."""
    named = os.environ.get("MMROUTER_BUILDER")
    if named and named not in BUILDERS:
        raise CannotMakeError(f"MMROUTER_BUILDER is {named}, not one of {', '.join(BUILDERS)}")
    reasons = []
    for name in [named] if named else BUILDERS:
        program = shutil.which(name)
        if program is None:
            reasons.append(f"there is no {name}")
            continue
        builder = BUILDERS[name](program, storage)
        if not (reason := builder.why_not()):
            return builder
        reasons.append(reason)
    raise CannotMakeError("; ".join(reasons))


def name_in(archive: Path) -> str:
    """Return the name of the one image in an archive. Raises :class:`FailedError`."""
    try:
        with tarfile.open(archive) as content:
            manifest = content.extractfile("manifest.json")
            assert manifest is not None
            names = json.load(manifest)[0]["RepoTags"]
    except (tarfile.TarError, KeyError, OSError) as error:
        raise FailedError(f"{archive} is not an archive of an image: {error}") from error
    if not names:
        raise FailedError(f"the image in {archive} has no name")
    return str(names[0])


@contextmanager
def secrets() -> Iterator[Secrets]:
    """Write how this machine reaches its index to files that only this user reads, for as long as the block runs."""
    with tempfile.TemporaryDirectory(prefix="mmrouter-build-") as folder:
        options, files = pip_options(), {"pip": Path(folder, "pip")}
        certificates = options.pop("cert", "")
        if certificates and Path(certificates).is_file():
            files["ca"] = Path(shutil.copyfile(certificates, Path(folder, "ca")))
            options["cert"] = f"{SECRETS}/ca"
        # pip reads its file as a configuration that interpolates: a percent sign is written twice.
        lines = [f"{name} = {value.replace('%', '%%')}" for name, value in options.items()]
        files["pip"].write_text("\n".join(["[global]", *lines]) + "\n")
        yield files


def pip_options() -> dict[str, str]:
    """Return how this machine's pip reaches its index: its files and its variables, the latter first."""
    done = captured([sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"])
    if done.returncode != 0:
        note(f"pip tells nothing of its settings, the build has none: {last_line(done.stderr)}")
        return {}
    options: dict[str, str] = {}
    lines = [line.partition("=") for line in done.stdout.splitlines()]
    for level in ("global", "install", ":env:"):
        for name, _, value in lines:
            if name.rpartition(".")[0] == level and (option := name.rpartition(".")[2]) in (*PIP_OPTIONS, "cert"):
                options[option] = value.strip("'")
    return options


def git(*arguments: str) -> str:
    """Return what git says of this checkout, empty where it is none."""
    done = captured(["git", "-C", str(ROOT), *arguments])
    return done.stdout.strip() if done.returncode == 0 else ""


def version() -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def take_native() -> None:
    """Put the wheel of the compiled form where the Dockerfile looks for it, or none. Raises :class:`FailedError`."""
    folder = ROOT / "native" / "wheel"
    for old in folder.glob("*.whl"):
        old.unlink()
    if other := other_architecture():
        note(f"the image runs the form in Python: the compiled one is not built for {other[0]} here")
        return
    try:
        native_wheel.make(made := native_wheel.env_dir())
    except CannotMakeError as error:
        note(f"the image runs the form in Python: {error}")
        return
    wheel = native_wheel.wheel_in(made)
    shutil.copyfile(wheel, folder / wheel.name)


def build_all(images: Sequence[str], export: Path | None, storage: Path | None) -> None:
    """Build images and print their names. Raises :class:`CannotMakeError`, :class:`FailedError`."""
    program = builder(storage)
    arguments = {"VERSION": version(), "REVISION": git("rev-parse", "HEAD")}
    if base := os.environ.get("MMROUTER_BASE_IMAGE"):
        arguments["MMROUTER_BASE_IMAGE"] = program.load(Path(base)) if Path(base).is_file() else base
    if extras := os.environ.get("MMROUTER_EXTRAS"):
        arguments["MMROUTER_EXTRAS"] = extras
    epoch = os.environ.get("SOURCE_DATE_EPOCH") or git("log", "-1", "--format=%ct", "--", "requirements.lock") or "0"
    take_native()
    with secrets() as files:
        for image in images:
            tag = f"{REGISTRY}/mmrouter/{image}:{version()}"
            note(f"building {tag} with {program.program}")
            with index_of(sys.executable):
                program.build(image, tag, arguments, files, epoch)
            if export is None:
                print(tag, flush=True)
                continue
            export.mkdir(parents=True, exist_ok=True)
            archive = export / f"{image}.tar"
            archive.unlink(missing_ok=True)  # an archive would be added to
            program.export(tag, archive)
            print(tag, archive, flush=True)


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Build the project's images.")
    parser.add_argument("images", nargs="*", choices=[*IMAGES, []], help="by default all")
    parser.add_argument("--export", type=Path, metavar="DIR", help="write an archive of each image into DIR")
    parser.add_argument("--storage", type=Path, metavar="DIR", help="where podman and buildah keep layers")
    chosen = parser.parse_args()
    return status_of(partial(build_all, chosen.images or IMAGES, chosen.export, chosen.storage))


if __name__ == "__main__":
    sys.exit(main())
