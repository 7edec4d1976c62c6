"""The secrets of a deployment: made anew (the only place that makes CURVE keys), and read from their Secret."""

import base64
import binascii
import secrets as random
from collections.abc import Mapping
from typing import Any

import zmq

from mmrouter_lib.media_identity import KEY_BYTES
from mmrouter_operator.render.secret import SecretData

_CURVE_CHARACTERS = 40


def new_secret_data() -> SecretData:
    """Return new random keys: one CURVE pair for all sidecars, one for all routers, and two bearer texts."""
    sidecar_public, sidecar_secret = zmq.curve_keypair()
    router_public, router_secret = zmq.curve_keypair()
    return SecretData(
        identity_key=random.token_bytes(KEY_BYTES),
        sidecar_public=sidecar_public.decode(),
        sidecar_secret=sidecar_secret.decode(),
        router_public=router_public.decode(),
        router_secret=router_secret.decode(),
        control_token=random.token_hex(32),
        engine_key=random.token_hex(32),
    )


class SecretError(ValueError):
    """The Secret is not what the operator made; the message names the entry, never its content."""


def read_secret(obj: Mapping[str, Any]) -> SecretData:
    """Return the keys of a raw Secret. Raises :class:`SecretError` when an entry is missing or malformed."""
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

    def text(name: str, length: int | None = None) -> str:
        value = entry(name)
        if not value.isascii() or (length is not None and len(value) != length):
            raise SecretError(
                f"entry `{name}` is not a key of {length} characters" if length else f"`{name}` is no text"
            )
        return value.decode()

    identity = entry("identity.key")
    if len(identity) != KEY_BYTES:
        raise SecretError(f"entry `identity.key` is not {KEY_BYTES} bytes long")
    return SecretData(
        identity_key=identity,
        sidecar_public=text("sidecar.curve.public", _CURVE_CHARACTERS),
        sidecar_secret=text("sidecar.curve.secret", _CURVE_CHARACTERS),
        router_public=text("router.curve.public", _CURVE_CHARACTERS),
        router_secret=text("router.curve.secret", _CURVE_CHARACTERS),
        control_token=text("control.token"),
        engine_key=text("engine.key"),
    )
