"""Resolution of a request's media: ``data:`` URIs and guarded http(s) fetches. Only routers fetch; engines get bytes.

``resolve`` combines the other modules: ``data_uri``, or ``guard`` (URLs) with ``address`` (IP addresses) and ``fetch``;
``cache``; ``mime_type``.
"""

from mmrouter_router.media.fetch import FetchLimits, Lookup
from mmrouter_router.media.resolve import MediaResolver
from mmrouter_router.media.types import Media, MediaError

__all__ = ["FetchLimits", "Lookup", "Media", "MediaError", "MediaResolver"]
