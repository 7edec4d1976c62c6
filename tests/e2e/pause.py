"""The image of the container that holds a pod's namespaces: it sleeps. Made of the machine's own static busybox."""

import io
import shutil
import tarfile
from pathlib import Path

from e2e.node import PAUSE

from hack.images.archives import write_image


def write_pause(archive: Path) -> None:
    """Write the image. Raises ``FileNotFoundError`` where there is no busybox."""
    found = shutil.which("busybox")
    if found is None:
        raise FileNotFoundError("busybox")
    layer = archive.with_suffix(".layer")
    with tarfile.open(layer, "w") as out:
        entry = tarfile.TarInfo("bin/busybox")
        content = Path(found).read_bytes()
        entry.size, entry.mode = len(content), 0o755
        out.addfile(entry, io.BytesIO(content))
    write_image(archive, layer, PAUSE, {"Entrypoint": ["/bin/busybox", "sleep", "2147483647"]})
    layer.unlink()
