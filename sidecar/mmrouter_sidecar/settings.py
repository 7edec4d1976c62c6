"""Everything the sidecar is told, as values; :mod:`mmrouter_sidecar.settings_loader` makes them.

Nothing here imports the resource's models: they take 12 MiB, and a sidecar needs them for a moment of its life.
"""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from blake3 import blake3

from mmrouter_lib.block_keys import Key, namespace_seed


class SettingsError(ValueError):
    """A file or variable that the sidecar needs is missing or malformed; the message names it."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Where things listen (docs/architecture.md); the rank is added to ``events`` and ``replay``."""

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
    state_dir: Path
    model_dir: Path
    hub_dir: Path
    engine_key: str = ""
    buffer_events: int = 10_000
    ports: Ports = field(default_factory=Ports)
    health_path: str = ""
    """What the engine is asked in this role; empty for what it is usually asked."""
    health_seconds: float = 5.0
    """How long an answer may take. One that takes long is work for the engine, and is asked for seldom."""
    shared_dir: Path | None = None
    """The node's shared directory, where the pod has it."""
    shared_bytes: int = 0
    """What may lie in it; 0 where only the file system bounds it."""
    encodes_elsewhere: bool = False
    """Whether the engine asks encoders, through us."""
    publishes: bool = True
    """Whether the engine publishes events. Where it does not, only its health tells that it is another one."""

    def seed(self, lora: str | None, salt: str | None) -> Key:
        """Return the seed of a chain of keys, the same that every router computes."""
        return namespace_seed(self.identity_key, model=self.model, revision=self.revision, lora=lora, salt=salt)

    @property
    def fingerprint(self) -> str:
        """Names everything that block keys in a journal depend on."""
        text = f"{self.engine}\n{self.model}\n{self.revision}\n{self.ranks}"
        return blake3(text.encode(), key=self.identity_key).hexdigest(16)


def to_json(settings: Settings) -> bytes:
    """Return settings as one process tells them to another: with every secret in them."""
    return msgspec.json.encode(settings, enc_hook=str)


def from_json(text: bytes) -> Settings:
    """Return what :func:`to_json` was given. Raises ``msgspec.DecodeError``."""
    return msgspec.json.decode(text, type=Settings, dec_hook=lambda kind, value: kind(value))
