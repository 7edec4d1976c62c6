"""Judgement of a request's fields by the table of its engine and endpoint (``mmrouter_lib.engines``).

An unknown field, or an unknown name inside one, is a 400, so that what a new engine release adds has no effect before
it has a judgement. A known one is modelled, harmless, set by the router alone, or a reason why the prompt cannot be
predicted (docs/exactness.md).
"""

from collections.abc import Collection, Container, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from mmrouter_lib.api import EngineType
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.nested_field_names import NESTED_FIELDS, Names, unknown_name
from mmrouter_lib.engines.base.request_fields import Effect, Endpoint, words
from mmrouter_lib.engines.vllm.request_fields import REMOVED_XARGS
from mmrouter_router.core.errors import RequestError

Exactness = Literal["exact", "bounded", "partial", "affinity"]
"""How much is predicted: all; all, but the engine may hit more than its events tell; up to the first image; nothing."""

Cause = (
    Effect
    | Literal["media", "template_argument", "several_prompts", "not_modelled", "stored_messages", "stored_images"]
)


class Reason(NamedTuple):
    """Why a request cannot be exact: the field as the client wrote it, and a cause that is fit for a metric's label."""

    field: str
    reason: Cause

    @property
    def label(self) -> str:
        return f"{self.reason}:{self.field}"


_TEMPLATE_RESERVED = words(
    "padding truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs",
    "processor_kwargs add_special_tokens",
)
"""Names in ``chat_template_kwargs`` that the engine passes to its tokenizer instead of the template."""


def check_fields(body: Mapping[str, Any], endpoint: Endpoint, engine: EngineType, allowed: Container[str] = ()) -> None:
    """Raise :class:`RequestError` for a field, or a name inside one, that is unknown or refused.

    ``allowed``: fields that are not refused.
    """
    fields = adapter(engine).request_fields[endpoint]
    for name, value in body.items():
        if not fields.knows(name):
            raise RequestError.unknown_field(name)
        if name in fields.refused and name not in allowed and value not in (None, False, "", [], {}):
            message = f"'{name}' is not supported: {fields.refused[name]}."
            raise RequestError.invalid(message, param=name, code="unsupported_parameter")
    check_nested(body, NESTED_FIELDS[endpoint])


def check_nested(body: Mapping[str, Any], nested: Mapping[str, Names]) -> None:
    """Raise :class:`RequestError` for a name inside a field that is unknown there."""
    for name in nested.keys() & body.keys():
        if path := unknown_name(body[name], nested[name]):
            raise RequestError.unknown_field(f"{name}{path}")


def inexact_fields(
    body: Mapping[str, Any], endpoint: Endpoint, engine: EngineType = "vllm", *, timed: Collection[str] = ()
) -> Iterable[Reason]:
    """Yield a reason for every field of a request whose effect on the prompt is not modelled.

    ``timed``: which of video and audio the request has.
    """
    affecting = adapter(engine).request_fields[endpoint].affecting
    for name, value in body.items():
        if name not in affecting:
            continue
        elif name == "vllm_xargs":
            if set(value or ()) - set(REMOVED_XARGS):  # those are removed
                yield Reason(name, affecting[name])
        elif name == "media_io_kwargs":
            # Options are per modality; those of modalities that the request lacks do not matter.
            if value and not (isinstance(value, Mapping) and not any(value.get(kind) for kind in ("image", *timed))):
                yield Reason(name, affecting[name])
        elif value is not None and value is not False and value != {}:
            yield Reason(name, affecting[name])
    for name in body.get("chat_template_kwargs") or ():
        if name in _TEMPLATE_RESERVED:
            yield Reason(f"chat_template_kwargs.{name}", "template_argument")
