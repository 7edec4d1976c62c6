"""Load the settings from the resource, the secrets and downward-API values (docs/architecture.md).

    python -m mmrouter_sidecar.settings_loader    # prints the settings, for the sidecar that started it

It runs as a separate process, because it imports the resource's models (:mod:`mmrouter_sidecar.settings`), while the
sidecar imports its own modules.
"""

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from mmrouter_lib.api import SpecError, load_deployment
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.launch import DEVICES, LaunchError
from mmrouter_lib.engines.launchers import LAUNCHERS
from mmrouter_lib.engines.vllm.adapter import sets_cache_bytes
from mmrouter_lib.feed_keys import ROUTER_PUBLIC, SIDECAR_SECRET, read_keys
from mmrouter_lib.media_identity import KEY_BYTES
from mmrouter_lib.pod_paths import CONFIG_DIR, HUB_CACHE_DIR, MODEL_DIR, STATE_DIR
from mmrouter_lib.settings_errors import SettingsError, reading_settings
from mmrouter_lib.tls_context import engine_server_name
from mmrouter_sidecar import log_to_stderr
from mmrouter_sidecar.settings import DIRECTORY_BYTES, Settings, curve_keys, to_json

CONFIGURATION_ERROR = 2  # exit status


@reading_settings()
def load(env: Mapping[str, str] = os.environ) -> Settings:
    """Read files and environment. Raises :class:`SettingsError` or ``mmrouter_lib.api.SpecError``."""
    config = Path(env.get("MMROUTER_CONFIG", CONFIG_DIR))
    secrets = config / "secrets"
    dep = load_deployment(config / "deployment.json")
    spec, name = dep.spec, _required(env, "MMROUTER_POOL")
    try:
        pool = dep.pool(name)
    except KeyError:
        raise SettingsError(f"MMROUTER_POOL names {name!r}, which the resource does not have") from None
    try:
        launch = LAUNCHERS[spec.engine.type].launch(dep, pool)
    except LaunchError as error:
        raise SettingsError(f"pool {pool.name} is not an engine of this release: {error}") from error
    identity_key = (secrets / "identity.key").read_bytes()
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
        curve=curve_keys(read_keys(secrets, SIDECAR_SECRET, ROUTER_PUBLIC)),
        secrets_dir=secrets,
        engine_key=(secrets / "engine.key").read_text().strip() if (secrets / "engine.key").exists() else "",
        engine_ca_dir=config / "engine-ca" if spec.engine.tls is not None else None,
        engine_name=engine_server_name(dep.metadata.name, dep.metadata.namespace),
        buffer_events=spec.sidecar.buffer_events,
        state_dir=Path(env.get("MMROUTER_STATE_DIR", STATE_DIR)),
        model_dir=Path(env.get("MMROUTER_MODEL_DIR", MODEL_DIR)),
        hub_dir=Path(env.get("HF_HUB_CACHE", HUB_CACHE_DIR)),
        health_path=launch.health_path,
        health_seconds=float(launch.health_seconds),
        encodes_elsewhere="--encoder-urls" in launch.args,
        publishes="--kv-events-config" in launch.args,
        shared_dir=Path(env["MMROUTER_SHARED_DIR"]) if env.get("MMROUTER_SHARED_DIR") else None,
        shared_bytes=_number(env, "MMROUTER_SHARED_LIMIT_BYTES"),
        device=DEVICES[pool.accelerator.kind].torch,
        metrics_show_cpu=not sets_cache_bytes(launch.args),
        drafter=adapter(spec.engine.type).drafter(launch.args),
        directory_bytes=LAUNCHERS[spec.engine.type].embedding_cache_bytes(dep, pool) or DIRECTORY_BYTES,
        embeddings_dir=Path(volume) if (volume := env.get("MMROUTER_EMBEDDINGS_DIR")) else None,
        embeddings_bytes=_number(env, "MMROUTER_EMBEDDINGS_LIMIT_BYTES"),
    )


def _required(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "")
    if not value:
        raise SettingsError(f"{name} is not set")
    return value


def _number(env: Mapping[str, str], name: str) -> int:
    value = env.get(name, "0")
    if not value.isdecimal():
        raise SettingsError(f"{name} is {value!r}, not a number of bytes")
    return int(value)


def main() -> int:
    """Print the settings as JSON. Exit status 2: the configuration is wrong, as the last line on stderr describes."""
    log_to_stderr()
    try:
        settings = load()
    except (SettingsError, SpecError) as error:
        logging.getLogger("mmrouter.sidecar").error("configuration: %s", error)
        return CONFIGURATION_ERROR
    try:
        sys.stdout.buffer.write(to_json(settings))
        sys.stdout.flush()
    except BrokenPipeError:  # the sidecar was stopped while it started
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter reports it at its exit
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
