"""The keys of a test's control plane: an authority, certificates of servers and clients, the key that signs tokens."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

DAYS = "30"
CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def make_keys(folder: Path, address: str, also: Sequence[str] = ()) -> None:
    """Write ``ca.crt``, ``apiserver.{crt,key}`` and ``sa.{key,pub}``. Raises ``CalledProcessError``.

    ``also``: further addresses of the API server.
    """
    folder.mkdir(mode=0o700)
    _openssl(
        folder,
        *("req", "-x509", *CURVE, "-keyout", "ca.key", "-out", "ca.crt", "-days", DAYS, "-subj", "/CN=test"),
        *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
    )
    addresses = ["127.0.0.1", address, *also]
    names = ["DNS:localhost", "DNS:kubernetes.default.svc", *(f"IP:{each}" for each in addresses)]
    make_certificate(folder, "apiserver", "/CN=kube-apiserver", names)
    _openssl(folder, "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "sa.key")
    _openssl(folder, "ec", "-in", "sa.key", "-pubout", "-out", "sa.pub")


def make_certificate(folder: Path, name: str, subject: str, names: Sequence[str] = ()) -> None:
    """Write ``NAME.{crt,key}``, signed by the authority of :func:`make_keys`. Raises ``CalledProcessError``.

    ``names``: of a server (``DNS:localhost``); without any it is a client's certificate.
    """
    usage = f"serverAuth\nsubjectAltName={','.join(names)}" if names else "clientAuth"
    (folder / f"{name}.ext").write_text(f"keyUsage=digitalSignature\nextendedKeyUsage={usage}\n")
    _openssl(folder, "req", "-new", *CURVE, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", subject)
    _openssl(
        folder,
        *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial"),
        *("-days", DAYS, "-out", f"{name}.crt", "-extfile", f"{name}.ext"),
    )


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)
