"""Digests of a model folder's metadata files, to detect a router and an engine that read different ones."""

from pathlib import Path

from blake3 import blake3

NAMES = ("tokenizer.json", "tokenizer_config.json", "config.json", "preprocessor_config.json")
PATTERNS = ("chat_template*",)
"""Files that prompts depend on: token ids, templates, image geometry."""


def digests(folder: Path) -> dict[str, str]:
    """Return file name -> BLAKE3 (lower hex) of each metadata file in ``folder``; empty where there is none.

    Raises ``OSError`` when an existing file cannot be read.
    """
    if not folder.is_dir():
        return {}
    files = {folder / name for name in NAMES} | {path for pattern in PATTERNS for path in folder.glob(pattern)}
    return {path.name: blake3(path.read_bytes()).hexdigest() for path in sorted(files) if path.is_file()}


def hub_folder(cache: Path, model: str, revision: str) -> tuple[Path, str] | None:
    """Return (snapshot folder, commit) of a hub download, ``None`` while there is none.

    A hub cache holds ``models--ORG--NAME/refs/REVISION`` with a commit and ``snapshots/COMMIT``; a revision may be a
    commit itself.
    """
    home = cache / f"models--{model.replace('/', '--')}"
    reference = home / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    folder = home / "snapshots" / commit
    return (folder, commit) if commit and folder.is_dir() else None
