"""``POST /v1/chat/completions``."""

from dataclasses import replace

from mmrouter_lib.api import EngineType
from mmrouter_lib.prompt.render_arguments import REPLACING, render_arguments
from mmrouter_router.core.errors import RequestError
from mmrouter_router.intake.body import Raw, parse_object
from mmrouter_router.intake.checks import flag, mapping, max_tokens, model_of, objects, text
from mmrouter_router.intake.fields import inexact_fields, inexact_messages
from mmrouter_router.intake.messages import MAX_REASONS, Messages, tools_of
from mmrouter_router.intake.request import ChatRequest, Limits
from mmrouter_router.intake.splice import SHORTEST, Spliced, splice


def parse_chat(raw: Raw, limits: Limits, served_model: str, engine: EngineType = "vllm") -> ChatRequest:
    """Check the body of a chat request for one type of engine. Raises :class:`RequestError` and nothing else."""
    if len(raw) > limits.max_request_bytes:
        raise RequestError.too_large(limits.max_request_bytes)
    if len(raw) > SHORTEST and (spliced := splice(raw)) is not None:
        request = _with_inline(spliced, limits, served_model, engine)
        if request is not None:
            return request
    return _parse(raw, limits, served_model, engine)


def _with_inline(spliced: Spliced, limits: Limits, served_model: str, engine: EngineType) -> ChatRequest | None:
    """Return the request of a spliced body, ``None`` where the body as it came has to be asked."""
    try:
        request = _parse(spliced.raw, limits, served_model, engine)
    except RequestError:
        return None  # which names what the client wrote
    images = tuple(replace(image, taken=spliced.inline.get(image.url)) for image in request.images)
    taken = [image.url for image in images if image.taken is not None]
    return replace(request, images=images) if sorted(taken) == sorted(spliced.inline) else None


def _parse(raw: Raw, limits: Limits, served_model: str, engine: EngineType) -> ChatRequest:
    body = parse_object(raw, limits.max_request_bytes)
    model = model_of(body, served_model)
    messages = objects(body, "messages", "messages")
    if messages is None:
        raise RequestError.missing("messages")
    if not messages:
        raise RequestError.invalid("'messages' must hold at least one message.", param="messages", code="empty_array")
    found = Messages(limits)
    found.read(messages)
    add, proceed = flag(body, "add_generation_prompt", default=True), flag(body, "continue_final_message")
    if add and proceed:
        message = "A final message is either continued or followed by a new one: set 'add_generation_prompt' to false."
        raise RequestError.invalid(message, param="continue_final_message", code="invalid_value")
    variables = mapping(body, "chat_template_kwargs", "chat_template_kwargs") or {}
    for name in REPLACING if variables else ():
        if variables.get(name) not in (None, "auto"):
            place = f"chat_template_kwargs.{name}"
            raise RequestError.invalid(f"'{place}' is not accepted.", param=place, code="invalid_value")
    mapping(body, "vllm_xargs", "vllm_xargs")
    text(body, "reasoning_effort", "reasoning_effort")
    told = variables or "reasoning_effort" in body
    kwargs = render_arguments(body)["chat_template_kwargs"] if told else None
    inexact = (*found.inexact, *inexact_messages(messages, engine), *inexact_fields(body, engine))
    return ChatRequest(
        model=model,
        messages=messages,
        images=tuple(found.images),
        media=tuple(found.media),
        stream=flag(body, "stream", nullable=True),
        max_tokens=max_tokens(body, "max_completion_tokens", "max_tokens"),
        tools=tools_of(body),
        documents=objects(body, "documents", "documents"),
        add_generation_prompt=add,
        continue_final_message=proceed,
        add_special_tokens=flag(body, "add_special_tokens"),
        chat_template_kwargs=kwargs or None,
        body=body,
        inexact=inexact[:MAX_REASONS],
        source=raw,
    )
