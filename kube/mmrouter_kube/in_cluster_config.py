"""Client configuration of a pod: the API server's address and the pod's service account."""

from pathlib import Path

from kubernetes.aio.client.configuration import Configuration


def in_cluster(host: str, port: str, folder: Path) -> Configuration:
    """Return the configuration for the API server at ``host:port``.

    ``folder`` holds the service account's ``token`` and ``ca.crt``. The token is read for every request, because the
    kubelet replaces the file before the token in it expires. Raises ``OSError`` if it cannot be read.
    """
    address = f"[{host}]" if ":" in host else host
    configuration = Configuration(host=f"https://{address}:{port}", ssl_ca_cert=str(folder / "ca.crt"))

    def read_token(into: Configuration) -> None:
        into.api_key["BearerToken"] = f"Bearer {(folder / 'token').read_text().strip()}"

    read_token(configuration)
    configuration.refresh_api_key_hook = read_token  # type: ignore[assignment]
    return configuration
