"""HTTP cache for fetched media: LRU, bounded in bytes, fresh for as long as the origin says (RFC 9111). Pure."""

from collections import OrderedDict
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from multidict import CIMultiDict, CIMultiDictProxy

MAX_FRESH_S = 24 * 3600.0  # upper bound on freshness, whatever the origin says

Headers = CIMultiDict[str] | CIMultiDictProxy[str]

_OBJECTS = 1024  # bytes of an entry's objects
Key = tuple[str, str]  # tenant and URL: a shared entry would let tenants see what others fetched, and when


@dataclass(frozen=True, slots=True)
class Stored:
    """A cached answer: URL behind redirects, validators; ``fresh_until``: seconds of the caller's monotonic clock."""

    data: bytes
    mime: str
    url: str
    etag: str | None
    modified: str | None
    fresh_until: float

    def conditions(self) -> dict[str, str]:
        headers = {"If-None-Match": self.etag, "If-Modified-Since": self.modified}
        return {name: value for name, value in headers.items() if value}


@dataclass(frozen=True, slots=True)
class Fetched:
    """An answer. ``fresh_s``: its freshness, ``None`` where it must not be stored."""

    data: bytes
    url: str
    etag: str | None
    modified: str | None
    fresh_s: float | None


@dataclass(frozen=True, slots=True)
class NotModified:
    """The origin confirmed the stored answer for ``fresh_s`` seconds."""

    fresh_s: float


class MediaCache:
    """A map from :data:`Key` to :class:`Stored` of at most ``max_bytes``; 0 disables it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Key, Stored] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Stored | None:
        stored = self._entries.get(key)
        if stored is not None:
            self._entries.move_to_end(key)
        return stored

    def put(self, key: Key, stored: Stored) -> None:
        self.drop(key)
        if (size := _size(key, stored)) > self._max_bytes:
            return
        self._entries[key] = stored
        self.size += size
        while self.size > self._max_bytes:
            self.size -= _size(*self._entries.popitem(last=False))

    def renew(self, key: Key, fresh_until: float) -> None:
        """Extend an entry that the origin confirmed; an entry evicted meanwhile stays evicted."""
        stored = self._entries.get(key)
        if stored is not None:
            self._entries[key] = replace(stored, fresh_until=fresh_until)

    def drop(self, key: Key) -> None:
        stored = self._entries.pop(key, None)
        if stored is not None:
            self.size -= _size(key, stored)


def _size(key: Key, stored: Stored) -> int:
    """Return the bytes of an entry with its texts, which its client and its origin choose."""
    texts = (*key, stored.url, stored.etag, stored.modified)
    return len(stored.data) + sum(len(text) for text in texts if isinstance(text, str)) + _OBJECTS


def freshness(headers: Headers, now: datetime | None = None) -> float | None:
    """Return an answer's freshness in seconds (0: revalidate every time), ``None`` where it must not be stored.

    RFC 9111 for a shared cache: ``no-store`` and ``private`` are not stored; ``s-maxage`` overrides ``max-age``, which
    overrides ``Expires``; ``Age`` counts. No heuristic freshness.
    """
    directives: dict[str, str] = {}
    for part in ",".join(headers.getall("Cache-Control", ())).split(","):
        name, _, value = part.strip().lower().partition("=")
        directives.setdefault(name, value.strip('"'))
    vary = [name.strip() for name in headers.getall("Vary", ())]
    if "no-store" in directives or "private" in directives or "*" in vary:
        return None
    if "no-cache" in directives:
        return 0.0
    lifetime = directives.get("s-maxage", directives.get("max-age"))
    if lifetime is not None:
        seconds = _seconds(lifetime) - _seconds(headers.get("Age", "0"))
    elif (expires := _date(headers.get("Expires"))) is not None:
        seconds = (expires - (_date(headers.get("Date")) or now or datetime.now(UTC))).total_seconds()
    else:
        return 0.0
    return min(max(seconds, 0.0), MAX_FRESH_S)


def modification(headers: Headers) -> str | None:
    """Return ``Last-Modified`` where it distinguishes one content from the next, else ``None``.

    It has a resolution of a second: content that was answered within that second may have changed later in it (RFC 9110
    section 8.8.2.2). The next fetch would then be answered by 304, and the router would predict the old content.
    """
    modified, answered = _date(headers.get("Last-Modified")), _date(headers.get("Date"))
    settled = modified is not None and answered is not None and (answered - modified).total_seconds() >= 1
    return headers["Last-Modified"] if settled else None


def _seconds(text: str) -> float:
    # Ten digits are three centuries.
    return float(text) if text.isascii() and text.isdigit() and len(text) <= 10 else 0.0


def _date(text: str | None) -> datetime | None:
    try:
        moment = parsedate_to_datetime(text or "")
    except (ValueError, OverflowError):
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
