"""Install the plugin into a folder, and run an engine's command with it.

``python3 -m mmrouter_handover.plugin.start vllm serve ...`` with the folder in ``PYTHONPATH``. The folder, such as the
volume that an engine's pod shares with the init container, contains the package and the metadata by which vLLM finds
the plugin. It does not depend on the machine or on the Python release.

vLLM loads an endpoint plugin only when ``VLLM_PLUGINS`` names it, and that variable is the allow-list of every group:
naming only this plugin would disable the image's own. So all plugins that would be loaded without it are named
(docs/engine-facts/vllm.md#plugins). If that fails, the command runs without the plugin.
"""

import os
import secrets
import shutil
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

import mmrouter_handover
from mmrouter_handover.plugin import PROVED_RELEASES

VARIABLE = "VLLM_PLUGINS"
OURS = "mmrouter"
GROUPS = "vllm."
ENDPOINTS = "vllm.endpoint_plugins"
"""The only group whose members are loaded only if they are named."""
REEXECUTED = "MMROUTER_START_INTERPRETER"
"""Set when the command's own interpreter runs this module, so that it does not switch again."""
SHEBANG_BYTES = 512


def allow_list(current: str | None, installed: Iterable[tuple[str, str]]) -> str:
    """Return the value of ``VLLM_PLUGINS`` that adds this plugin to those that are loaded anyway.

    ``current``: its value so far; ``None`` if unset, which loads everything but endpoint plugins.
    ``installed``: group and name of entry points, of any group.
    """
    if current is None:
        names = [name for group, name in installed if group.startswith(GROUPS) and group != ENDPOINTS]
    else:
        names = [name for name in current.split(",") if name]
    return ",".join(dict.fromkeys([*names, OURS]))


def interpreter(shebang: bytes) -> str | None:
    """Return the Python interpreter in a script's shebang line, or ``None`` if it has no path to one."""
    first = shebang.split(b"\n", 1)[0].decode(errors="replace")
    if not first.startswith("#!"):
        return None
    words = first[2:].split()
    return words[0] if words and "python" in os.path.basename(words[0]) else None


def main(command: list[str]) -> None:
    """Execute the command in place of this process. Exits with status 2 without a command."""
    if not command:
        sys.stderr.write("usage: python -m mmrouter_handover.plugin.start COMMAND [ARGUMENT...]\n")
        raise SystemExit(2)
    environ = dict(os.environ)
    try:
        # Use the command's own interpreter, which sees the image's plugins.
        script = shutil.which(command[0])
        other = None
        if script and REEXECUTED not in environ:
            with open(script, "rb") as file:
                other = interpreter(file.read(SHEBANG_BYTES))
        if other and other != sys.executable and os.access(other, os.X_OK):
            again = [other, "-m", "mmrouter_handover.plugin.start", *command]
            os.execve(other, again, {**environ, REEXECUTED: other})  # noqa: S606 - the same command line
        environ.pop(REEXECUTED, None)
        installed = [(point.group, point.name) for package in distributions() for point in package.entry_points]
        environ[VARIABLE] = allow_list(environ.get(VARIABLE), installed)
    except Exception as error:  # the engine must start anyway
        sys.stderr.write(f"mmrouter: the plugin is not loaded: {error}\n")
    os.execvpe(command[0], command, environ)  # noqa: S606 - the engine's command


def install(folder: Path) -> list[str]:
    """Install or replace the plugin in ``folder``; return the names of the entries created.

    Each entry appears atomically and is world-readable, because engines run as other users. Raises ``OSError``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    staging = folder / f".new-{secrets.token_hex(8)}"
    staging.mkdir()
    try:
        package = Path(mmrouter_handover.__file__).parent
        shutil.copytree(package, staging / package.name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        try:
            release = version("mmrouter-k8s")
        except PackageNotFoundError:  # run from an installed folder
            release = "0"
        metadata = staging / f"mmrouter_plugin-{release}.dist-info"
        metadata.mkdir()
        proved = f"Requires-External: vllm ({' || '.join(PROVED_RELEASES)})"
        lines = ("Metadata-Version: 2.1", "Name: mmrouter-plugin", f"Version: {release}", proved)
        (metadata / "METADATA").write_text("\n".join(lines) + "\n")
        endpoint = f"{OURS} = mmrouter_handover.plugin.endpoint:Handover"
        (metadata / "entry_points.txt").write_text(f"[{ENDPOINTS}]\n{endpoint}\n")
        names = sorted(path.name for path in staging.iterdir())
        for path in staging.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        for old in folder.glob("mmrouter_plugin-*.dist-info"):
            shutil.rmtree(old)
        for name in names:
            if (folder / name).is_dir() and not (folder / name).is_symlink():
                shutil.rmtree(folder / name)
            os.replace(staging / name, folder / name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return names


def install_command(arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stderr.write("usage: mmrouter plugin FOLDER\n")
        return 2
    try:
        names = install(Path(arguments[0]))
    except OSError as error:
        sys.stderr.write(f"mmrouter: {error.filename or arguments[0]} cannot be written: {error.strerror}\n")
        return 1
    sys.stdout.write(f"{arguments[0]}: {', '.join(names)}\n")
    return 0


if __name__ == "__main__":
    main(sys.argv[1:])
