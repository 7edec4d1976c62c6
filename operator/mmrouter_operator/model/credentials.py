"""The keys of a deployment: generated once, and read back from their Secret."""

import base64
import binascii
import hashlib
import secrets as random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import zmq

from mmrouter_lib.media_identity import KEY_BYTES

_CURVE_CHARACTERS = 40

ENGINE_KEY: Final = "engine.key"
ROUTER_ITEMS: Final = (
    "identity.key",
    "router.curve.secret",
    "router.curve.public",
    "sidecar.curve.public",
    "control.token",
    ENGINE_KEY,
)
"""Entries that routers mount."""
SIDECAR_ITEMS: Final = (
    "identity.key",
    "sidecar.curve.secret",
    "sidecar.curve.public",
    "router.curve.public",
    ENGINE_KEY,
)
"""Entries that sidecars mount."""


@dataclass(frozen=True, slots=True)
class SecretData:
    """Keys that the deployment's processes share: 32 raw bytes, two CURVE pairs in Z85 and two bearer tokens."""

    identity_key: bytes = field(repr=False)
    sidecar_public: str
    sidecar_secret: str = field(repr=False)
    router_public: str
    router_secret: str = field(repr=False)
    control_token: str = field(repr=False)
    engine_key: str = field(repr=False)

    def entries(self) -> dict[str, bytes]:
        """Return the Secret's data by key; the keys are the names of the files in the pods."""
        values = {file: getattr(self, name) for name, file in _FILES.items()}
        return {file: value if isinstance(value, bytes) else value.encode() for file, value in values.items()}


_FILES: Final = {
    "identity_key": "identity.key",
    "sidecar_public": "sidecar.curve.public",
    "sidecar_secret": "sidecar.curve.secret",
    "router_public": "router.curve.public",
    "router_secret": "router.curve.secret",
    "control_token": "control.token",
    "engine_key": ENGINE_KEY,
}
"""Field of :class:`SecretData` -> entry of the Secret."""


class SecretError(ValueError):
    """The Secret lacks an entry or has a malformed one; the message names the entry, never its content."""


def fingerprint(secrets: SecretData) -> str:
    """Return a short hash of all entries. It may be public: each entry is random and long."""
    digest = hashlib.sha256()
    for name, value in sorted(secrets.entries().items()):
        digest.update(f"{name}:{len(value)}:".encode() + value)
    return digest.hexdigest()[:16]


def new_secret_data() -> SecretData:
    """Return new random keys: one CURVE pair for all sidecars, one for all routers, and two bearer tokens."""
    sidecar, router = zmq.curve_keypair(), zmq.curve_keypair()
    return SecretData(
        random.token_bytes(KEY_BYTES),
        *(sidecar[0].decode(), sidecar[1].decode()),
        *(router[0].decode(), router[1].decode()),
        control_token=random.token_hex(32),
        engine_key=random.token_hex(32),
    )


def read_secret(obj: Mapping[str, Any]) -> SecretData:
    """Return the keys of a raw Secret. Raises :class:`SecretError` if an entry is missing or malformed."""
    data = obj.get("data") or {}

    def entry(name: str) -> bytes:
        try:
            value = base64.b64decode(data[name], validate=True)
        except KeyError:
            raise SecretError(f"entry `{name}` is missing") from None
        except (binascii.Error, ValueError, TypeError):
            raise SecretError(f"entry `{name}` is not base64") from None
        if not value:
            raise SecretError(f"entry `{name}` is empty")
        return value

    def text(name: str) -> str:
        value = entry(name)
        if "curve" in name and (not value.isascii() or len(value) != _CURVE_CHARACTERS):
            raise SecretError(f"entry `{name}` is not a key of {_CURVE_CHARACTERS} characters")
        if not value.isascii():
            raise SecretError(f"`{name}` is not text")
        return value.decode()

    identity_key = entry(_FILES["identity_key"])
    if len(identity_key) != KEY_BYTES:
        raise SecretError(f"entry `{_FILES['identity_key']}` is not {KEY_BYTES} bytes long")
    return SecretData(identity_key, **{field: text(name) for field, name in _FILES.items() if field != "identity_key"})
