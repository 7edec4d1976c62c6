"""Build the wheel of ``native/``, the compiled form of the hot loops (docs/native.md). Prints its path.

    python -m hack.native_wheel              # builds it, or finds it ready
    python -m hack.native_wheel --where      # prints the folder only, builds nothing
    python -m hack.native_wheel --install    # builds it and installs it beside this interpreter
    python -m hack.native_wheel --lint       # rustfmt and clippy, unless these sources have passed before
    python -m hack.native_wheel --install --optional   # a machine that cannot build it is no failure

The wheel lies in ``native/DIGEST`` of the cache. The digest covers the sources and the compiler, so unchanged sources
are not built again. The build takes about 30 seconds on 2 cores, by the maturin of ``native/build.lock`` in an
environment of its own. The bytes of the wheel depend neither on the checkout's place nor on the time. Rust is used
where it is installed and never installed here.

Exit status: ``hack/build_once.py``; with ``--optional`` what this machine lacks is printed as ``not run: <reason>``,
and the status is 0.
"""

import argparse
import importlib.metadata
import inspect
import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path

from hack.build_once import (
    ROOT,
    STAMP,
    CannotMakeError,
    FailedError,
    build_once,
    cache_dir,
    captured,
    digest,
    failed,
    interpreter,
    is_stamped,
    last_line,
    locked,
    note,
    pip_install,
    quiet_env,
    run,
    status_of,
)

SOURCES = ROOT / "native"
NAME = "mmrouter-native"
RUST = (1, 85)
FREE_GB = 1
EPOCH = "315532800"  # 1980, where the time of a wheel's files begins
NO_REGISTRY = ("Unable to update", "failed to download", "failed to query", "failed to get", "network failure")
"""What cargo says where it reaches no registry, and not where something is wrong with what it asks for."""


def env_dir() -> Path:
    """Return the folder of the wheel, for the compiler of this machine. Raises :class:`CannotMakeError`."""
    return cache_dir() / "native" / recipe(find_rust())[:16]


def find_rust() -> dict[str, str]:
    """Return the environment in which cargo runs. Raises :class:`CannotMakeError` where there is none that will do."""
    home = Path(os.environ.get("CARGO_HOME") or Path.home() / ".cargo")
    for command in ("cargo", "rustc", "cc"):
        if shutil.which(command) is None:
            raise CannotMakeError(f"there is no {command}, which builds {NAME}")
    env = {**quiet_env(), "CARGO_TARGET_DIR": str(cache_dir() / "native" / "target")}
    # No panic and no symbol names a folder of this machine.
    env["RUSTFLAGS"] = f"--remap-path-prefix={home}=/cargo --remap-path-prefix={ROOT}=/mmrouter"
    version = version_of(env)
    match = re.search(r"rustc (\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < RUST:
        raise CannotMakeError(
            f"{NAME} is built with Rust {RUST[0]}.{RUST[1]} or newer, not with {last_line(version)!r}"
        )
    return env


def version_of(env: dict[str, str]) -> str:
    done = captured(["rustc", "-vV"], env=env)
    return done.stdout or done.stderr


def recipe(env: dict[str, str]) -> str:
    patterns = ("*.toml", "*.lock", "*.pyi", "src/**/*.rs")
    files = sorted(path for pattern in patterns for path in SOURCES.glob(pattern))
    parts = [text for path in files for text in (str(path.relative_to(SOURCES)), path.read_text())]
    return digest(*parts, version_of(env), inspect.getsource(find_rust), inspect.getsource(build), EPOCH)


def make(folder: Path) -> None:
    """Build the wheel unless it is there. Raises :class:`CannotMakeError`, :class:`FailedError`."""
    env = find_rust()

    def compile_wheel(folder: Path) -> None:
        fetch(env)
        build(env, builder(folder.parent), folder)

    build_once(folder, recipe(env), compile_wheel, what=f"{NAME} (once, about 30 seconds)", free_gb=FREE_GB)


def fetch(env: dict[str, str]) -> None:
    """Fetch the crates of ``Cargo.lock``. Raises :class:`CannotMakeError` where there is no registry for it."""
    done = captured(["cargo", "fetch", "--locked", f"--manifest-path={SOURCES / 'Cargo.toml'}"], env=env)
    if done.returncode != 0:
        error = failed("cargo fetch", done)
        if any(word in done.stderr for word in NO_REGISTRY):
            raise CannotMakeError(f"cargo reaches no registry: {error}")
        raise error


def builder(folder: Path) -> Path:
    """Make the environment of maturin, or find it ready. Raises :class:`CannotMakeError`, :class:`FailedError`."""
    lock = SOURCES / "build.lock"
    env, wanted = folder / "maturin", digest(lock.read_text(), interpreter())
    if not is_stamped(env / STAMP, wanted):
        shutil.rmtree(env, ignore_errors=True)
        try:
            run([sys.executable, "-m", "venv", str(env)], "python -m venv")
        except FailedError as error:
            raise CannotMakeError(str(error)) from error
        pip_install(
            str(env / "bin" / "python"), ("--require-hashes", f"--requirement={lock}"), "pip install of maturin"
        )
        (env / STAMP).write_text(wanted)
    return env / "bin" / "maturin"


def build(env: dict[str, str], maturin: Path, folder: Path) -> None:
    """Put the wheel into a folder. Raises :class:`FailedError`."""
    command = [str(maturin), "build", "--release", "--locked", "--offline", f"--interpreter={sys.executable}"]
    options = [f"--manifest-path={SOURCES / 'Cargo.toml'}", f"--out={folder}"]
    done = captured([*command, *options], env={**env, "SOURCE_DATE_EPOCH": EPOCH})
    if done.returncode != 0:
        raise failed("the build of the native wheel", done)
    wheel_in(folder)


def wheel_in(folder: Path) -> Path:
    """Return the wheel in a folder. Raises :class:`FailedError`."""
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FailedError(f"the build left {len(wheels)} wheels in {folder}")
    return wheels[0]


def install(folder: Path) -> None:
    """Build the wheel and install it beside this interpreter, unless it is there. Raises as :func:`make`."""
    make(folder)
    stamp = Path(sys.prefix) / NAME
    try:
        importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        stamp.unlink(missing_ok=True)
    if is_stamped(stamp, folder.name):
        return
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index", "--no-deps"]
    run([*pip, "--force-reinstall", str(wheel_in(folder))], "pip install of the native wheel")
    stamp.write_text(folder.name)


def lint(folder: Path) -> None:
    """Have rustfmt and clippy look at the sources. Raises :class:`CannotMakeError`, :class:`FailedError`."""
    env = find_rust()
    for tool in ("fmt", "clippy"):
        done = captured(["cargo", tool, "--version"], env=env)
        if done.returncode != 0:
            raise CannotMakeError(f"there is no cargo {tool}: {last_line(done.stderr)}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    stamp = folder.parent / "linted"
    with locked(folder.parent / "lock"):
        if is_stamped(stamp, folder.name):
            return
        fetch(env)
        manifest = f"--manifest-path={SOURCES / 'Cargo.toml'}"
        for command in (["fmt", manifest, "--check"], ["clippy", manifest, "--locked", "--", "--deny=warnings"]):
            done = captured(["cargo", *command], env=env)
            if done.returncode != 0:
                note(done.stdout)
                raise failed(f"cargo {command[0]}", done)
        stamp.write_text(folder.name)


def act(*, where: bool, installs: bool, lints: bool, optional: bool) -> None:
    """Do what the options request and print the wheel's path. Raises as :func:`make`."""
    try:
        folder = env_dir()
        if where:
            print(folder)
            return
        if lints:
            lint(folder)
            return
        (install if installs else make)(folder)
    except CannotMakeError as error:
        if not optional:
            raise
        note(f"{NAME}: not run: {error}")
        return
    print(wheel_in(folder))


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=f"Build the wheel of {NAME} and print its path.")
    parser.add_argument("--where", action="store_true", help="print the folder and build nothing")
    parser.add_argument("--install", action="store_true", help="install it beside this interpreter")
    parser.add_argument("--lint", action="store_true", help="check the sources with rustfmt and clippy")
    parser.add_argument("--optional", action="store_true", help="what cannot be on this machine is no failure")
    chosen = parser.parse_args()
    return status_of(
        partial(act, where=chosen.where, installs=chosen.install, lints=chosen.lint, optional=chosen.optional)
    )


if __name__ == "__main__":
    sys.exit(main())
