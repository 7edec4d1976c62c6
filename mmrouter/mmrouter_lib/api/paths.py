"""Where things lie inside every pod: the one place that renderers, engines and processes agree on.

docs/architecture.md has them in a table.
"""

CONFIG_DIR = "/etc/mmrouter"
"""``deployment.json``, ``workers.json`` (local), ``secrets/``, ``api-keys/``; moved by environment MMROUTER_CONFIG."""

SECRETS_DIR = f"{CONFIG_DIR}/secrets"
API_KEYS_DIR = f"{CONFIG_DIR}/api-keys"
CHAT_TEMPLATE_PATH = f"{CONFIG_DIR}/chat-template/template.jinja"
"""Present where ``spec.engine.chatTemplate`` is set; in engine pods it lies at the same path."""

MODEL_DIR = "/var/lib/mmrouter/model"
"""Mount of ``spec.model.volume``, read-only; environment MMROUTER_MODEL_DIR."""

STATE_DIR = "/var/lib/mmrouter/state"
"""The sidecar's journal; environment MMROUTER_STATE_DIR."""

HUB_CACHE_DIR = "/var/lib/mmrouter/hub"
"""The engine's hub download, where there is no ``spec.model.volume``; the sidecar reads its metadata files there."""

SHARED_DIR = "/var/lib/mmrouter/shared"
"""The node's tmpfs directory, in pods of pools with ``sharedMemory.scope: node``; environment MMROUTER_SHARED_DIR."""

PLUGIN_DIR = "/var/lib/mmrouter/plugin"
"""Our plugin for vLLM, which an init container puts there; in the engine's PYTHONPATH."""
