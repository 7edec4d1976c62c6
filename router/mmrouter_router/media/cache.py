"""HTTP cache for fetched media: LRU, bounded in bytes, fresh for as long as the origin says (RFC 9111). Pure."""

from collections import OrderedDict
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from multidict import CIMultiDict, CIMultiDictProxy

MAX_FRESH_S = 24 * 3600.0
"""Upper bound on freshness, whatever the origin says."""

Headers = CIMultiDict[str] | CIMultiDictProxy[str]

Key = tuple[str, str]
"""Tenant and URL: a shared entry would let tenants see what others fetched, and when."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A cached answer, with the URL after all redirects and its validators.

    ``fresh_until`` is a time of the caller's monotonic clock, in seconds.
    """

    data: bytes
    mime: str
    url: str
    etag: str | None
    modified: str | None
    fresh_until: float

    def conditions(self) -> dict[str, str]:
        """Return the headers of a conditional request."""
        headers = {"If-None-Match": self.etag, "If-Modified-Since": self.modified}
        return {name: value for name, value in headers.items() if value}


class MediaCache:
    """A map from :data:`Key` to :class:`Stored` of at most ``max_bytes``; 0 disables it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Key, Stored] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Stored | None:
        """Return an entry, fresh or not, and mark it as used."""
        stored = self._entries.get(key)
        if stored is not None:
            self._entries.move_to_end(key)
        return stored

    def put(self, key: Key, stored: Stored) -> None:
        """Store or replace an entry; evict the least recently used ones that no longer fit."""
        self.drop(key)
        if len(stored.data) > self._max_bytes:
            return
        self._entries[key] = stored
        self.size += len(stored.data)
        while self.size > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.size -= len(oldest.data)

    def renew(self, key: Key, fresh_until: float) -> None:
        """Extend an entry that the origin confirmed; an entry evicted meanwhile stays evicted."""
        stored = self._entries.get(key)
        if stored is not None:
            self._entries[key] = replace(stored, fresh_until=fresh_until)

    def drop(self, key: Key) -> None:
        stored = self._entries.pop(key, None)
        if stored is not None:
            self.size -= len(stored.data)


def freshness(headers: Headers, now: datetime | None = None) -> float | None:
    """Return an answer's freshness in seconds (0: revalidate every time), ``None`` where it must not be stored.

    RFC 9111 for a shared cache: ``no-store`` and ``private`` are not stored; ``s-maxage`` overrides ``max-age``, which
    overrides ``Expires``; ``Age`` counts. No heuristic freshness.
    """
    directives: dict[str, str] = {}
    for part in ",".join(headers.getall("Cache-Control", ())).split(","):
        name, _, value = part.strip().lower().partition("=")
        directives.setdefault(name, value.strip('"'))
    if (
        "no-store" in directives
        or "private" in directives
        or "*" in (vary.strip() for vary in headers.getall("Vary", ()))
    ):
        return None
    if "no-cache" in directives:
        return 0.0
    lifetime = directives.get("s-maxage", directives.get("max-age"))
    if lifetime is None:
        seconds = _until(headers, now or datetime.now(UTC))
    else:
        seconds = _seconds(lifetime) - _seconds(headers.get("Age", "0"))
    return min(max(seconds, 0.0), MAX_FRESH_S)


def _seconds(text: str) -> float:
    # Ten digits are three centuries.
    return float(text) if text.isascii() and text.isdigit() and len(text) <= 10 else 0.0


def _until(headers: Headers, now: datetime) -> float:
    expires = _date(headers.get("Expires"))
    if expires is None:
        return 0.0
    return (expires - (_date(headers.get("Date")) or now)).total_seconds()


def _date(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        moment = parsedate_to_datetime(text)
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
