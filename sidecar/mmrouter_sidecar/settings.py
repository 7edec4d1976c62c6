"""Everything the sidecar is told: the resource, secrets and downward-API values (DESIGN.md 10)."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from mmrouter.api import MMRouterDeployment, Pool, load_deployment
from mmrouter.api.paths import CONFIG_DIR, HUB_CACHE_DIR, MODEL_DIR, STATE_DIR
from mmrouter.blocks import Key, namespace_seed
from mmrouter.engines import adapter
from mmrouter.engines.launching import LaunchError
from mmrouter.identity import KEY_BYTES


class SettingsError(ValueError):
    """A file or variable that the sidecar needs is missing or malformed; the message names it."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Where things listen (DESIGN.md 10); the rank is added to ``events`` and ``replay``."""

    engine: int = 8000
    events: int = 5557
    replay: int = 5657
    pub: int = 7557
    router: int = 7558
    hook: int = 8002
    health: int = 9090


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Z85 texts: our pair, and the one client key that is let in."""

    public: bytes
    secret: bytes
    client: bytes


@dataclass(frozen=True, slots=True)
class Settings:
    """Configuration of one sidecar process."""

    pod_uid: str
    pod_ip: str
    loopback: str
    engine: str
    model: str
    revision: str
    ranks: int
    identity_key: bytes
    curve: CurveKeys
    engine_key: str = ""
    buffer_events: int = 10_000
    state_dir: Path = Path(STATE_DIR)
    model_dir: Path = Path(MODEL_DIR)
    hub_dir: Path = Path(HUB_CACHE_DIR)
    ports: Ports = field(default_factory=Ports)
    health_path: str = ""
    """What the engine is asked in this role; empty for what it is usually asked."""
    health_seconds: float = 5.0
    """How long an answer may take. One that takes long is work for the engine, and is asked for seldom."""

    def seed(self, lora: str | None, salt: str | None) -> Key:
        """Return the seed of a chain of keys, the same that every router computes."""
        return namespace_seed(self.identity_key, model=self.model, revision=self.revision, lora=lora, salt=salt)

    @property
    def fingerprint(self) -> str:
        """Names everything that block keys in a journal depend on."""
        text = f"{self.engine}\n{self.model}\n{self.revision}\n{self.ranks}"
        return blake3(text.encode(), key=self.identity_key).hexdigest(16)


def load(env: Mapping[str, str] = os.environ) -> Settings:
    """Read files and environment. Raises :class:`SettingsError` or ``mmrouter.api.SpecError``."""
    config = Path(env.get("MMROUTER_CONFIG", CONFIG_DIR))
    secrets = config / "secrets"
    try:
        dep = load_deployment(config / "deployment.json")
    except OSError as error:
        raise SettingsError(f"cannot read {config / 'deployment.json'}: {error.strerror}") from error
    spec = dep.spec
    pool = _pool(dep, env)
    try:
        launch = adapter(spec.engine.type).launch(dep, pool)
    except LaunchError as error:
        raise SettingsError(f"pool {pool.name} is no engine of this release: {error}") from error
    identity_key = _read(secrets / "identity.key")
    if len(identity_key) != KEY_BYTES:
        raise SettingsError(f"{secrets / 'identity.key'} holds {len(identity_key)} bytes, not {KEY_BYTES}")
    pod_ip = env.get("POD_IP", "127.0.0.1")
    return Settings(
        pod_uid=_required(env, "POD_UID"),
        pod_ip=pod_ip,
        loopback=env.get("POD_LOOPBACK", "127.0.0.1"),
        engine=spec.engine.type,
        model=spec.model.id,
        revision=spec.model.revision,
        ranks=pool.parallelism.data,
        identity_key=identity_key,
        curve=CurveKeys(
            public=_curve(secrets / "sidecar.curve.public"),
            secret=_curve(secrets / "sidecar.curve.secret"),
            client=_curve(secrets / "router.curve.public"),
        ),
        engine_key=_read(secrets / "engine.key").decode().strip() if (secrets / "engine.key").exists() else "",
        buffer_events=spec.sidecar.buffer_events,
        state_dir=Path(env.get("MMROUTER_STATE_DIR", STATE_DIR)),
        model_dir=Path(env.get("MMROUTER_MODEL_DIR", MODEL_DIR)),
        hub_dir=Path(env.get("HF_HUB_CACHE", HUB_CACHE_DIR)),
        health_path=launch.health_path,
        health_seconds=float(launch.health_seconds),
    )


def _pool(dep: MMRouterDeployment, env: Mapping[str, str]) -> Pool:
    name = _required(env, "MMROUTER_POOL")
    try:
        return dep.pool(name)
    except KeyError:
        raise SettingsError(f"MMROUTER_POOL names {name!r}, which the resource does not have") from None


def _required(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "")
    if not value:
        raise SettingsError(f"{name} is not set")
    return value


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from error


def _curve(path: Path) -> bytes:
    key = _read(path).strip()
    if len(key) != 40:
        raise SettingsError(f"{path} is not a Z85 key of 40 characters")
    return key
