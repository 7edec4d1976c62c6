"""What the media package is about: resolved bytes, why they could not be had, and what it counts."""

from dataclasses import dataclass, field
from typing import Final, Literal

import pybase64
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from mmrouter_router.core.errors import RequestError

_NOTHING: Final = memoryview(b"")

Source = Literal["data", "fetch", "cache", "revalidated"]

Refusal = Literal[
    "data_uri",
    "url",
    "scheme",
    "fetch_disabled",
    "host",
    "port",
    "address",
    "redirect",
    "too_large",
    "request_too_large",
    "encoding",
    "status",
    "unreachable",
    "timeout",
    "empty",
    "web_page",
    "busy",
]


@dataclass(frozen=True, slots=True)
class Media:
    """Encoded media as the engine gets it. ``mime`` is what the bytes look like, never what a client or origin says."""

    data: bytes
    mime: str
    source: Source
    text: memoryview = field(default=_NOTHING, compare=False, repr=False)
    """The bytes as base64, where somebody else has encoded them; else empty."""

    def data_uri(self) -> str:
        """Return the bytes as a ``data:`` URI."""
        text = str(self.text, "ascii") if self.text else pybase64.b64encode_as_string(self.data)
        return f"data:{self.mime};base64,{text}"


class MediaError(Exception):
    """Media cannot be had. The sentence is for the client: it holds no address that the client did not write."""

    def __init__(self, reason: Refusal, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.sentence = sentence

    def for_field(self, param: str) -> RequestError:
        """Return the answer to the client: 400 with code ``media_<reason>``, or 429 where only we are too busy."""
        code = f"media_{self.reason}"
        if self.reason == "busy":
            return RequestError.busy(self.sentence, param=param, code=code)
        return RequestError.invalid(self.sentence, param=param, code=code)


class MediaMetrics:
    """Counters of the media stage."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.resolved = Counter(
            "mmrouter_media_resolved_total",
            "Media resolved, by where the bytes came from",
            ["source"],
            registry=registry,
        )
        self.bytes = Counter(
            "mmrouter_media_bytes_total",
            "Bytes of resolved media, by where they came from",
            ["source"],
            registry=registry,
        )
        self.refused = Counter(
            "mmrouter_media_refused_total", "Media not resolved, by reason", ["reason"], registry=registry
        )
        self.joined = Counter(
            "mmrouter_media_joined_total", "Requests for media that joined a fetch under way", registry=registry
        )
        self.fetch_seconds = Histogram(
            "mmrouter_media_fetch_seconds",
            "Time of one fetch with its redirects",
            buckets=(0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
            registry=registry,
        )
        self.fetching = Gauge("mmrouter_media_fetching", "Fetches under way", registry=registry)
        self.cache_bytes = Gauge("mmrouter_media_cache_bytes", "Bytes held by the media cache", registry=registry)
