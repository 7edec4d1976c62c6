"""Run an engine's command with the plugin: ``python3 -m mmrouter_handover.plugin.start vllm serve ...``.

``PYTHONPATH`` names the folder into which the plugin was put. vLLM loads an endpoint plugin only when ``VLLM_PLUGINS``
names it, and that variable is the allow-list of every group: naming ours alone would switch off the image's own. So all
of those that would have been loaded are named (docs/engine-facts/vllm.md#plugins). Where that fails, the command
runs as if this were not
here.
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
"""The one group whose members are loaded only when they are named."""
ASKED = "MMROUTER_START_INTERPRETER"
"""Set where the command's own interpreter runs this, so that it does not look for another one."""
SHEBANG_BYTES = 512


def allow_list(said: str | None, installed: Iterable[tuple[str, str]]) -> str:
    """Return the value of ``VLLM_PLUGINS`` that loads what would be loaded, and our plugin.

    ``said``: its value so far, ``None`` where it is unset: then everything is loaded but endpoint plugins.
    ``installed``: group and name of entry points, of any groups.
    """
    if said is None:
        names = [name for group, name in installed if group.startswith(GROUPS) and group != ENDPOINTS]
    else:
        names = [name for name in said.split(",") if name]
    return ",".join(dict.fromkeys([*names, OURS]))


def environment(environ: Mapping[str, str], installed: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the environment in which a command's vLLM loads the plugin."""
    return {**environ, VARIABLE: allow_list(environ.get(VARIABLE), installed)}


def entry_points() -> list[tuple[str, str]]:
    """Return group and name of every entry point that this interpreter sees."""
    return [(point.group, point.name) for found in distributions() for point in found.entry_points]


def interpreter(shebang: bytes) -> str | None:
    """Return the interpreter that a script's first bytes name, ``None`` where they name no Python by its path."""
    first = shebang.split(b"\n", 1)[0].decode(errors="replace")
    if not first.startswith("#!"):
        return None
    words = first[2:].split()
    return words[0] if words and "python" in os.path.basename(words[0]) else None


def main(command: list[str]) -> None:
    """Become the command. Leaves with status 2 where none is given."""
    if not command:
        sys.stderr.write("usage: python -m mmrouter_handover.plugin.start COMMAND [ARGUMENT...]\n")
        raise SystemExit(2)
    environ = dict(os.environ)
    try:
        # The plugins of the image are those that the command's own interpreter sees.
        script = shutil.which(command[0])
        other = interpreter(_head(script)) if script and ASKED not in environ else None
        if other and other != sys.executable and os.access(other, os.X_OK):
            again = [other, "-m", "mmrouter_handover.plugin.start", *command]
            os.execve(other, again, {**environ, ASKED: other})  # noqa: S606 - the same again, in our place
        environ.pop(ASKED, None)
        environ = environment(environ, entry_points())
    except Exception as error:  # the engine has to run
        sys.stderr.write(f"mmrouter: the plugin is not loaded: {error}\n")
    os.execvpe(command[0], command, environ)  # noqa: S606 - the engine's command, in our place


def _head(script: str) -> bytes:
    with Path(script).open("rb") as file:
        return file.read(SHEBANG_BYTES)


if __name__ == "__main__":
    main(sys.argv[1:])
