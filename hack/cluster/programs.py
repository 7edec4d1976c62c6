"""Make the control plane of the cluster tests: Kubernetes' own commands, from its Go modules. Prints their folder.

    python hack/kube_env.py            # makes it, or finds it ready; prints the folder with the commands
    python hack/kube_env.py --where    # prints the path only, makes nothing

The commands lie outside the checkout, in ``cluster`` of the cache (``vllm_env.py`` says where that is), and are built
under a lock, once: about 4 minutes on 2 cores, 15 seconds with Go's build cache, 0.35 GB. The version is that of
``kube/go.mod``. Go, etcd and openssl are used where they are found, and never installed: Debian bookworm's Go is too
old to build this. Go fetches the modules from where it is set up to fetch them. Exit status as of ``vllm_env.py``.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from vllm_env import CannotMakeError, FailedError, cache_dir, digest, failed, last_line, locked, main, note

MODULE = Path(__file__).with_name("kube")
COMMANDS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
FREE_GB = 4  # 0.35 GB stay; the rest is Go's modules and build cache
GO_SETTINGS = {"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly -trimpath -buildvcs=false", "GOWORK": "off"}
GO_PLACES = ("/usr/local/go/bin", "/usr/lib/go/bin")  # where installers put it that set no PATH


def version() -> str:
    """Return the version of Kubernetes that ``kube/go.mod`` asks for, ``1.35.4``."""
    found = re.search(r"^require k8s\.io/kubernetes v(\S+)$", (MODULE / "go.mod").read_text(), re.MULTILINE)
    assert found, "kube/go.mod names no version of k8s.io/kubernetes on a line of its own"
    return found[1]


def env_dir() -> Path:
    # With the recipe in its name: a checkout with another one may be running its tests from its own folder.
    return cache_dir() / "cluster" / f"{version()}-{recipe()[:8]}"


def recipe(*commands: str) -> str:
    """Return a digest of everything that decides what the folder holds."""
    files = ((MODULE / name).read_text() for name in ("go.mod", "go.sum"))
    return digest(*files, linker_flags(), *(commands or COMMANDS))


def linker_flags() -> str:
    """Return the flags without which the server would call itself v0.0.0."""
    major, minor, _ = version().split(".", 2)
    package = "k8s.io/component-base/version"
    named = {"gitVersion": f"v{version()}", "gitMajor": major, "gitMinor": minor}
    return " ".join(["-s", "-w", *(f"-X {package}.{name}={value}" for name, value in named.items())])


def make(folder: Path) -> None:
    """Build the commands unless they are there. Raises :class:`CannotMakeError`, :class:`FailedError`."""
    for name, package in (("etcd", "etcd-server"), ("openssl", "openssl")):
        if shutil.which(name) is None:
            raise CannotMakeError(f"there is no {name} here (Debian: {package})")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent / f"{folder.name}.lock"):
        stamp = folder / "mmrouter-recipe"
        if stamp.is_file() and stamp.read_text() == recipe():
            return
        go = find_go()
        free = shutil.disk_usage(folder.parent).free / 1e9
        if free < FREE_GB:
            raise CannotMakeError(f"{folder.parent} has {free:.1f} GB free, the build of Kubernetes needs {FREE_GB}")
        # A half-made folder is never mended: the stamp is written last, and without it everything is made anew.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        note(f"building Kubernetes {version()} into {folder} (once, up to 6 minutes)")
        for command in COMMANDS:
            build(go, command, folder)
        check(folder)
        stamp.write_text(recipe())


def find_go() -> str:
    """Return a Go that can build the module. Raises :class:`CannotMakeError`."""
    places = os.pathsep.join([os.environ.get("PATH", ""), *GO_PLACES])
    go = shutil.which("go", path=places)
    if go is None:
        raise CannotMakeError(f"there is no Go here to build Kubernetes {version()} with, and none in {cache_dir()}")
    wanted = re.search(r"^go (\d+)\.(\d+)", (MODULE / "go.mod").read_text(), re.MULTILINE)
    # An older Go would fetch a newer one by itself; a test does not bring compilers to a machine.
    said = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, check=False, env=go_env()).stdout
    found = re.match(r"go(\d+)\.(\d+)", said)
    if not (found and wanted) or tuple(map(int, found.groups())) < tuple(map(int, wanted.groups())):
        raise CannotMakeError(
            f"{go} is {said.strip() or 'broken'}, Kubernetes {version()} needs {wanted and wanted[0]}"
        )
    return go


def build(go: str, command: str, folder: Path) -> None:
    options = ["-ldflags", linker_flags(), "-o", f"{folder}/"]
    run_go([go, "build", *options, f"k8s.io/kubernetes/cmd/{command}"], f"go build of {command}", MODULE, go_env())


def install(go: str, package: str, flags: str, folder: Path) -> None:
    """Build the command ``package@version`` into a folder, with the linker's flags. Raises as :func:`run_go` does."""
    env = {**go_env(), "GOFLAGS": "-trimpath -buildvcs=false", "GOBIN": str(folder)}
    run_go([go, "install", "-ldflags", flags, package], f"go install of {package}", folder, env)


def run_go(command: list[str], what: str, folder: Path, env: dict[str, str]) -> None:
    """Run Go in a folder. Raises :class:`FailedError`, or :class:`CannotMakeError` where Go reaches no modules."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=env)
    if done.returncode != 0:
        error = failed(what, done)
        if why := unreached(command[0]):
            raise CannotMakeError(f"{why}: {error}")
        raise error


def unreached(go: str) -> str:
    """Return why Go reaches no modules, empty where it reaches them. For after a failure: it asks."""
    command = [go, "list", "-m", "golang.org/x/mod@latest"]
    with tempfile.TemporaryDirectory(prefix="mmrouter-go-") as folder:
        env = {**go_env(), "GOFLAGS": ""}
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=env)
    return "" if done.returncode == 0 else f"Go reaches no modules ({last_line(done.stderr)})"


def go_env() -> dict[str, str]:
    return {**os.environ, **GO_SETTINGS, "GOTOOLCHAIN": "local"}


def check(folder: Path) -> None:
    """Run one of the commands. Raises :class:`FailedError` when it is not what was asked for."""
    said = subprocess.run([folder / "kube-apiserver", "--version"], capture_output=True, text=True, check=False)
    if said.stdout.strip() != f"Kubernetes v{version()}":
        raise FailedError(f"the built kube-apiserver calls itself {said.stdout.strip() or last_line(said.stderr)!r}")


if __name__ == "__main__":
    sys.exit(main("the control plane of the cluster tests", env_dir(), make))
