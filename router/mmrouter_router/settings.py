"""Everything the router is told: the resource, secrets and downward-API values (DESIGN.md 10)."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mmrouter.api import MMRouterDeployment, load_deployment


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Z85 texts: our pair and the public key of every sidecar."""

    public: bytes
    secret: bytes
    server: bytes


@dataclass(frozen=True, slots=True)
class Settings:
    """Configuration of one router process. ``router_id`` is short, stable for the pod, and begins its request ids."""

    deployment: MMRouterDeployment
    router_id: str
    pod_ip: str
    config_dir: Path
    model_dir: Path
    identity_key: bytes
    engine_key: str
    control_token: str
    curve: CurveKeys

    @property
    def chat_template(self) -> Path:
        """Where ``engine.chatTemplate`` lies; the engine has the same file."""
        return self.config_dir / "chat-template" / "template.jinja"


class SettingsError(ValueError):
    """A file or variable that the router needs is missing or malformed; the message names it."""


def load(env: Mapping[str, str] = os.environ) -> Settings:
    """Read files and environment. Raises :class:`SettingsError` or ``mmrouter.api.SpecError``."""
    config = Path(env.get("MMROUTER_CONFIG", "/etc/mmrouter"))
    secrets = config / "secrets"
    uid = env.get("POD_UID") or env.get("POD_NAME", "")
    if not uid:
        raise SettingsError("POD_UID is not set")
    return Settings(
        deployment=load_deployment(config / "deployment.json"),
        router_id=hashlib.sha256(uid.encode()).hexdigest()[:8],
        pod_ip=env.get("POD_IP", "127.0.0.1"),
        config_dir=config,
        model_dir=Path(env.get("MMROUTER_MODEL_DIR", "/var/lib/mmrouter/model")),
        identity_key=_read(secrets / "identity.key"),
        engine_key=_text(secrets / "engine.key"),
        control_token=_text(secrets / "control.token"),
        curve=CurveKeys(
            public=_text(secrets / "router.curve.public").encode(),
            secret=_text(secrets / "router.curve.secret").encode(),
            server=_text(secrets / "sidecar.curve.public").encode(),
        ),
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from error


def _text(path: Path) -> str:
    text = _read(path).decode().strip()
    if not text:
        raise SettingsError(f"{path} is empty")
    return text
