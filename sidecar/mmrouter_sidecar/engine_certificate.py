"""Copies the engine's certificate and key out of the mounted Secret, into files that are rewritten in place.

Engines watch the files of their certificate by inode, so they notice the first change of a mounted Secret only
(docs/engine-facts/vllm.md#tls). This process runs beside every engine with TLS, in a container of its own, so that no
other one mounts the key. Its variables MMROUTER_ENGINE_SECRET and MMROUTER_ENGINE_TLS name both folders.
"""

import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

from mmrouter_lib.tls_context import CHECK_SECONDS, Signature, file_signature, server_context
from mmrouter_sidecar import log_to_stderr

log = logging.getLogger("mmrouter.tls")

NAMES: Final = ("tls.crt", "tls.key")


class CertificateCopy:
    """The copied pair. One that cannot be used is not copied; it is tried again when it changes."""

    def __init__(self, source: Path, target: Path) -> None:
        self._source, self._target = source, target
        self._seen: Signature | None = None
        self._fault = ""

    def update(self) -> None:
        """Copy the pair if it has changed and can be used."""
        try:
            signature = file_signature(self._source, NAMES)
            if signature == self._seen:
                return
            paths = [path for path, *_ in signature]
            server_context(*paths)
            contents = [Path(path).read_bytes() for path in paths]
        except (OSError, ValueError) as error:
            if str(error) != self._fault:
                self._fault = str(error)
                log.error("the engine keeps its certificate: %s: %s", self._source, error)
            return
        # Engines read both files again some 50 ms after the last change of either.
        for name, content in zip(NAMES, contents, strict=True):
            copy = self._target / name
            copy.touch(mode=0o640)
            copy.write_bytes(content)
        self._seen, self._fault = signature, ""
        log.info("the engine has a new certificate")


def main() -> int:
    """Run until SIGTERM. Exit status 2: a variable is not set."""
    log_to_stderr()
    # The first process of a container has no default action for this signal: the pod would end by its grace period.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())
    try:
        source, target = (Path(os.environ[name]) for name in ("MMROUTER_ENGINE_SECRET", "MMROUTER_ENGINE_TLS"))
    except KeyError as error:
        log.error("configuration: %s is not set", error.args[0])
        return 2
    copy = CertificateCopy(source, target)
    while True:
        copy.update()
        time.sleep(CHECK_SECONDS)
