"""Run the Go of this machine: find it, build commands, download modules. A failed run names unreachable modules."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hack.build_once import ROOT, CannotMakeError, cache_dir, captured, failed, last_line

GO_SETTINGS = {
    "CGO_ENABLED": "0",
    "GOFLAGS": "-mod=readonly -trimpath -buildvcs=false",
    "GOWORK": "off",
    "GOGC": "800",  # a third less CPU than with 100, and up to twice the memory: 0.8 GB for the API's types
}
GO_FOLDERS = ("/usr/local/go/bin", "/usr/lib/go/bin")  # where installers put it that set no PATH


def find_go(wanted: str, what: str) -> str:
    """Return a Go of at least the version ``go 1.25`` that a program needs. Raises :class:`CannotMakeError`."""
    go = shutil.which("go", path=os.pathsep.join([os.environ.get("PATH", ""), *GO_FOLDERS]))
    if go is None:
        raise CannotMakeError(f"there is no Go here to build {what} with, and none in {cache_dir()}")
    require_go(go, wanted, what)
    return go


def require_go(go: str, wanted: str, what: str) -> None:
    """Raise :class:`CannotMakeError` unless Go has at least the version ``go 1.25`` that a program needs."""
    # An older Go would download a newer one by itself; tests install no compilers on a machine.
    output = captured([go, "env", "GOVERSION"], env=go_env()).stdout.strip()
    numbers = re.match(r"go(\d+)\.(\d+)", output)
    if not numbers or tuple(map(int, numbers.groups())) < tuple(map(int, wanted.split()[1].split("."))):
        raise CannotMakeError(f"{go} is {output or 'broken'}, {what} needs {wanted}")


def go_env() -> dict[str, str]:
    return {**os.environ, **GO_SETTINGS, "GOTOOLCHAIN": "local"}


def install(go: str, package: str, flags: str, folder: Path) -> None:
    """Build the command ``package@version`` into a folder, with the linker's flags. Raises as :func:`run_go` does."""
    env = {**go_env(), "GOFLAGS": "-trimpath -buildvcs=false", "GOBIN": str(folder)}
    run_go([go, "install", "-ldflags", flags, package], f"go install of {package}", folder, env)


def run_in_module(go: str, *commands: Sequence[str]) -> None:
    """Run commands of Go in a new module, which is removed. Raises as :func:`run_go` does."""
    env = {**go_env(), "GOFLAGS": "-trimpath -buildvcs=false"}
    with tempfile.TemporaryDirectory(prefix="mmrouter-go-") as name:
        for command in (("mod", "init", "made"), *commands):
            run_go([go, *command], f"go {command[0]} in a new module", Path(name), env)


def module_folder(go: str, module: str) -> Path:
    """Return where the files of ``module@version`` are. Raises as :func:`run_go` does."""
    env = {**go_env(), "GOFLAGS": ""}
    return Path(json.loads(run_go([go, "mod", "download", "-json", module], f"download of {module}", ROOT, env))["Dir"])


def run_go(command: list[str], what: str, folder: Path, env: dict[str, str]) -> str:
    """Run Go in a folder and return what it printed. Raises :class:`FailedError`, and :class:`CannotMakeError` where Go
    reaches no modules.
    """
    done = captured(command, cwd=folder, env=env)
    if done.returncode != 0:
        error = failed(what, done)
        if why := unreached(command[0]):
            raise CannotMakeError(f"{why}: {error}")
        raise error
    return done.stdout


def unreached(go: str) -> str:
    """Return why Go reaches no modules, empty where it reaches them. Tries to; called after a failure only."""
    with tempfile.TemporaryDirectory(prefix="mmrouter-go-") as folder:
        command = [go, "list", "-m", "golang.org/x/mod@latest"]
        done = captured(command, cwd=Path(folder), env={**go_env(), "GOFLAGS": ""})
    return "" if done.returncode == 0 else f"Go reaches no modules ({last_line(done.stderr)})"
