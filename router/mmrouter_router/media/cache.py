"""Fetched bytes kept for a while: least recently used first out, bounded in bytes, fresh as the origin says. Pure."""

from collections import OrderedDict
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from multidict import CIMultiDict, CIMultiDictProxy

MAX_FRESH_S = 24 * 3600.0
"""However long an origin calls an answer fresh, it is asked again after this."""

Headers = CIMultiDict[str] | CIMultiDictProxy[str]

Key = tuple[str, str]
"""Tenant and URL: what one tenant may fetch, and when it was fetched, is nobody else's business."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An answer: its bytes, the URL that gave them at the end of all redirects, and what to ask that URL with.

    ``fresh_until`` is a time of the caller's monotonic clock, in seconds.
    """

    data: bytes
    mime: str
    url: str
    etag: str | None
    modified: str | None
    fresh_until: float

    def conditions(self) -> dict[str, str]:
        """Return the request headers of a conditional request."""
        headers = {"If-None-Match": self.etag, "If-Modified-Since": self.modified}
        return {name: value for name, value in headers.items() if value}


class MediaCache:
    """A map from :data:`Key` to :class:`Stored` of at most ``max_bytes``; 0 keeps nothing."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Key, Stored] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Stored | None:
        """Return an entry, fresh or not, and count it as used."""
        stored = self._entries.get(key)
        if stored is not None:
            self._entries.move_to_end(key)
        return stored

    def put(self, key: Key, stored: Stored) -> None:
        """Keep an entry in place of the old one; drop the least recently used ones that no longer fit."""
        self.drop(key)
        if len(stored.data) > self._max_bytes:
            return
        self._entries[key] = stored
        self.size += len(stored.data)
        while self.size > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.size -= len(oldest.data)

    def renew(self, key: Key, fresh_until: float) -> None:
        """Note that the origin confirmed an entry. One that was dropped meanwhile stays dropped."""
        stored = self._entries.get(key)
        if stored is not None:
            self._entries[key] = replace(stored, fresh_until=fresh_until)

    def drop(self, key: Key) -> None:
        """Forget an entry."""
        stored = self._entries.pop(key, None)
        if stored is not None:
            self.size -= len(stored.data)


def freshness(headers: Headers, now: datetime | None = None) -> float | None:
    """Return for how many seconds an answer may be used unasked (0: ask every time), ``None``: it must not be kept.

    RFC 9111 for a shared cache: ``no-store`` and ``private`` are not kept, ``s-maxage`` goes before ``max-age`` before
    ``Expires``, ``Age`` counts. Nothing is guessed: no header, no freshness.
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
    # Ten digits are three centuries; longer numbers are not worth parsing.
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
