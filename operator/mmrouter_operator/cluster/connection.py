"""How to reach the cluster: one configuration for the client and for kopf's watches."""

import os
from pathlib import Path

import kopf
import yaml
from kubernetes.aio import config
from kubernetes.aio.client.configuration import Configuration

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

NO_KUBECONFIG = (yaml.YAMLError, TypeError, ValueError, KeyError, AttributeError)
"""What the client library raises for a file that is no kubeconfig at all: it takes for granted that it is one."""


class ConnectError(Exception):
    """There is no usable configuration; the message says what was looked for."""


async def load(kubeconfig: Path | None) -> Configuration:
    """Read ``kubeconfig``; without one, the pod's service account, else ``$KUBECONFIG`` or ``~/.kube/config``.

    Raises :class:`ConnectError`.
    """
    configuration = Configuration()
    try:
        if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ and (_ACCOUNT / "token").exists():
            config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
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


async def credentials(configuration: Configuration) -> kopf.ConnectionInfo:
    """Return what kopf connects with now. It asks again when the server no longer takes it: tokens are short-lived."""
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
