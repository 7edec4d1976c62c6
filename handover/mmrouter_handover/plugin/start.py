"""Run an engine's command with the plugin: ``python3 -m mmrouter_handover.plugin.start vllm serve ...``.

``PYTHONPATH`` names the folder with the installed plugin. vLLM loads an endpoint plugin only when ``VLLM_PLUGINS``
names it, and that variable is the allow-list of every group: naming only this plugin would disable the image's own. So
all plugins that would be loaded without it are named (docs/engine-facts/vllm.md#plugins). If that fails, the command
runs without the plugin.
"""

import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import distributions
from pathlib import Path

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


def environment(environ: Mapping[str, str], installed: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return an environment in which vLLM loads the plugin."""
    return {**environ, VARIABLE: allow_list(environ.get(VARIABLE), installed)}


def entry_points() -> list[tuple[str, str]]:
    """Return group and name of every entry point that this interpreter sees."""
    return [(point.group, point.name) for package in distributions() for point in package.entry_points]


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
        other = interpreter(_head(script)) if script and REEXECUTED not in environ else None
        if other and other != sys.executable and os.access(other, os.X_OK):
            again = [other, "-m", "mmrouter_handover.plugin.start", *command]
            os.execve(other, again, {**environ, REEXECUTED: other})  # noqa: S606 - the same command line
        environ.pop(REEXECUTED, None)
        environ = environment(environ, entry_points())
    except Exception as error:  # the engine must start anyway
        sys.stderr.write(f"mmrouter: the plugin is not loaded: {error}\n")
    os.execvpe(command[0], command, environ)  # noqa: S606 - the engine's command


def _head(script: str) -> bytes:
    with Path(script).open("rb") as file:
        return file.read(SHEBANG_BYTES)


if __name__ == "__main__":
    main(sys.argv[1:])
