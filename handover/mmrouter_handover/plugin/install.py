"""Install the plugin into a folder, such as the volume that an engine's pod shares with the init container.

The folder contains the package, and the metadata by which vLLM finds the plugin. It does not depend on the machine or
on the Python release.
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
    """Install or replace the plugin in ``folder``; return the names of the entries created.

    Each entry appears atomically and is world-readable, because engines run as other users. Raises ``OSError``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    staging = folder / f".new-{secrets.token_hex(8)}"
    staging.mkdir()
    try:
        shutil.copytree(_PACKAGE, staging / _PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        release = _release()
        metadata = staging / f"mmrouter_plugin-{release}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mmrouter-plugin\nVersion: {release}\n")
        endpoint = f"{OURS} = mmrouter_handover.plugin.endpoint:Handover"
        (metadata / "entry_points.txt").write_text(f"[{ENDPOINTS}]\n{endpoint}\n")
        names = sorted(path.name for path in staging.iterdir())
        _open_to_all(staging)
        for old in folder.glob("mmrouter_plugin-*.dist-info"):
            shutil.rmtree(old)
        for name in names:
            _replace(staging / name, folder / name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
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
    except PackageNotFoundError:  # run from an installed folder
        return "0"


def _open_to_all(folder: Path) -> None:
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _replace(source: Path, target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    os.replace(source, target)
