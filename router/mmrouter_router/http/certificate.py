"""Certificates of the ports for clients and gateways: of a mounted Secret, loaded again when it changes, or our own."""

import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

from mmrouter_lib.tls_context import CertificateError, WatchedContext, server_context

KeyAndChain = tuple[bytes, bytes]
"""A private key and its certificate chain, in PEM."""

HANDSHAKE_SECONDS: Final = 10.0
OPENSSL_SECONDS: Final = 60.0
SHUTDOWN_SECONDS: Final = 2.0  # how long a closed connection waits for the client's close_notify


class ServerCertificate(WatchedContext):
    """Chain and key in a folder (a Secret of type kubernetes.io/tls)."""

    def __init__(self, folder: Path, count: Callable[[str], None] = lambda event: None) -> None:
        """``count``: gets ``loaded``, ``refused`` and ``handshake_failed``. Raises ``CertificateError``."""
        self.pem: KeyAndChain = b"", b""
        """What is in the files, for servers that take no context."""
        super().__init__(folder, ("tls.crt", "tls.key"), self._serving, count)

    def _serving(self, chain: str, key: str) -> ssl.SSLContext:
        context = server_context(chain, key)
        context.set_alpn_protocols(["http/1.1"])
        self.pem = Path(key).read_bytes(), Path(chain).read_bytes()
        return context


def self_signed(name: str) -> KeyAndChain:
    """Return a new P-256 key and its certificate for ``name``, made in memory by the command openssl.

    It encrypts and proves no identity. Raises ``CertificateError``.
    """
    kind = ("-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "3650")
    # Nothing of the machine's own configuration is needed, and it may be missing.
    command = ("openssl", "req", "-config", "/dev/null", *kind, "-subj", f"/CN={name}", "-keyout", "/dev/stdout")
    try:
        # The name is one argument, so no character of it needs quoting.
        made = subprocess.run(command, check=True, capture_output=True, timeout=OPENSSL_SECONDS).stdout  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or str(error).encode()
        raise CertificateError(
            f"none could be made for frontend.pickerTls: {output.decode(errors='replace')}"
        ) from error
    key, begin, chain = made.partition(b"-----BEGIN CERTIFICATE-----")
    return key, begin + chain
