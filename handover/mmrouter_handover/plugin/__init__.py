"""vLLM plugin that hands images processed by a renderer over to an engine (docs/transfer.md).

vLLM loads it through its public entry point group ``vllm.endpoint_plugins``. It adds the routes of
``mmrouter_lib.engines.vllm.plugin_api`` to a renderer and to an engine. With an unsupported vLLM release it is
disabled, reports the reason, and changes nothing.

The package needs Python 3.10, Linux, msgspec and ``mmrouter_handover.shm``; vLLM, torch and NIXL come from the engine's
image. ``python -m mmrouter_handover.plugin.start`` wraps an engine's command, and
:func:`mmrouter_handover.plugin.start.install` copies the package into a folder.
"""

WIRE_VERSION = 1
"""Version of the routes and of a packed item; both sides must have the same."""

PROVED_RELEASES = ("0.32.0", "0.33.0")
"""vLLM releases whose answers were compared bit by bit (tests/conformance); any other one disables the plugin."""
