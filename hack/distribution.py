"""Build what a release publishes: sdist, wheels, the chart, bills of materials, checksums and the provenance.

    python -m hack.distribution [DIR]     # `make dist`; DIR is dist/

The content is that of the last commit, not of the working tree, and carries the commit's time: the same commit and the
same tools give the same bytes. The wheel of the compiled form is left out where this machine cannot build it. Images
have a tool of their own (``hack/images/build_images.py``). Exit status: ``hack/build_once.py``.
"""

import argparse
import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from hack import native_wheel
from hack.build_once import ROOT, CannotMakeError, FailedError, captured, failed, note, quiet_env, status_of
from mmrouter_lib import __version__

CHART = "charts/mmrouter"
IMAGE = b"mmrouter/mmrouter"
LEFT_OUT = {".helmignore"}
CHART_CONFIG = "application/vnd.cncf.helm.config.v1+json"
CHART_LAYER = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CHECKSUMS, PROVENANCE = "SHA256SUMS", "provenance.intoto.json"
BUILD_TYPE = "https://mmrouter.io/make-dist/v1"


def git(*arguments: str) -> str:
    """Return what git prints. Raises :class:`FailedError`."""
    done = captured(["git", "-C", str(ROOT), *arguments])
    if done.returncode != 0:
        raise failed(f"git {arguments[0]}", done)
    return done.stdout.strip()


def export(commit: str, folder: Path) -> None:
    """Write the files of a commit into a folder. Raises :class:`FailedError`."""
    done = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=False)
    if done.returncode != 0:
        raise FailedError(f"git archive failed: {done.stderr.decode(errors='replace')}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")


def build_python(source: Path, out: Path, epoch: int) -> None:
    """Build sdist and wheel with the build backend of this environment. Raises :class:`FailedError`."""
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(out)]
    done = captured(command, cwd=source, env={**quiet_env(), "SOURCE_DATE_EPOCH": str(epoch)})
    if done.returncode != 0:
        raise failed("hatchling build", done)


def copy_native(out: Path) -> None:
    """Build the wheel of the compiled form and copy it. Raises :class:`FailedError`."""
    try:
        folder = native_wheel.env_dir()
        native_wheel.make(folder)
    except CannotMakeError as error:
        note(f"{native_wheel.NAME}: not run: {error}")
    else:
        shutil.copyfile(wheel := native_wheel.wheel_in(folder), out / wheel.name)


def packed(files: Mapping[str, bytes], epoch: int) -> bytes:
    """Return a tar archive with these files in this order, which belong to root and are all of one time."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.mode = len(content), epoch, 0o644
            archive.addfile(entry, io.BytesIO(content))
    return made.getvalue()


def chart_files(source: Path) -> dict[str, bytes]:
    """Return the files of the chart below its name, ``Chart.yaml`` first; links are followed.

    ``MMROUTER_REGISTRY``: where the release pushes its images, which the chart names then.
    """
    folder = source / CHART
    files = {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    if registry := os.environ.get("MMROUTER_REGISTRY"):
        for path in (Path("Chart.yaml"), Path("values.yaml")):
            files[path] = files[path].replace(IMAGE, registry.encode() + b"/" + IMAGE)
    first = sorted(files, key=lambda path: (path.name != "Chart.yaml", path))
    return {f"{folder.name}/{path}": files[path] for path in first if path.name not in LEFT_OUT}


def build_chart(source: Path, out: Path, epoch: int) -> None:
    """Write the chart as helm packages it, and as an archive of an OCI image layout, which registries take."""
    about = yaml.safe_load((source / CHART / "Chart.yaml").read_text())
    layer = gzip.compress(packed(chart_files(source), epoch), mtime=epoch)
    (out / f"{about['name']}-{about['version']}.tgz").write_bytes(layer)
    blobs = {CHART_CONFIG: json.dumps(about, sort_keys=True).encode(), CHART_LAYER: layer}
    config, content = (described(media_type, blob) for media_type, blob in blobs.items())
    version = {"org.opencontainers.image.version": about["version"]}
    head = {"schemaVersion": 2, "mediaType": OCI_MANIFEST}
    manifest = json.dumps({**head, "config": config, "layers": [content], "annotations": version}).encode()
    reference = described(OCI_MANIFEST, manifest) | {
        "annotations": {"org.opencontainers.image.ref.name": about["version"]}
    }
    layout = {
        "oci-layout": json.dumps({"imageLayoutVersion": "1.0.0"}).encode(),
        "index.json": json.dumps({"schemaVersion": 2, "manifests": [reference]}).encode(),
    }
    layout |= {f"blobs/sha256/{digest_of(blob)}": blob for blob in (*blobs.values(), manifest)}
    (out / f"{about['name']}-{about['version']}.oci.tar").write_bytes(packed(layout, epoch))


def described(media_type: str, blob: bytes) -> dict[str, Any]:
    """Return an OCI descriptor."""
    return {"mediaType": media_type, "digest": f"sha256:{digest_of(blob)}", "size": len(blob)}


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def build_bills(source: Path, out: Path) -> None:
    """Write the bills of materials. Raises :class:`FailedError`."""
    done = captured([sys.executable, "-m", "hack.supply_chain.bill_of_materials", str(out)], cwd=source)
    if done.returncode != 0:
        raise failed("the bill of materials", done)


def provenance(commit: str, source: Path, files: Iterable[Path]) -> dict[str, Any]:
    """Return an in-toto statement with SLSA's predicate: which commit and lock these files were made from."""
    subjects = [{"name": file.name, "digest": {"sha256": digest_of(file.read_bytes())}} for file in files]
    lock = digest_of((source / "requirements.lock").read_bytes())
    materials = [
        {"name": "source", "digest": {"gitCommit": commit}},
        {"name": "requirements.lock", "digest": {"sha256": lock}},
    ]
    definition = {
        "buildType": BUILD_TYPE,
        "externalParameters": {"version": __version__, "commit": commit},
        "resolvedDependencies": materials,
    }
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subjects,
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": definition,
            "runDetails": {"builder": {"id": os.environ.get("MMROUTER_BUILDER_ID", BUILD_TYPE)}},
        },
    }


def build(out: Path) -> None:
    """Build everything into an empty folder. Raises :class:`FailedError`."""
    commit, epoch = git("rev-parse", "HEAD"), int(git("log", "-1", "--format=%ct"))
    if git("status", "--porcelain"):
        note("the working tree has changes, which are no part of what is built")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="mmrouter-dist-") as folder:
        source = Path(folder)
        export(commit, source)
        build_python(source, out, epoch)
        copy_native(out)
        build_chart(source, out, epoch)
        build_bills(source, out)
        statement = provenance(commit, source, sorted(out.iterdir()))
    (out / PROVENANCE).write_text(json.dumps(statement, indent=1) + "\n")
    sums = [f"{digest_of(file.read_bytes())}  {file.name}\n" for file in sorted(out.iterdir())]
    (out / CHECKSUMS).write_text("".join(sums))
    print("".join(sums), end="")


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Build what a release publishes.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist", metavar="DIR")
    return status_of(partial(build, parser.parse_args().folder.resolve()))


if __name__ == "__main__":
    sys.exit(main())
