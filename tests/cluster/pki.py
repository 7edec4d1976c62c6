"""The keys of a test's control plane: an authority, the API server's certificate, the key that signs tokens."""

import subprocess
from pathlib import Path

DAYS = "30"
CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def make_keys(folder: Path, address: str) -> None:
    """Write ``ca.crt``, ``apiserver.{crt,key}`` and ``sa.{key,pub}``. Raises ``CalledProcessError``."""
    folder.mkdir(mode=0o700)

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    openssl(
        *("req", "-x509", *CURVE, "-keyout", "ca.key", "-out", "ca.crt", "-days", DAYS, "-subj", "/CN=test"),
        *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
    )
    names = f"DNS:localhost,DNS:kubernetes.default.svc,IP:127.0.0.1,IP:{address}"
    (folder / "apiserver.ext").write_text(
        f"keyUsage=digitalSignature\nextendedKeyUsage=serverAuth\nsubjectAltName={names}\n"
    )
    openssl("req", "-new", *CURVE, "-keyout", "apiserver.key", "-out", "apiserver.csr", "-subj", "/CN=kube-apiserver")
    openssl(
        *("x509", "-req", "-in", "apiserver.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial"),
        *("-days", DAYS, "-out", "apiserver.crt", "-extfile", "apiserver.ext"),
    )
    openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "sa.key")
    openssl("ec", "-in", "sa.key", "-pubout", "-out", "sa.pub")
