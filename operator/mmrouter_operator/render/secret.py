"""The Secret of a deployment. Every container mounts only the entries that it needs (docs/architecture.md)."""

import base64
import hashlib
from dataclasses import dataclass, field
from typing import Any

from mmrouter_lib.api import MMRouterDeployment
from mmrouter_operator.render.common import object_metadata, secret_name

ROUTER_ITEMS = (
    "identity.key",
    "router.curve.secret",
    "router.curve.public",
    "sidecar.curve.public",
    "control.token",
    "engine.key",
)
SIDECAR_ITEMS = ("identity.key", "sidecar.curve.secret", "sidecar.curve.public", "router.curve.public", "engine.key")
ENGINE_KEY = "engine.key"


@dataclass(frozen=True, slots=True)
class SecretData:
    """What the deployment's processes share: 32 raw bytes, two CURVE pairs in Z85 and two bearer texts."""

    identity_key: bytes = field(repr=False)
    sidecar_public: str
    sidecar_secret: str = field(repr=False)
    router_public: str
    router_secret: str = field(repr=False)
    control_token: str = field(repr=False)
    engine_key: str = field(repr=False)

    def entries(self) -> dict[str, bytes]:
        """Return the Secret's data by key; the keys are the names of the files in the pods."""
        return {
            "identity.key": self.identity_key,
            "sidecar.curve.secret": self.sidecar_secret.encode(),
            "sidecar.curve.public": self.sidecar_public.encode(),
            "router.curve.secret": self.router_secret.encode(),
            "router.curve.public": self.router_public.encode(),
            "control.token": self.control_token.encode(),
            "engine.key": self.engine_key.encode(),
        }


def fingerprint(secrets: SecretData) -> str:
    """Return a short hash of all entries. It may be public: every one of them is random and long."""
    digest = hashlib.sha256()
    for name, value in sorted(secrets.entries().items()):
        digest.update(f"{name}:{len(value)}:".encode() + value)
    return digest.hexdigest()[:16]


def render_secret(dep: MMRouterDeployment, secrets: SecretData) -> dict[str, Any]:
    """Return the Secret."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": object_metadata(dep, secret_name(dep), "secrets"),
        "type": "Opaque",
        "data": {name: base64.b64encode(value).decode() for name, value in sorted(secrets.entries().items())},
    }
