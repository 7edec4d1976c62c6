"""The tracing interface, which does nothing unless the resource names an OTLP endpoint (:mod:`.otlp_export`).

Spans hold nothing of a request's content: numbers, names of this deployment and kinds of errors, but no text, URL or
header value.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Final, Self

Value = str | int | float | bool | Sequence[str]
Headers = Iterable[tuple[bytes, bytes]]

PASSED_ON: Final = (b"traceparent", b"tracestate")  # headers that engines get even if the router does not trace


class Span:
    """A span from its creation to ``end``. This base class records nothing and is false."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...

    def set_attributes(self, attributes: Mapping[str, Value]) -> None: ...

    def event(self, name: str) -> None: ...

    def fail(self, kind: str) -> None:
        """Mark the span as failed; ``kind`` is one of few values."""

    def end(self) -> None:
        """End the span; idempotent."""

    def child(self, name: str, *, client: bool = False) -> "Span":
        """Begin a child span; ``client``: of a call to another process."""
        return self

    def propagate(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Return the trace context for another process; ``headers``: the client's own."""
        return headers


class Tracing:
    """A factory of request spans. This base class records nothing."""

    def request(self, method: str, path: str, headers: Headers) -> Span:
        """Begin the span of a client's request, in the trace that ``headers`` name, if any."""
        return NO_SPAN

    def close(self) -> None:
        """Export queued spans within a bounded time; later spans are lost."""


NO_SPAN: Final = Span()
NO_TRACING: Final = Tracing()
_current: ContextVar[Span] = ContextVar("mmrouter_request", default=NO_SPAN)


def enter(span: Span) -> None:
    """Make ``span`` the parent of the spans of the current task and of tasks that it starts."""
    if span is not NO_SPAN:
        _current.set(span)


def child_span(name: str, *, client: bool = False) -> Span:
    span = _current.get()
    return span if span is NO_SPAN else span.child(name, client=client)


def trace_context(headers: Headers) -> dict[str, str]:
    """Return the client's trace context; the values of a repeated header are joined."""
    context: dict[str, str] = {}
    for name, value in headers:
        if name in PASSED_ON:
            key, text = name.decode("latin-1"), value.decode("latin-1")
            context[key] = f"{context[key]},{text}" if key in context else text
    return context


def failure_of(error: BaseException) -> str:
    """Return the kind of an error; its message may quote the request."""
    code = getattr(error, "code", None)
    return code if isinstance(code, str) and code else type(error).__name__


def outcome(code: str) -> tuple[dict[str, Value], str]:
    """Return the attributes and failure (none of a 4xx) of a request's end; ``code``: ``mmrouter_requests_total``'s."""
    if code == "499":
        return {}, "client_gone"
    if not code.isdigit():
        return {}, code
    return {"http.response.status_code": int(code)}, code if code >= "500" else ""
