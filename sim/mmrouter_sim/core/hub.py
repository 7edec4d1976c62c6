"""A model's metadata in the cache of the hub, downloaded from the mirror that ``HF_ENDPOINT`` names.

A real engine downloads weights as well, and without a mirror from the hub itself; a simulated one needs neither.
"""

import json
import os
import urllib.request
from pathlib import Path
from urllib.parse import quote

from mmrouter_lib.model_folder import hub_folder

SUFFIXES = (".json", ".jinja", ".txt", ".model")
SECONDS = 30.0


def cached(model: str, revision: str | None) -> Path | None:
    """Return the folder of a model's snapshot in the cache."""
    snapshot = hub_folder(_cache(), model, revision or "main")
    return snapshot[0] if snapshot is not None else None


def download(model: str, revision: str | None) -> Path | None:
    """Download a model's metadata into the cache; ``None`` without a mirror. Raises ``OSError`` and ``ValueError``."""
    endpoint, name = os.environ.get("HF_ENDPOINT", "").rstrip("/"), revision or "main"
    if not endpoint or os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return None
    about = json.loads(_get(f"{endpoint}/api/models/{quote(model)}/revision/{quote(name, safe='')}"))
    repository, commit = _cache() / f"models--{model.replace('/', '--')}", str(about["sha"])
    part = repository / "snapshots" / f".{commit}"
    part.mkdir(parents=True, exist_ok=True)
    for file in (entry["rfilename"] for entry in about["siblings"]):
        if "/" not in file and file.endswith(SUFFIXES):
            (part / file).write_bytes(_get(f"{endpoint}/{quote(model)}/resolve/{commit}/{quote(file)}"))
    snapshot = part.rename(repository / "snapshots" / commit)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / name).write_text(commit)
    return snapshot


def _cache() -> Path:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub")


def _get(url: str) -> bytes:
    token = os.environ.get("HF_TOKEN", "")
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {token}"} if token else {})  # noqa: S310
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:  # noqa: S310 - a mirror's address, from the site
        content: bytes = answer.read()
        return content
