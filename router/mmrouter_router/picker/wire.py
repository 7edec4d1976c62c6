"""The gRPC messages of Envoy's ext_proc and of gRPC health, as far as a picker reads or writes them.

They are declared here because the published stubs (xds-protos) install older copies of files of opentelemetry-proto and
googleapis-common-protos over the newer ones that the router's traces use. Fields that are not listed are ignored by
protobuf. Numbers: envoy/service/ext_proc/v3/external_processor.proto and grpc/health/v1/health.proto.
"""

from collections.abc import Mapping
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

EXT_PROC_SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH_SERVICE: Final = "grpc.health.v1.Health"
FULL_DUPLEX_STREAMED: Final = 4  # of ProcessingMode.BodySendMode
APPEND, OVERWRITE = 0, 2  # of HeaderValueOption.HeaderAppendAction; both add a header that is not there
SERVING, NOT_SERVING = 1, 2  # of HealthCheckResponse.ServingStatus

_PACKAGE: Final = "mmrouter.ext_proc"
_STRUCT: Final = "google.protobuf.Struct"
_Kind = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    "bool": _Kind.TYPE_BOOL,
    "bytes": _Kind.TYPE_BYTES,
    "int32": _Kind.TYPE_INT32,
    "string": _Kind.TYPE_STRING,
}

_Fields = Mapping[str, tuple[int, str]]
_MESSAGES: Final[Mapping[str, _Fields]] = {
    # name -> (number, type); "*" before a type: repeated, "|": a member of the message's only oneof
    "Header": {"key": (1, "string"), "value": (2, "string"), "raw_value": (3, "bytes")},
    "HeaderMap": {"headers": (1, "*Header")},
    "MetadataEntry": {"key": (1, "string"), "value": (2, _STRUCT)},
    "Metadata": {"filter_metadata": (1, "*MetadataEntry")},
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")},
    "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "HttpTrailers": {"trailers": (1, "HeaderMap")},
    "ProtocolConfiguration": {"request_body_mode": (1, "int32"), "response_body_mode": (2, "int32")},
    "ProcessingRequest": {
        "request_headers": (2, "|HttpHeaders"),
        "response_headers": (3, "|HttpHeaders"),
        "request_body": (4, "|HttpBody"),
        "response_body": (5, "|HttpBody"),
        "request_trailers": (6, "|HttpTrailers"),
        "response_trailers": (7, "|HttpTrailers"),
        "metadata_context": (8, "Metadata"),
        "protocol_config": (11, "ProtocolConfiguration"),
    },
    "HeaderOption": {"header": (1, "Header"), "append_action": (3, "int32")},
    "HeaderMutation": {"set_headers": (1, "*HeaderOption"), "remove_headers": (2, "*string")},
    "StreamedBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "BodyMutation": {"streamed_response": (3, "StreamedBody")},
    "CommonResponse": {
        "header_mutation": (2, "HeaderMutation"),
        "body_mutation": (3, "BodyMutation"),
        "clear_route_cache": (5, "bool"),
    },
    "Changed": {"response": (1, "CommonResponse")},  # HeadersResponse and BodyResponse
    "TrailersResponse": {"header_mutation": (1, "HeaderMutation")},
    "HttpStatus": {"code": (1, "int32")},
    "ImmediateResponse": {
        "status": (1, "HttpStatus"),
        "headers": (2, "HeaderMutation"),
        "body": (3, "bytes"),
        "details": (5, "string"),
    },
    "ProcessingResponse": {
        "request_headers": (1, "|Changed"),
        "response_headers": (2, "|Changed"),
        "request_body": (3, "|Changed"),
        "response_body": (4, "|Changed"),
        "request_trailers": (5, "|TrailersResponse"),
        "response_trailers": (6, "|TrailersResponse"),
        "immediate_response": (7, "|ImmediateResponse"),
        "dynamic_metadata": (8, _STRUCT),
    },
    "HealthCheckRequest": {"service": (1, "string")},
    "HealthCheckResponse": {"status": (1, "int32")},
}


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="mmrouter/ext_proc.proto", package=_PACKAGE, syntax="proto3", dependency=[struct_pb2.DESCRIPTOR.name]
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        if any(kind.startswith("|") for _, kind in fields.values()):
            message.oneof_decl.add(name="kind")
        for field, (number, kind) in fields.items():
            label = _Kind.LABEL_REPEATED if kind.startswith("*") else _Kind.LABEL_OPTIONAL
            plain = kind.lstrip("*|")
            made = message.field.add(name=field, number=number, label=label)
            if plain in _SCALARS:
                made.type = _SCALARS[plain]
            else:
                made.type = _Kind.TYPE_MESSAGE
                made.type_name = f".{plain}" if "." in plain else f".{_PACKAGE}.{plain}"
            if kind.startswith("|"):
                made.oneof_index = 0
    return file


_POOL: Final = descriptor_pool.DescriptorPool()
_POOL.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
_POOL.Add(_file())


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


ProcessingRequest: Final = _message("ProcessingRequest")
ProcessingResponse: Final = _message("ProcessingResponse")
HealthCheckRequest: Final = _message("HealthCheckRequest")
HealthCheckResponse: Final = _message("HealthCheckResponse")
