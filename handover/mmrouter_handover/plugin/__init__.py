"""Our plugin for vLLM: images that a renderer processed reach an engine as they are (docs/transfer.md).

It is loaded through vLLM's public entry point group ``vllm.endpoint_plugins`` and adds the routes of
``mmrouter_lib.engines.vllm.handover`` to a renderer and to an engine. With a vLLM that it does not know it is disabled,
says why, and changes nothing.

The package needs Python 3.10, Linux, msgspec and ``mmrouter_handover.shm``; what it has of vLLM, torch and NIXL it
takes
from the engine's image, at the edge. ``python -m mmrouter_handover.plugin.start`` is the wrapper around an engine's
command, and
:func:`mmrouter_handover.plugin.install.install` puts all of it into a folder.
"""

WIRE_VERSION = 1
"""Version of the routes and of a packed item; both sides must have the same."""
