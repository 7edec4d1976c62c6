"""Paths inside every pod, shared by renderers, engines and processes (table in docs/architecture.md)."""

CONFIG_DIR = "/etc/mmrouter"
"""``deployment.json``, ``workers.json`` (local), ``secrets/``, ``api-keys/``; moved by environment MMROUTER_CONFIG."""

API_KEYS_DIR = f"{CONFIG_DIR}/api-keys"
TLS_DIR = f"{CONFIG_DIR}/tls"
"""``tls.crt`` and ``tls.key`` of the client port, where ``spec.frontend.tls`` is set."""

ENGINE_CA_DIR = f"{CONFIG_DIR}/engine-ca"  # `ca.crt` of the engines' certificates, where ``spec.engine.tls`` is set
ENGINE_TLS_DIR = "/var/lib/mmrouter/tls"  # ``tls.crt`` and ``tls.key`` of the engine, rewritten in place

CHAT_TEMPLATE_PATH = f"{CONFIG_DIR}/chat-template/template.jinja"
"""Present where ``spec.engine.chatTemplate`` is set, at the same path in router and engine pods."""

MODEL_DIR = "/var/lib/mmrouter/model"  # mount of spec.model.volume, read-only; environment MMROUTER_MODEL_DIR

STATE_DIR = "/var/lib/mmrouter/state"  # directory of the sidecar's journal; environment MMROUTER_STATE_DIR

HUB_CACHE_DIR = "/var/lib/mmrouter/hub"
"""The engine's hub download, without a ``spec.model.volume``; the sidecar reads its metadata files there."""

SHARED_DIR = "/var/lib/mmrouter/shared"
"""The node's tmpfs directory, in pods of pools with ``sharedMemory.scope: node``; environment MMROUTER_SHARED_DIR."""

EMBEDDINGS_DIR = "/var/lib/mmrouter/embeddings"
"""The volume of embeddings, in pods that hand them over by files of a volume; environment MMROUTER_EMBEDDINGS_DIR."""

PLUGIN_DIR = "/var/lib/mmrouter/plugin"  # the vLLM plugin, copied by an init container; in the engine's PYTHONPATH
