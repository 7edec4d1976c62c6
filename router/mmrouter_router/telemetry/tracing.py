"""What a request's time went into, told as spans: to nobody, unless the resource names an OTLP endpoint.

The stages of a request say here where they begin and end. :mod:`mmrouter_router.telemetry.otlp_export`, imported
only where there is an
endpoint, makes OpenTelemetry's spans of it. Nothing of a request's content is told: numbers, names of this deployment
and kinds of errors, no text, no URL, no value of a header.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Final, Self

Value = str | int | float | bool | Sequence[str]
Headers = Iterable[tuple[bytes, bytes]]

PASSED_ON: Final = (b"traceparent", b"tracestate")
"""Headers of W3C Trace Context, which an engine gets with or without an endpoint of ours."""


class Span:
    """Part of a request's work, from when it was made to ``end``; this one is told to nobody, and is false."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def tell(self, attributes: Mapping[str, Value]) -> None:
        """Add what is known of it."""

    def event(self, name: str) -> None:
        """Note that something happened now."""

    def fail(self, kind: str) -> None:
        """Note that it failed, and how; ``kind`` is one of few."""

    def end(self) -> None:
        """It is over; a second call changes nothing."""

    def part(self, name: str, *, client: bool = False) -> "Span":
        """Begin a part of it; ``client``: the part is what another process does for us."""
        return self

    def passed_on(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Return the trace context that another process continues from; ``headers`` is the client's own."""
        return headers


class Tracing:
    """Where spans go; from here, nowhere."""

    def request(self, method: str, path: str, headers: Headers) -> Span:
        """Begin the span of a client's request, in the client's trace where ``headers`` name one."""
        return NOBODY

    def close(self) -> None:
        """Send what waits, for a bounded time."""


NOBODY: Final = Span()
NO_TRACING: Final = Tracing()
_current: ContextVar[Span] = ContextVar("mmrouter_request", default=NOBODY)


def enter(span: Span) -> None:
    """Have the current task, and tasks that it starts, work for a request."""
    if span is not NOBODY:
        _current.set(span)


def stage(name: str, *, client: bool = False) -> Span:
    """Begin a part of the request that the current task works for."""
    span = _current.get()
    return span if span is NOBODY else span.part(name, client=client)


def passed_on(headers: Headers) -> dict[str, str]:
    """Return the client's trace context; of a header that came several times, the values in one."""
    found: dict[str, str] = {}
    for name, value in headers:
        if name in PASSED_ON:
            key, text = name.decode("latin-1"), value.decode("latin-1")
            found[key] = f"{found[key]},{text}" if key in found else text
    return found


def failure_of(error: BaseException) -> str:
    """Return the kind of an error. Its message may quote the request, and is not told."""
    code = getattr(error, "code", None)
    return code if isinstance(code, str) and code else type(error).__name__


def outcome(code: str) -> tuple[dict[str, Value], str]:
    """Return what is told of how a request ended, and the kind of its failure, empty for none.

    ``code`` is the label of ``mmrouter_requests_total``. A 4xx is the client's failure and none of ours.
    """
    if code == "499":
        return {}, "client_gone"
    if not code.isdigit():
        return {}, code
    return {"http.response.status_code": int(code)}, code if code >= "500" else ""
