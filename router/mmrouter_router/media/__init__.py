"""Media of requests: ``data:`` URIs and guarded http(s) fetches. Only routers fetch; engines get bytes.

Stages, one module each: ``datauri`` or ``guard`` (is the URL acceptable), ``address`` (are its addresses), ``fetch``,
``cache``, ``sniff``; ``resolve`` puts them together.
"""

from mmrouter_router.media.fetch import FetchLimits, Lookup
from mmrouter_router.media.resolve import MediaResolver
from mmrouter_router.media.types import Media, MediaError, MediaMetrics

__all__ = ["FetchLimits", "Lookup", "Media", "MediaError", "MediaMetrics", "MediaResolver"]
