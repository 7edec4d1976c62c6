"""Parser for the body of ``POST /v1/responses`` on SGLang, which is forwarded with the prompt that is predicted for it.

SGLang's own route takes all that is needed: it names an image by its bytes, as in a chat.
"""

from dataclasses import replace
from typing import Final

from mmrouter_lib.engines.base.request_fields import RESPONSES
from mmrouter_lib.engines.sglang.response_chats import UnmodelledFieldError, chat_of
from mmrouter_router.intake.field_check import Cause, Reason, inexact_fields
from mmrouter_router.intake.forwarded_routes import parse_forwarded
from mmrouter_router.intake.json_body import Raw, Served
from mmrouter_router.intake.request import ChatRequest, Limits

_PREVIOUS: Final = "previous_response_id"


def parse_sglang_responses(
    raw: Raw, limits: Limits, served: Served, *, later_systems: bool, stored: bool = False
) -> ChatRequest:
    """Parse a request; what is not modelled has a reason that names the field. Raises :class:`RequestError` only.

    ``later_systems``: whether the model's template shows system messages behind the first one. ``stored``: whether
    engines store responses.
    """
    request = parse_forwarded(raw, limits, served, "sglang", stored=stored)
    try:
        chat = chat_of(request.body, later_systems=later_systems)
    except UnmodelledFieldError as error:
        cause: Cause = "stored_messages" if error.field == _PREVIOUS else "not_modelled"
        return replace(request, inexact=(Reason(error.field, cause),))
    places: dict[int, tuple[int, int]] = {}
    for message, number, part in chat.images:
        holder = part["image_url"] if isinstance(part["image_url"], dict) else part
        places[id(holder)] = message, number
        for each in (part, holder):
            each.pop("detail", None)  # with it the engine gives the image another name
    media = tuple(part._replace(place=places.get(id(part.holder))) for part in request.media)
    inexact = tuple(inexact_fields(request.body, RESPONSES, "sglang"))
    return replace(request, messages=chat.body["messages"], inexact=inexact, as_chat=chat.body, media=media)
