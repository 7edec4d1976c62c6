"""Certificates for tests, made once per process by the command openssl."""

import functools
import shutil
import ssl
import subprocess
import tempfile
from pathlib import Path

import pytest

HOST = "mmrouter.example"


@functools.cache
def certificate(number: int, name: str = HOST) -> tuple[bytes, bytes]:
    """Return a certificate and its key, in PEM; another ``number`` is another pair.

    It is for ``name`` and for the Services of `mmrouter up`.
    """
    if shutil.which("openssl") is None:
        pytest.skip("not run: no openssl command to make a certificate with")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -keyout key -out cert"
    services = ",".join(f"IP:127.1.{block}.1" for block in range(256))
    subject = ["-subj", f"/CN={name}-{number}", "-addext", f"subjectAltName=DNS:{name},{services}"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*command.split(), *subject], cwd=folder, check=True, capture_output=True)
        return Path(folder, "cert").read_bytes(), Path(folder, "key").read_bytes()


def write_secret(folder: Path, chain: bytes, key: bytes) -> None:
    """Write a Secret's volume as the kubelet does: the files are links, and change together by another link."""
    fresh = Path(tempfile.mkdtemp(prefix="..", dir=folder))
    (fresh / "tls.crt").write_bytes(chain)
    (fresh / "tls.key").write_bytes(key)
    link = folder / "..data_tmp"
    link.symlink_to(fresh.name)
    link.rename(folder / "..data")
    for name in ("tls.crt", "tls.key"):
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")


def trusting(*chains: bytes) -> ssl.SSLContext:
    """Return a client's context that trusts these certificates only."""
    context = ssl.create_default_context(cadata="".join(chain.decode() for chain in chains))
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context
