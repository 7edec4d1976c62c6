"""The certificate of the ports for clients and gateways, loaded again when the mounted Secret changes."""

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Final

from mmrouter_lib.tls_context import WatchedContext, server_context

HANDSHAKE_SECONDS: Final = 10.0
SHUTDOWN_SECONDS: Final = 2.0  # how long a closed connection waits for the client's close_notify


class ServerCertificate(WatchedContext):
    """Chain and key in a folder (a Secret of type kubernetes.io/tls)."""

    def __init__(self, folder: Path, count: Callable[[str], None] = lambda event: None) -> None:
        """``count``: gets ``loaded``, ``refused`` and ``handshake_failed``. Raises ``CertificateError``."""
        self.pem = b"", b""
        """Key and chain as they are in the files, for servers that take no context."""
        super().__init__(folder, ("tls.crt", "tls.key"), self._serving, count)

    def _serving(self, chain: str, key: str) -> ssl.SSLContext:
        context = server_context(chain, key)
        context.set_alpn_protocols(["http/1.1"])
        self.pem = Path(key).read_bytes(), Path(chain).read_bytes()
        return context
