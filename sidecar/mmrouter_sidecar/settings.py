"""The sidecar's settings as values, passed as JSON from :mod:`mmrouter_sidecar.settings_loader`.

This module does not import the resource's models, which take 12 MiB and are needed at startup only.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
from blake3 import blake3

from mmrouter_lib.block_keys import Key, namespace_seed
from mmrouter_lib.feed_keys import ROUTER_PUBLIC, SIDECAR_SECRET, Keys, fingerprint
from mmrouter_lib.settings_errors import SettingsError

DIRECTORY_BYTES = 1 << 30  # assumed size of an encoder's embeddings where no setting gives one


@dataclass(frozen=True, slots=True)
class Ports:
    """Port numbers (docs/architecture.md); the rank is added to ``events`` and ``replay``."""

    engine: int = 8000
    events: int = 5557
    replay: int = 5657
    pub: int = 7557
    router: int = 7558
    hook: int = 8002
    health: int = 9090


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The sidecar's key pair and the accepted client keys, in Z85."""

    public: bytes
    secret: bytes
    clients: tuple[bytes, ...]

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Fingerprints of the sidecar's own public key and of the accepted keys, as in heartbeats."""
        return tuple(map(fingerprint, (self.public, *self.clients)))


def curve_keys(files: Mapping[str, Keys]) -> CurveKeys:
    """Return the keys to use: the first pair where there are two. Raises :class:`SettingsError`."""
    secret = files[SIDECAR_SECRET][0]
    try:
        return CurveKeys(zmq.curve_public(secret), secret, files[ROUTER_PUBLIC])
    except zmq.ZMQError:
        raise SettingsError(f"{SIDECAR_SECRET} is not a CURVE key") from None


@dataclass(frozen=True, slots=True)
class Settings:
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
    secrets_dir: Path
    engine_key: str = ""
    engine_ca_dir: Path | None = None  # folder of the CA of the engine's certificate, if its port serves TLS
    engine_name: str = ""  # name in that certificate
    buffer_events: int = 10_000
    ports: Ports = field(default_factory=Ports)
    health_path: str = ""  # path of the health check; empty for the default of the engine type
    health_seconds: float = 5.0
    """Timeout of the health check. A check with a long one is work for the engine, and is sent rarely."""
    shared_dir: Path | None = None  # the node's shared directory, if the pod has it
    shared_bytes: int = 0  # limit of the shared directory; 0 if only the file system bounds it
    embeddings_dir: Path | None = None  # the volume of embeddings, if the pod writes them there
    embeddings_bytes: int = 0  # limit of that volume; 0 if only the file system bounds it
    device: str = ""  # PyTorch's type of the pool's device
    metrics_show_cpu: bool = False  # whether the engine's metrics tell a CPU from other devices
    drafter: str = ""  # what the pool's drafter does to hits (mmrouter_lib.engines.vllm.drafters)
    directory_bytes: int = DIRECTORY_BYTES  # total size of the embeddings whose encoder the sidecar remembers
    encodes_elsewhere: bool = False  # whether the engine uses encoders, through the sidecar
    publishes: bool = True
    """Whether the engine publishes events. If not, its restarts are detected by connection and health checks."""

    def seed(self, lora: str | None, salt: str | None) -> Key:
        """Return the seed of a chain of block keys, as every router computes it."""
        return namespace_seed(self.identity_key, model=self.model, revision=self.revision, lora=lora, salt=salt)

    @property
    def fingerprint(self) -> str:
        """Digest of all settings that the block keys in a journal depend on."""
        text = f"{self.engine}\n{self.model}\n{self.revision}\n{self.ranks}"
        return blake3(text.encode(), key=self.identity_key).hexdigest(16)


def to_json(settings: Settings) -> bytes:
    """Encode settings, including every secret, for the serving process."""
    return msgspec.json.encode(settings, enc_hook=str)


def from_json(text: bytes) -> Settings:
    """Decode settings. Raises ``msgspec.DecodeError``."""
    return msgspec.json.decode(text, type=Settings, dec_hook=lambda kind, value: kind(value))
