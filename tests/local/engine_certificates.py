"""Deployments whose engines serve TLS, and the Secret of their certificates in every pod."""

import socket
import ssl

from unit.router.certificates import certificate, trusting
from waiting import wait_for

NAME = "demo-engine.default.svc"


def serving_tls(resource: dict) -> tuple[dict, dict]:
    """Return a Secret with certificate 0, and the resource that uses it."""
    resource["metadata"]["name"] = "demo"
    resource["spec"]["engine"]["tls"] = {"secretName": "engines"}
    chain, key = (part.decode() for part in certificate(0, NAME))
    data = {"tls.crt": chain, "tls.key": key, "ca.crt": chain}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "engines"}, "stringData": data}, resource


def replace(deployment, volume: str, **contents: bytes) -> None:
    """Replace files of a Secret's volume in every pod: a kubelet does not rewrite them in place either."""
    folders = [folder for folder in deployment.folder.rglob(volume) if folder.is_dir()]
    assert folders
    for folder in folders:
        for name, content in contents.items():
            fresh = folder / f".{name}"
            fresh.write_bytes(content)
            fresh.rename(folder / name.replace("_", "."))


def trust(deployment, *numbers: int) -> None:
    """Replace the CA, and wait until every router has it."""
    routers = len(deployment.controls)
    before = deployment.metric("mmrouter_engine_tls_total", event="loaded")
    replace(deployment, "engine-ca", ca_crt=b"".join(certificate(number, NAME)[0] for number in numbers))
    wait_for(
        lambda: deployment.metric("mmrouter_engine_tls_total", event="loaded") == before + routers,
        60,
        "the CA is loaded",
    )


def shown(ip: str) -> bytes:
    """Return the certificate of a new connection to an engine."""
    plain = socket.create_connection((ip, 8000), timeout=60)
    context = trusting(*(certificate(number, NAME)[0] for number in range(3)))
    with context.wrap_socket(plain, server_hostname=NAME) as secure:
        return ssl.DER_cert_to_PEM_cert(secure.getpeercert(True)).encode()


def engines(deployment) -> list[str]:
    return [worker["ip"] for worker in deployment.state()["workers"]]
