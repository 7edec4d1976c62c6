"""TLS contexts of files in a mounted Secret, made again without a restart when the files change (docs/tls.md)."""

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

log = logging.getLogger("mmrouter.tls")

CHECK_SECONDS: Final = 1.0
CA: Final = "ca.crt"
_REASONS: Final = {10: "expired", 62: "name", 64: "name"}  # codes of X509_verify_cert_error_string(3)

Signature = tuple[tuple[str, int, int, int], ...]  # path behind links, inode, modification time and size of each file


class CertificateError(Exception):
    """A file of certificates or keys cannot be used; the message names the folder and the fault."""


class WatchedContext:
    """The context of some files. A connection keeps the one that it began with.

    New files that cannot be used leave the old context in place; they are tried again until they can be used.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        make: Callable[..., ssl.SSLContext],
        count: Callable[[str], None] = lambda event: None,
    ) -> None:
        """``make``: paths of the files -> context; raises ``OSError`` or ``ValueError``. ``count``: gets ``loaded`` and
        ``refused``. Raises :class:`CertificateError`.
        """
        self._folder, self._names, self._make, self.count = folder, names, make, count
        self._refused: tuple[Signature | None, str] | None = None
        self._loaded, self.context = self._load()
        self.count("loaded")

    @property
    def refused(self) -> bool:
        """Whether the files that are there now cannot be used, so that the context of earlier ones stays."""
        return self._refused is not None

    async def watch(self) -> None:
        """Load the files when they have changed, in a thread; does not return."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            await asyncio.to_thread(self.reload)

    def reload(self) -> None:
        """Load the files if they have changed."""
        signature = None
        try:
            signature = file_signature(self._folder, self._names)
            if signature == self._loaded:
                self._refused = None
                return
            self._loaded, self.context = self._load()
        except (OSError, CertificateError) as error:
            fault = (signature, str(error))
            if fault != self._refused:
                self._refused = fault
                self.count("refused")
                log.error("the loaded %s stays in use: %s", " with ".join(self._names), error)
            return
        self._refused = None
        self.count("loaded")
        log.info("a new %s is in use for new connections", " with ".join(self._names))

    def _load(self) -> tuple[Signature, ssl.SSLContext]:
        """Return a new context: a failure halfway would leave the old one with files that do not match."""
        try:
            signature = file_signature(self._folder, self._names)
            return signature, self._make(*(path for path, *_ in signature))
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            fault = error.strerror if isinstance(error, OSError) else error
            raise CertificateError(f"{self._folder}: {fault}") from error


class EngineTrust(WatchedContext):
    """Context that accepts a deployment's engines: certificates that the Secret's CA issued for one name."""

    def __init__(self, folder: Path, name: str, count: Callable[[str], None] = lambda event: None) -> None:
        """``name``: what :func:`engine_server_name` returned; empty: the host of each connection. Raises
        :class:`CertificateError`.
        """
        self.name = name
        super().__init__(folder, (CA,), _trusting, count)


def engine_server_name(name: str, namespace: str) -> str:
    """Return the DNS name that the certificates of a deployment's engines are for, whatever a pod's address is."""
    return f"{name}-engine.{namespace}.svc"


def refusal(error: BaseException) -> str:
    """Return why a handshake failed, as a metric label; empty for an error that is not of TLS."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _REASONS.get(error.verify_code, "untrusted")
    return "handshake_failed" if isinstance(error, ssl.SSLError) else ""


def file_signature(folder: Path, names: Sequence[str]) -> Signature:
    """Return the state of files of one version: a mounted Secret changes by a link to another folder.

    Raises ``OSError``.
    """
    target = (folder / names[0]).resolve().parent
    files = []
    for path in (target / name for name in names):
        status = path.stat()
        files.append((str(path), status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(files)


def server_context(chain: str, key: str) -> ssl.SSLContext:
    """Return a server's context with a certificate chain and its key. Raises ``OSError`` or ``ValueError``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.load_cert_chain(chain, key, password="")  # no prompt for an encrypted key
    return context


def _trusting(authority: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(authority)
    return context
