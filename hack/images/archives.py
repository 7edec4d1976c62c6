"""Images as archives, as of ``docker save``, made without a tool that builds images. Standard library only."""

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping
from pathlib import Path

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
EPOCH = "1970-01-01T00:00:00Z"


def write_image(archive: Path, layer: Path, name: str, config: Mapping[str, object]) -> None:
    """Write an image of one layer, the same for the same layer. ``config``: ``Env``, ``Entrypoint`` and so on."""
    with layer.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    machine = platform.machine()
    image = {
        "architecture": ARCHITECTURES.get(machine, machine),
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        "created": EPOCH,
        # Without a time, buildah would take none of its cached layers over this one.
        "history": [{"created": EPOCH, "created_by": "mmrouter"}],
    }
    text = json.dumps(image).encode()
    path = f"{hashlib.sha256(text).hexdigest()}.json"
    manifest = [{"Config": path, "RepoTags": [name], "Layers": [f"{digest}/layer.tar"]}]
    with tarfile.open(archive, "w") as out, layer.open("rb") as file:
        for entry, content in ((path, text), ("manifest.json", json.dumps(manifest).encode())):
            out.addfile(_entry(entry, len(content)), io.BytesIO(content))
        out.addfile(_entry(f"{digest}/layer.tar", layer.stat().st_size), file)


def _entry(path: str, size: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(path)
    entry.size = size
    return entry
