"""How the operator reaches the cluster: the client's configuration, and kopf's credentials from it."""

import os
from pathlib import Path

import kopf
import yaml
from kubernetes.aio import config
from kubernetes.aio.client.configuration import Configuration

from mmrouter_kube.in_cluster_config import in_cluster

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

NO_KUBECONFIG = (yaml.YAMLError, TypeError, ValueError, KeyError, AttributeError)
"""What the client library raises for a file that is not a kubeconfig."""


class ConnectError(Exception):
    """There is no usable configuration; the message names the file."""


async def load(kubeconfig: Path | None) -> Configuration:
    """Read ``kubeconfig``; without one, the pod's service account, else ``$KUBECONFIG`` or ``~/.kube/config``.

    Raises :class:`ConnectError`.
    """
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    configuration = Configuration()
    try:
        if kubeconfig is None and host and (_ACCOUNT / "token").exists():
            return in_cluster(host, os.environ.get("KUBERNETES_SERVICE_PORT", "443"), _ACCOUNT)
        if kubeconfig is not None and not kubeconfig.is_file():
            raise ConnectError(f"no way to the cluster: there is no file {kubeconfig}")
        path = str(kubeconfig) if kubeconfig is not None else None
        await config.load_kube_config(path, client_configuration=configuration)  # type: ignore[no-untyped-call]
    except (config.ConfigException, OSError) as error:
        raise ConnectError(f"no way to the cluster: {error}") from error
    except NO_KUBECONFIG as error:
        which = kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
        raise ConnectError(
            f"no way to the cluster: {which} is no kubeconfig: {' '.join(str(error).split())}"
        ) from error
    return configuration


def own_namespace() -> str:
    """Return the namespace that this process runs in, ``default`` outside of a cluster."""
    try:
        return (_ACCOUNT / "namespace").read_text().strip() or "default"
    except OSError:
        return os.environ.get("POD_NAMESPACE", "default")


async def kopf_credentials(configuration: Configuration) -> kopf.ConnectionInfo:
    """Return kopf's credentials. kopf asks for new ones when the server refuses a token: tokens are short-lived."""
    header = (
        await configuration.get_api_key_with_prefix("BearerToken") if "BearerToken" in configuration.api_key else ""
    )
    token = header.partition(" ")[2] if header else None
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        ca_data=configuration.ca_cert_data,
        insecure=not configuration.verify_ssl,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        scheme="Bearer" if token else None,
        token=token,
        proxy_url=configuration.proxy,
    )
