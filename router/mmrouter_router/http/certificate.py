"""The certificate of the client port, loaded again without a restart when the mounted Secret changes."""

import asyncio
import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Final

log = logging.getLogger("mmrouter.tls")

CHECK_SECONDS: Final = 1.0
HANDSHAKE_SECONDS: Final = 10.0
SHUTDOWN_SECONDS: Final = 2.0  # how long a closed connection waits for the client's close_notify
CHAIN, KEY = "tls.crt", "tls.key"

Signature = tuple[tuple[str, int, int, int], ...]  # path behind links, inode, modification time and size of both files


class CertificateError(Exception):
    """The chain or the key cannot be used; the message names the folder and the fault."""


class ServerCertificate:
    """Chain and key in a folder (a Secret of type kubernetes.io/tls). A connection keeps the one that it began with.

    A new certificate that cannot be used leaves the old one in place; it is tried again until it can be used.
    """

    def __init__(self, folder: Path, count: Callable[[str], None] = lambda event: None) -> None:
        """``count``: gets ``loaded``, ``refused`` and ``handshake_failed``. Raises :class:`CertificateError`."""
        self._folder, self._count = folder, count
        self._refused: tuple[Signature | None, str] | None = None
        self._loaded, self.context = _load(folder)
        self._count("loaded")

    def handshake_failed(self) -> None:
        self._count("handshake_failed")

    async def watch(self) -> None:
        """Load the files when they have changed, in a thread; does not return."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            await asyncio.to_thread(self.reload)

    def reload(self) -> None:
        """Load the files if they have changed."""
        signature = None
        try:
            signature = _signature(self._folder)
            if signature == self._loaded:
                return
            self._loaded, self.context = _load(self._folder)
        except (OSError, CertificateError) as error:
            fault = (signature, str(error))
            if fault != self._refused:
                self._refused = fault
                self._count("refused")
                log.error("the router keeps the certificate in use: %s", error)
            return
        self._refused = None
        self._count("loaded")
        log.info("a new certificate is in use for new connections")


def _load(folder: Path) -> tuple[Signature, ssl.SSLContext]:
    """Return a new context: a failure halfway would leave the old one with a chain and a key that do not match."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        signature = _signature(folder)
        # Both from one folder: a mounted Secret changes by a link to another one. No prompt for an encrypted key.
        context.load_cert_chain(signature[0][0], signature[1][0], password="")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise CertificateError(f"{folder}: {error.strerror if isinstance(error, OSError) else error}") from error
    return signature, context


def _signature(folder: Path) -> Signature:
    """Return the state of both files. Raises ``OSError``."""
    target = (folder / CHAIN).resolve().parent
    files = []
    for path in (target / CHAIN, target / KEY):
        status = path.stat()
        files.append((str(path), status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(files)
