"""Parser for the body of ``POST /v1/chat/completions``."""

from dataclasses import replace

from mmrouter_lib.api import EngineType
from mmrouter_lib.prompt.render_arguments import REPLACING, render_arguments
from mmrouter_router.core.errors import RequestError
from mmrouter_router.intake.inline_images import MIN_URI, Extracted, extract_images
from mmrouter_router.intake.json_body import Raw, parse_object
from mmrouter_router.intake.json_fields import flag, mapping, max_tokens, model_of, objects, text
from mmrouter_router.intake.messages import MAX_REASONS, MessageParts, tools_of
from mmrouter_router.intake.prompt_fields import inexact_fields, inexact_messages
from mmrouter_router.intake.request import ChatRequest, Limits


def parse_chat(raw: Raw, limits: Limits, served_model: str, engine: EngineType = "vllm") -> ChatRequest:
    """Parse and check the body of a chat request for one engine type. Raises :class:`RequestError` only."""
    if len(raw) > limits.max_request_bytes:
        raise RequestError.too_large(limits.max_request_bytes)
    if len(raw) > MIN_URI and (extracted := extract_images(raw)) is not None:
        request = _parse_extracted(extracted, limits, served_model, engine)
        if request is not None:
            return request
    return parse_unextracted(raw, limits, served_model, engine)


def _parse_extracted(extracted: Extracted, limits: Limits, served_model: str, engine: EngineType) -> ChatRequest | None:
    """Return the request of a body without its images, ``None`` where the original body must be parsed."""
    try:
        request = parse_unextracted(extracted.raw, limits, served_model, engine)
    except RequestError:
        return None  # the original body gives an error that quotes the client
    images = tuple(replace(image, inline=extracted.images.get(image.url)) for image in request.images)
    placed = [image.url for image in images if image.inline is not None]
    return replace(request, images=images) if sorted(placed) == sorted(extracted.images) else None


def parse_unextracted(raw: Raw, limits: Limits, served_model: str, engine: EngineType) -> ChatRequest:
    """Parse a body whose large images are not extracted, or are placeholders already."""
    body = parse_object(raw, limits.max_request_bytes)
    model = model_of(body, served_model)
    messages = objects(body, "messages")
    if messages is None:
        raise RequestError.missing("messages")
    if not messages:
        raise RequestError.invalid("'messages' must hold at least one message.", param="messages", code="empty_array")
    parts = MessageParts(limits)
    parts.read(messages)
    add, proceed = flag(body, "add_generation_prompt", default=True), flag(body, "continue_final_message")
    if add and proceed:
        message = "A final message is either continued or followed by a new one: set 'add_generation_prompt' to false."
        raise RequestError.invalid(message, param="continue_final_message", code="invalid_value")
    variables = mapping(body, "chat_template_kwargs") or {}
    for name in REPLACING if variables else ():
        if variables.get(name) not in (None, "auto"):
            place = f"chat_template_kwargs.{name}"
            raise RequestError.invalid(f"'{place}' is not accepted.", param=place, code="invalid_value")
    mapping(body, "vllm_xargs")
    text(body, "reasoning_effort")
    has_kwargs = variables or "reasoning_effort" in body
    kwargs = render_arguments(body)["chat_template_kwargs"] if has_kwargs else None
    inexact = (*parts.inexact, *inexact_messages(messages, engine), *inexact_fields(body, engine))
    return ChatRequest(
        model=model,
        messages=messages,
        images=tuple(parts.images),
        media=tuple(parts.media),
        stream=flag(body, "stream", nullable=True),
        max_tokens=max_tokens(body, "max_completion_tokens", "max_tokens"),
        tools=tools_of(body),
        documents=objects(body, "documents"),
        add_generation_prompt=add,
        continue_final_message=proceed,
        add_special_tokens=flag(body, "add_special_tokens"),
        chat_template_kwargs=kwargs or None,
        body=body,
        inexact=inexact[:MAX_REASONS],
        source=raw,
    )
