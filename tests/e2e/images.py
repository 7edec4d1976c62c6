"""Images that are made here: the container that holds a pod's namespaces, and the real vLLM on CPU.

The former is the machine's own static busybox, which sleeps. The latter has all but vLLM's packages, which pods mount
from this machine. It is the base of the project's own images on a machine without a registry (``base_image.py``), with
what that lacks: the libraries of the system that PyTorch and vLLM load, and a virtual environment around the image's
own Python, because the machine's environment names an interpreter that no pod has. The environment's packages are
mounted where that one looks for its own. They were made for one minor version of Python, which the image must have.

An engine looks at the class of its model in a process of its own, which loads all of vLLM for it, and keeps what it
finds. The image has that already: it computes as long as the rest of a start, and a pod's folder for it is empty.
"""

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

from e2e.node import PAUSE

from hack.images.base_image import EPOCH, write_image

IMAGE = "localhost/mmrouter-vllm:1"
VENV = "/opt/vllm"
PATH = f"{VENV}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
KEPT = f"{VENV}/kept"
CLASS = "Qwen2VLForConditionalGeneration"
LOOK = f"from vllm.model_executor.models import ModelRegistry as all; all.models[{CLASS!r}].inspect_model_cls()"
LIBRARIES = ("libgomp.so.1", "libnuma.so.1")
COMMAND = f"""\
#!{VENV}/bin/python3
import sys
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":  # the engine's own processes import this file
    sys.exit(main())
"""


class CannotMakeError(Exception):
    """There is no such image on this machine; the text says why."""


def packages_of(env: Path) -> Path:
    (found,) = env.glob("lib/python3.*/site-packages")
    return found


def mount_path(env: Path) -> str:
    return f"{VENV}/{packages_of(env).relative_to(env)}"


def kept_by(env: Path, variables: Mapping[str, str]) -> Path:
    """Return what engines keep of the model's class: a file below their ``VLLM_CACHE_ROOT``, made where there is none.
    ``variables``: those of engines on this machine. An engine does not believe a file of another release.
    """
    folder, name = Path(variables["VLLM_CACHE_ROOT"]), f"modelinfos/*-{CLASS}.json"
    if not any(folder.glob(name)):
        subprocess.run([env / "bin" / "python", "-c", LOOK], check=True, env={**os.environ, **variables})
    return next(folder.glob(name))


def write_vllm_image(archive: Path, base: Path, env: Path, kept: Path) -> None:
    """Write the image :data:`IMAGE` for an environment over the one image of the archive ``base``. ``kept``: the file
    of :func:`kept_by`. Raises :class:`CannotMakeError` where the base has another Python, or this machine lacks a
    library.
    """
    layer = archive.with_suffix(".layer")
    try:
        _unpack_layer(base, layer)
        _add(layer, packages_of(env).parent.name, kept)
        config = [f"PATH={PATH}", f"VLLM_CACHE_ROOT={KEPT}", "PYTHONDONTWRITEBYTECODE=1"]
        write_image(archive, layer, IMAGE, {"Env": config, "WorkingDir": "/tmp"})
    finally:
        layer.unlink(missing_ok=True)


def _unpack_layer(base: Path, layer: Path) -> None:
    with tarfile.open(base) as image:
        manifest = image.extractfile("manifest.json")
        assert manifest is not None
        (name,) = json.load(manifest)[0]["Layers"]
        content = image.extractfile(name)
        assert content is not None
        with layer.open("wb") as out:
            shutil.copyfileobj(content, out)


def _add(layer: Path, python: str, kept: Path) -> None:
    libraries = system_libraries()
    with tarfile.open(layer, "a") as out:
        if f"usr/bin/{python}" not in {name.removeprefix("./") for name in out.getnames()}:
            raise CannotMakeError(f"the base image has no {python}, for which the engine's packages were made")
        for path in libraries.values():
            file(out, str(path), path.read_bytes())
        for name in ("python", "python3"):
            link = tarfile.TarInfo(f"{VENV}/bin/{name}".lstrip("/"))
            link.type, link.linkname = tarfile.SYMTYPE, f"/usr/bin/{python}"
            out.addfile(link)
        file(out, f"{VENV}/bin/vllm", COMMAND.encode(), 0o755)
        file(out, f"{KEPT}/{kept.parent.name}/{kept.name}", kept.read_bytes())
        file(out, f"{VENV}/pyvenv.cfg", b"home = /usr/bin\ninclude-system-site-packages = false\n")
        packages = tarfile.TarInfo(f"{VENV}/lib/{python}/site-packages".lstrip("/"))
        packages.type, packages.mode = tarfile.DIRTYPE, 0o755
        out.addfile(packages)


def file(out: tarfile.TarFile, path: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(path.lstrip("/"))
    entry.size, entry.mode = len(content), mode
    out.addfile(entry, io.BytesIO(content))


def write_derived_image(
    archive: Path, base: Path, name: str, files: Mapping[str, bytes], entrypoint: list[str]
) -> None:
    """Write an image like the one of the archive ``base``, with further files and another entrypoint."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as layer:
        for path, each in files.items():
            file(layer, path, each)
    digest = hashlib.sha256(content.getvalue()).hexdigest()
    with tarfile.open(base) as whole, tarfile.open(archive, "w") as out:
        (manifest,) = json.load(whole.extractfile("manifest.json") or io.BytesIO())
        image = json.load(whole.extractfile(manifest["Config"]) or io.BytesIO())
        image["config"]["Entrypoint"] = entrypoint
        image["rootfs"]["diff_ids"].append(f"sha256:{digest}")
        image["history"].append({"created": EPOCH, "created_by": "mmrouter"})
        for member in map(whole.getmember, manifest["Layers"]):
            out.addfile(member, whole.extractfile(member))
        text = json.dumps(image).encode()
        config, added = f"{hashlib.sha256(text).hexdigest()}.json", f"{digest}.tar"
        listed = {"Config": config, "RepoTags": [name], "Layers": [*manifest["Layers"], added]}
        for path, each in (
            (config, text),
            (added, content.getvalue()),
            ("manifest.json", json.dumps([listed]).encode()),
        ):
            file(out, path, each)


def system_libraries() -> Mapping[str, Path]:
    """Return name -> file of each library, as this machine's loader finds them. Raises :class:`CannotMakeError`."""
    listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    known = dict(reversed(re.findall(r"^\s(\S+) \(.*x86-64.*\) => (\S+)$", listed, re.MULTILINE)))
    for name in LIBRARIES:
        if name not in known:
            raise CannotMakeError(f"the loader of this machine finds no {name}")
    return {name: Path(known[name]).parent.resolve() / name for name in LIBRARIES}


def write_pause(archive: Path) -> None:
    found = shutil.which("busybox")
    if found is None:
        raise FileNotFoundError("busybox")
    layer = archive.with_suffix(".layer")
    with tarfile.open(layer, "w") as out:
        file(out, "bin/busybox", Path(found).read_bytes(), 0o755)
    write_image(archive, layer, PAUSE, {"Entrypoint": ["/bin/busybox", "sleep", "2147483647"]})
    layer.unlink()
