"""Parser for the body of ``POST /v1/responses`` that is forwarded with the prompt that is predicted for it.

SGLang gets requests so, because its own route names an image by its bytes, as in a chat; and vLLM gets those for
gpt-oss, because its answers to them have another form than those to chats.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from mmrouter_lib.api import EngineType
from mmrouter_lib.engines.base.request_fields import RESPONSES
from mmrouter_lib.engines.base.response_chat import ChatOf, UnmodelledFieldError
from mmrouter_router.intake import json_body
from mmrouter_router.intake.field_check import Cause, Reason, inexact_fields
from mmrouter_router.intake.forwarded_routes import parse_forwarded
from mmrouter_router.intake.json_body import Raw, Served
from mmrouter_router.intake.request import ChatRequest, Limits

_CAUSES: Final[Mapping[str, Cause]] = {"previous_response_id": "stored_messages", "truncation": "truncation"}
"""Field -> the cause that it has, if not the usual one."""


def parse_forwarded_responses(
    raw: Raw, limits: Limits, served: Served, engine: EngineType, chat_of: ChatOf, *, stored: bool = False
) -> ChatRequest:
    """Parse a request; what is not modelled has a reason that names the field. Raises :class:`RequestError` only.

    ``chat_of``: returns the chat of the same prompt. ``stored``: whether engines store responses.
    """
    request = parse_forwarded(raw, limits, served, engine, stored=stored)
    json_body.optional(request.body, "vllm_xargs", dict)
    try:
        chat = chat_of(request.body)
    except UnmodelledFieldError as error:
        return replace(request, inexact=(Reason(error.field, _CAUSES.get(error.field, "not_modelled")),))
    places: dict[int, tuple[int, int]] = {}
    for message, number, part in chat.images:
        holder = part["image_url"] if isinstance(part["image_url"], dict) else part
        places[id(holder)] = message, number
        for each in (part, holder):
            each.pop("detail", None)  # with it the engine gives the image another name
    media = tuple(part._replace(place=places.get(id(part.holder))) for part in request.media)
    inexact = tuple(inexact_fields(request.body, RESPONSES, engine))
    return replace(request, messages=chat.body["messages"], inexact=inexact, as_chat=chat.body, media=media)
