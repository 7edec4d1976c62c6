"""Configuration of a router process: the resource, secrets and environment variables."""

import hashlib
import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

import zmq

from mmrouter_lib.api import MMRouterDeployment, load_deployment
from mmrouter_lib.engines import adapter, answering_args
from mmrouter_lib.engines.base.answer_takeover import AnswerTraits
from mmrouter_lib.feed_keys import ROUTER_SECRET, SIDECAR_PUBLIC, Keys, read_keys
from mmrouter_lib.model_folder import read_json
from mmrouter_lib.settings_errors import SettingsError, reading_settings

Discovery = Literal["file", "kubernetes"]
CONTROL_PORT = 8001
RESOURCE_FILE = "deployment.json"
DRAIN_SECONDS = 30.0
CURVE_FILES = (ROUTER_SECRET, SIDECAR_PUBLIC)
SERVICE_ACCOUNT_DIR = "/var/run/secrets/kubernetes.io/serviceaccount"


class CurveKeys(NamedTuple):
    """CURVE keys in Z85: the router's pair and the public key of all sidecars."""

    public: bytes
    secret: bytes
    server: bytes


def curve_keys(files: Mapping[str, Keys]) -> tuple[CurveKeys, ...]:
    """Return the combinations of the router's and the sidecars' keys, the preferred one first.

    Raises :class:`SettingsError`.
    """
    try:
        return tuple(
            CurveKeys(zmq.curve_public(secret), secret, server)
            for secret, server in itertools.product(files[ROUTER_SECRET], files[SIDECAR_PUBLIC])
        )
    except zmq.ZMQError:
        raise SettingsError(f"{ROUTER_SECRET} is not a CURVE key") from None


@dataclass(frozen=True, slots=True)
class ApiServer:
    """The cluster's API server. ``folder`` holds ``token`` (which rotates), ``ca.crt`` and ``namespace``."""

    host: str
    port: str
    folder: Path


@dataclass(frozen=True, slots=True)
class Settings:
    """Configuration of one router. ``router_id``: short, stable for the pod, and the prefix of its request ids."""

    deployment: MMRouterDeployment
    router_id: str
    pod_ip: str
    config_dir: Path
    model_dir: Path
    identity_key: bytes
    engine_key: str
    control_token: str
    curve: tuple[CurveKeys, ...]
    pod_uid: str = ""
    discovery: Discovery = "file"  # source of the pods: the cluster's API, or a file
    drain_seconds: float = DRAIN_SECONDS  # how long answers may take after SIGTERM
    api_server: ApiServer = ApiServer("", "443", Path(SERVICE_ACCOUNT_DIR))
    node: str = ""  # name of the pod's node
    shared_dir: Path | None = None  # folder shared by the pods of the node
    shared_limit_bytes: int = 0  # bytes that this process may use there
    always_hand_over: bool = False  # use every hand-over and prefill engine regardless of its cost, for tests
    test_selection: bool = False  # a gateway's conformance tests may choose endpoints by a header
    log_level: str = "INFO"  # of the router's own log
    bind_all: bool = False  # listen on all addresses of the pod; a port-forward uses its loopback

    @property
    def host(self) -> str:
        if not self.bind_all:
            return self.pod_ip
        return "::" if ":" in self.pod_ip else "0.0.0.0"  # noqa: S104 - network policies guard the pod

    @property
    def served_model(self) -> str:
        return self.deployment.spec.model.served_name or self.deployment.metadata.name

    @property
    def answer_traits(self) -> AnswerTraits:
        """Traits of the engines' answers. Raises ``ModelFolderError``."""
        spec = self.deployment.spec
        config = read_json(self.model_dir, "config.json")
        return adapter(spec.engine.type).answer_traits(answering_args(self.deployment), config)

    @property
    def resource_file(self) -> Path:
        return self.config_dir / RESOURCE_FILE

    @property
    def chat_template(self) -> Path:
        """Path of ``engine.chatTemplate``; the engine reads the same file."""
        return self.config_dir / "chat-template" / "template.jinja"


@reading_settings()
def load(env: Mapping[str, str] = os.environ) -> Settings:
    """Read files and environment. Raises :class:`SettingsError` or ``mmrouter_lib.api.SpecError``."""
    config = Path(env.get("MMROUTER_CONFIG", "/etc/mmrouter"))
    secrets = config / "secrets"
    uid = env.get("POD_UID") or env.get("POD_NAME", "")
    if not uid:
        raise SettingsError("POD_UID is not set")
    discovery = env.get("MMROUTER_DISCOVERY", "file")
    if discovery not in get_args(Discovery):
        raise SettingsError(f"MMROUTER_DISCOVERY is {discovery!r}: {' or '.join(get_args(Discovery))}")
    if discovery == "kubernetes" and not env.get("KUBERNETES_SERVICE_HOST"):
        raise SettingsError("KUBERNETES_SERVICE_HOST is not set: there is no API server to list pods from")
    return Settings(
        deployment=load_deployment(config / RESOURCE_FILE),
        router_id=hashlib.sha256(uid.encode()).hexdigest()[:8],
        pod_ip=env.get("POD_IP", "127.0.0.1"),
        config_dir=config,
        model_dir=Path(env.get("MMROUTER_MODEL_DIR", "/var/lib/mmrouter/model")),
        identity_key=(secrets / "identity.key").read_bytes(),
        engine_key=_text(secrets / "engine.key"),
        control_token=_text(secrets / "control.token"),
        curve=curve_keys(read_keys(secrets, *CURVE_FILES)),
        pod_uid=uid,
        discovery=cast(Discovery, discovery),
        drain_seconds=_seconds(env, "MMROUTER_DRAIN_SECONDS", DRAIN_SECONDS),
        api_server=ApiServer(
            env.get("KUBERNETES_SERVICE_HOST", ""),
            env.get("KUBERNETES_SERVICE_PORT", "443"),
            Path(env.get("MMROUTER_SERVICE_ACCOUNT_DIR", SERVICE_ACCOUNT_DIR)),
        ),
        node=env.get("NODE_NAME", ""),
        shared_dir=Path(shared) if (shared := env.get("MMROUTER_SHARED_DIR", "")) else None,
        shared_limit_bytes=_bytes(env, "MMROUTER_SHARED_LIMIT_BYTES"),
        always_hand_over=env.get("MMROUTER_HANDOVER") == "always",
        test_selection=env.get("MMROUTER_TEST_ENDPOINT_SELECTION") == "1",
        log_level=_log_level(env),
        bind_all=env.get("MMROUTER_BIND") == "all",
    )


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name, "")
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise SettingsError(f"{name} is {text!r}, which is no number of seconds")
    return seconds


LOG_LEVELS = ("debug", "info", "warning", "error")


def _log_level(env: Mapping[str, str]) -> str:
    level = env.get("MMROUTER_LOG_LEVEL") or "info"
    if level not in LOG_LEVELS:
        raise SettingsError(f"MMROUTER_LOG_LEVEL is {level!r}, and must be one of {', '.join(LOG_LEVELS)}")
    return level.upper()


def _bytes(env: Mapping[str, str], name: str) -> int:
    text = env.get(name) or "0"
    if not text.isdecimal():
        raise SettingsError(f"{name} is {text!r}, which is no number of bytes")
    return int(text)


def _text(path: Path) -> str:
    text = path.read_text().strip()
    if not text:
        raise SettingsError(f"{path} is empty")
    return text
