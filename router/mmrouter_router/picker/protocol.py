"""The endpoint picker protocol 1.0.0 of the Gateway API Inference Extension, as messages of ext_proc. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from mmrouter_router.http.engine_connection import address
from mmrouter_router.picker.wire import APPEND, FULL_DUPLEX_STREAMED, OVERWRITE, ProcessingResponse

Headers = Sequence[tuple[bytes, bytes]]

DESTINATION: Final = "x-gateway-destination-endpoint"
SERVED: Final = "x-gateway-destination-endpoint-served"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
SUBSET_NAMESPACE, ENDPOINT_NAMESPACE = "envoy.lb.subset_hint", "envoy.lb"  # of the filters' metadata
TEST_SELECTION: Final = b"test-epp-endpoint-selection"
CHUNK: Final = 60_000  # bytes of a body per message; the protocol allows 64 kB with the message's own fields

_KEPT_HEADERS: Final = (b":", b"x-forwarded-", b"x-envoy-")  # beginnings of names that are the gateway's own
_KEPT: Final = frozenset({b"host", b"te", b"via"})
_FRAMING: Final = frozenset({b"connection", b"content-length"})  # the gateway's own in an answer that it sends itself


class ProtocolError(Exception):
    """The gateway sent a message that has no place in the protocol; the text says which one."""


class BrokenOffError(Exception):
    """A request ended without its whole answer."""


def check_first(message: Any) -> None:
    """Raise :class:`ProtocolError` for a stream's first message that begins no request in full duplex."""
    if message.WhichOneof("kind") != "request_headers":
        raise ProtocolError(f"a stream begins with request_headers, not {message.WhichOneof('kind')}")
    if message.HasField("protocol_config"):
        modes = message.protocol_config.request_body_mode, message.protocol_config.response_body_mode
        if modes != (FULL_DUPLEX_STREAMED, FULL_DUPLEX_STREAMED):
            raise ProtocolError("request_body_mode and response_body_mode must be FULL_DUPLEX_STREAMED")


class Order:
    """The order of a stream's messages: in each direction headers, body, trailers, and nothing behind the end."""

    _BEFORE: Final = {"headers": ("",), "body": ("headers", "body"), "trailers": ("headers", "body")}

    def __init__(self) -> None:
        self._last = {"request": "", "response": ""}

    def check(self, message: Any) -> str:
        """Return the message's kind. Raises :class:`ProtocolError` where it has no place behind the earlier ones."""
        kind: str = message.WhichOneof("kind") or "an unknown message"
        direction, _, part = kind.partition("_")
        last = self._last.get(direction)
        if last not in self._BEFORE.get(part, ()):
            raise ProtocolError(f"{kind} has no place behind the {last or 'beginning'}")
        ended = part == "trailers" or getattr(message, kind).end_of_stream
        self._last[direction] = "end" if ended else part
        return kind


def client_headers(message: Any) -> list[tuple[bytes, bytes]]:
    """Return the headers of an ``HttpHeaders``, names in lower case, pseudo headers included."""
    return [(h.key.lower().encode(), h.raw_value or h.value.encode()) for h in message.headers.headers]


def allowed(message: Any, *, test_selection: bool) -> frozenset[str] | None:
    """Return the endpoints that a request's first message allows, ``None`` for all: those of the gateway's hint, and
    with ``test_selection`` those of the header of conformance tests.
    """
    offered = _endpoints(message, SUBSET_NAMESPACE, SUBSET)
    wanted = dict(client_headers(message.request_headers)).get(TEST_SELECTION) if test_selection else None
    if wanted is None:
        return offered
    chosen = endpoints_of(wanted.decode("latin-1"))
    return chosen if offered is None else offered & chosen


def allows(allowed: frozenset[str] | None, ip: str, port: int) -> bool:
    return allowed is None or not allowed.isdisjoint((ip, address(ip, port)))


def served(message: Any) -> str:
    """Return the endpoint that the gateway reports to have used, empty where it reports none."""
    return next(iter(_endpoints(message, ENDPOINT_NAMESPACE, SERVED) or ()), "")


def endpoints_of(text: str) -> frozenset[str]:
    return frozenset(part.strip() for part in text.split(",") if part.strip())


def _endpoints(message: Any, namespace: str, key: str) -> frozenset[str] | None:
    """Return the endpoints under a key of the filters' metadata, ``None`` without it: a text with commas, or a list."""
    for entry in message.metadata_context.filter_metadata:
        if entry.key == namespace and key in entry.value.fields:
            value = entry.value.fields[key]
            if value.WhichOneof("kind") == "list_value":
                return endpoints_of(",".join(item.string_value for item in value.list_value.values))
            return endpoints_of(value.string_value)
    return None


def forward(ip: str, port: int, path: str, arrived: Headers, headers: Mapping[str, str], length: int | None) -> Any:
    """Return the answer to a request's headers that sends it to an engine.

    The engine gets ``headers`` and what the gateway itself adds, and none of the client's, such as its API key.
    ``arrived``: the headers as they came, with pseudo headers. ``length``: of the body.
    """
    own = dict(headers)
    if length is not None:
        own["content-length"] = str(length)
    if dict(arrived).get(b":path") != path.encode():
        own[":path"] = path
    removed = {name for name, _ in arrived if not name.startswith(_KEPT_HEADERS) and name not in _KEPT}
    return destination(address(ip, port), own, sorted(name.decode("latin-1") for name in removed))


def destination(chosen: str, headers: Mapping[str, str] | None = None, removed: Iterable[str] = ()) -> Any:
    """Return the answer to a request's headers that sends it to an endpoint, with these changes of its headers.

    The gateway keeps the route of the request as the client sent it, whose headers may be removed here.
    """
    response = ProcessingResponse()
    changed = response.request_headers.response
    mutate(changed.header_mutation, {**(headers or {}), DESTINATION: chosen}.items(), removed)
    place = response.dynamic_metadata.fields[ENDPOINT_NAMESPACE].struct_value
    place.fields[DESTINATION].string_value = chosen
    return response


def answer_headers(status: int, arrived: Headers, headers: Headers) -> Any:
    """Return the answer to an engine's response headers that passes on ``headers`` and no others."""
    passed = {name for name, _ in headers}
    removed = {n for n, _ in arrived if n not in passed and not n.startswith(_KEPT_HEADERS)}
    response = ProcessingResponse()
    own = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
    if dict(arrived).get(b":status") != str(status).encode():
        own.append((":status", str(status)))
    mutate(response.response_headers.response.header_mutation, own, sorted(n.decode("latin-1") for n in removed))
    return response


def immediate(status: int, headers: Headers, body: bytes) -> Any:
    """Return the message by which the gateway answers the client itself, and ends the exchange."""
    response = ProcessingResponse()
    answer = response.immediate_response
    answer.status.code, answer.body, answer.details = status, body, "mmrouter"
    own = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in headers if n not in _FRAMING]
    mutate(answer.headers, own, ())
    return response


def body_chunks(kind: str, pieces: Iterable[bytes | memoryview], *, last: bool) -> Iterator[Any]:
    """Yield a body as messages. ``kind``: ``request_body`` or ``response_body``. ``last``: it ends the body."""
    pending: Any = None
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(view), CHUNK):
            if pending is not None:
                yield pending
            pending = _chunk(kind, bytes(view[start : start + CHUNK]))
    if last:
        pending = _chunk(kind, b"") if pending is None else pending
        getattr(pending, kind).response.body_mutation.streamed_response.end_of_stream = True
    if pending is not None:
        yield pending


def unchanged(kind: str, message: Any) -> Iterator[Any]:
    """Yield the answers to a message of this kind which pass it on."""
    if kind.endswith("_body"):
        part = getattr(message, kind)
        yield from body_chunks(kind, (part.body,), last=part.end_of_stream)
    else:
        yield pass_on(kind)


def pass_on(kind: str) -> Any:
    """Return the answer to headers or trailers of this kind which passes them on as they are."""
    response = ProcessingResponse()
    getattr(response, kind).SetInParent()
    return response


def mutate(mutation: Any, headers: Iterable[tuple[str, str]], removed: Iterable[str]) -> None:
    """Set headers, of which several may have one name, and remove others."""
    names: set[str] = set()
    for name, value in headers:
        option = mutation.set_headers.add(append_action=APPEND if name in names else OVERWRITE)
        option.header.key, option.header.raw_value = name, value.encode("latin-1")
        names.add(name)
    mutation.remove_headers.extend(name for name in removed if name not in names)


def _chunk(kind: str, data: bytes) -> Any:
    response = ProcessingResponse()
    getattr(response, kind).response.body_mutation.streamed_response.body = data
    return response
