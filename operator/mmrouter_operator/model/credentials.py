"""The keys of a deployment: generated once, and read back from their Secret."""

import base64
import binascii
import hashlib
import secrets as random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import zmq

from mmrouter_lib.feed_keys import FeedKeyError, parse_keys
from mmrouter_lib.media_identity import KEY_BYTES

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
    """Keys that the deployment's processes share: 32 raw bytes, two CURVE pairs in Z85 and two bearer tokens.

    During a rotation (:mod:`.key_rotation`) the fields of CURVE keys hold two, separated by a line break.
    """

    identity_key: bytes = field(repr=False)
    sidecar_public: str
    sidecar_secret: str = field(repr=False)
    router_public: str
    router_secret: str = field(repr=False)
    control_token: str = field(repr=False)
    engine_key: str = field(repr=False)
    rotated: str = ""
    """What :func:`rotation_origin` returned before the CURVE keys were rotated; empty if they never were."""

    def entries(self) -> dict[str, bytes]:
        """Return the Secret's data by key; the keys are the names of the files in the pods."""
        values = {file: getattr(self, name) for name, file in _FILES.items()}
        return {file: value if isinstance(value, bytes) else value.encode() for file, value in values.items() if value}


_FILES: Final = {
    "identity_key": "identity.key",
    "sidecar_public": "sidecar.curve.public",
    "sidecar_secret": "sidecar.curve.secret",
    "router_public": "router.curve.public",
    "router_secret": "router.curve.secret",
    "control_token": "control.token",
    "engine_key": ENGINE_KEY,
    "rotated": "rotated",
}
"""Field of :class:`SecretData` -> entry of the Secret."""


class SecretError(ValueError):
    """The Secret lacks an entry or has a malformed one; the message names the entry, never its content."""


def fingerprint(secrets: SecretData) -> str:
    """Return a short hash of the keys that pods were started with. It may be public: each entry is random and long.

    Rotated CURVE keys do not change it, because running pods load the new ones.
    """
    origin, _, lasting = secrets.rotated.partition(" ")
    return origin if lasting == _digest(secrets, rotate=True) else _digest(secrets)


def rotation_origin(secrets: SecretData) -> str:
    """Return the entry ``rotated`` for a rotation that begins now. It is void once another key changes."""
    return f"{fingerprint(secrets)} {_digest(secrets, rotate=True)}"


def _digest(secrets: SecretData, *, rotate: bool = False) -> str:
    """Return the hash of all entries; with ``rotate``, only of those that do not rotate."""
    digest = hashlib.sha256()
    for name, value in sorted(secrets.entries().items()):
        if name != "rotated" and not (rotate and "curve" in name):
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
        if "curve" in name:
            try:
                parse_keys(f"entry `{name}`", value)
            except FeedKeyError as error:
                raise SecretError(str(error)) from None
        if not value.isascii():
            raise SecretError(f"`{name}` is not text")
        return value.decode()

    identity_key = entry(_FILES["identity_key"])
    if len(identity_key) != KEY_BYTES:
        raise SecretError(f"entry `{_FILES['identity_key']}` is not {KEY_BYTES} bytes long")
    texts = {field: text(name) for field, name in _FILES.items() if field not in ("identity_key", "rotated")}
    return SecretData(identity_key, **texts, rotated=text("rotated") if "rotated" in data else "")
