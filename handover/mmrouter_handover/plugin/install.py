"""Put the plugin into a folder, such as the volume that an engine's pod shares with our init container.

The folder holds the packages, and the metadata by which vLLM finds the plugin. Nothing in it depends on the machine or
on the release of Python.
"""

import os
import secrets
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mmrouter_handover
from mmrouter_handover.plugin.start import ENDPOINTS, OURS

_PACKAGE = Path(mmrouter_handover.__file__).parent


def install(folder: Path) -> list[str]:
    """Make ``folder`` hold the plugin and return the names of what was put there; again, it is made anew.

    Each name appears as a whole. Everybody may read it: engines run as users of their own. Raises ``OSError``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f".making-{secrets.token_hex(8)}"
    made.mkdir()
    try:
        shutil.copytree(_PACKAGE, made / _PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        release = _release()
        metadata = made / f"mmrouter_plugin-{release}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mmrouter-plugin\nVersion: {release}\n")
        endpoint = f"{OURS} = mmrouter_handover.plugin.endpoint:Handover"
        (metadata / "entry_points.txt").write_text(f"[{ENDPOINTS}]\n{endpoint}\n")
        names = sorted(path.name for path in made.iterdir())
        _open_to_all(made)
        for old in folder.glob("mmrouter_plugin-*.dist-info"):
            shutil.rmtree(old)
        for name in names:
            _replace(made / name, folder / name)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return names


def main(arguments: Sequence[str]) -> int:
    """``mmrouter plugin FOLDER``. Returns the exit status."""
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


def _release() -> str:
    try:
        return version("mmrouter-k8s")
    except PackageNotFoundError:  # run from a folder that it was put into
        return "0"


def _open_to_all(folder: Path) -> None:
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _replace(source: Path, target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    os.replace(source, target)
