"""The releases of vLLM whose inside this plugin knows."""

from typing import Any

KNOWN = ("0.32.0",)
"""Releases with which an engine's answers were compared, bit by bit (tests/conformance)."""

_RENDERER = ("_mm_executor", "_mm_processor_cache", "_mm_processor_only_cache", "mm_processor", "model_config")
_CACHE = ("is_cached_item", "get_and_update_item", "touch_sender_cache_item", "release_sender_touches", "clear_cache")


def why_unknown(version: str) -> str:
    """Return why the plugin stays disabled with a vLLM, empty for one that it knows.

    ``version`` as the package says it; what stands behind ``+`` names a build, not another release.
    """
    if version.partition("+")[0] in KNOWN:
        return ""
    return f"vLLM {version[:40]} is not known to this plugin, which knows {', '.join(KNOWN)}"


def why_other(renderer: Any, cache: str) -> str:
    """Return what a vLLM lacks of what the plugin uses, empty where it is all there.

    A known release may have been changed by who built the image. ``cache``: the attribute with the processor cache.
    """
    missing = [name for name in _RENDERER if not hasattr(renderer, name)]
    if missing:
        return f"this vLLM's renderer has no {missing[0]}"
    if renderer.mm_processor is None:
        return "the model takes no images"
    found = getattr(renderer, cache)
    if found is None:
        return "the server runs without a processor cache (--mm-processor-cache-gb 0)"
    missing = [name for name in _CACHE if not hasattr(found, name)]
    return f"this vLLM's processor cache has no {missing[0]}" if missing else ""
