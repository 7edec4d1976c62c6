"""Prompts by SGLang's own code: its request models, template manager and endpoints, without an engine.

    python own_prompts.py < [{"folder": ..., "template": file or null, "text_only": ..., "bodies": [...]}, ...]

Run by the engine environment's Python. ``text_only``: whether the model takes nothing else. A body with ``input`` is a
request to ``/v1/responses``, any other one a chat. The last line of the output is a JSON list of a list for each
object: for each body the token ids of the prompt before images are expanded and the number of images, or the reason of
a refusal.
"""

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class Unset:
    """The engine's configuration, everything at its default."""

    trust_request_chat_template = allow_auto_truncate = False

    def __getattr__(self, name: str) -> None:
        return None


def prompts(folder: str, template: str | None, text_only: bool, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from sglang.srt.entrypoints.openai import serving_chat, serving_responses
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, ResponsesRequest
    from sglang.srt.parser import template_manager
    from sglang.srt.utils.hf_transformers_utils import get_config, get_processor, get_tokenizer

    serving_chat.get_serving = serving_chat.get_model = template_manager.get_serving = Unset
    serving_responses.get_serving = serving_responses.get_disagg = Unset
    # Its own loaders: they replace the tokenizers of some folders.
    trusted = {"trust_remote_code": any(Path(folder).glob("*.py"))}
    processor = None if text_only else get_processor(folder, **trusted)
    model = {"is_multimodal": not text_only, "get_default_sampling_params": dict}
    manager = SimpleNamespace(
        tokenizer=get_tokenizer(folder, **trusted) if processor is None else getattr(processor, "tokenizer", processor),
        processor=processor,
        server_args=Unset(),
        served_model_name="served",
        model_path=folder,
        model_config=SimpleNamespace(hf_config=get_config(folder, **trusted), **model),
        config_value=lambda name: None,
    )
    own_code = manager.model_config.hf_config.architectures[0].startswith("Llava")
    templates = template_manager.TemplateManager()
    templates.load_chat_template(manager, template, folder)
    chat = serving_chat.OpenAIServingChat(manager, templates)
    responses = serving_responses.OpenAIServingResponses(manager, templates)

    def encoded(text: str, images: int) -> list[int]:
        """Where an image processor gets a text, it tokenizes the whole. Hugging Face's does not begin it twice."""
        begin = manager.tokenizer.bos_token
        begins = begin and manager.tokenizer.encode("")  # as test_images.py compares it with the processors themselves
        begun = bool(images and begins and not own_code and text.startswith(begin))
        return list(manager.tokenizer.encode(text, add_special_tokens=not begun))

    def of_response(body: dict[str, Any]) -> dict[str, Any]:
        made = responses._make_request(ResponsesRequest(**body), None, manager.tokenizer)
        _, _, [prompt], processed = asyncio.run(made)
        images = len(processed.image_data or ())
        return {"ids": encoded(prompt, images) if isinstance(prompt, str) else list(prompt), "images": images}

    def prompt(body: dict[str, Any]) -> dict[str, Any]:
        try:
            if "input" in body:
                return of_response(body)
            request = ChatCompletionRequest(**body)
            if refused := chat._validate_request(request):
                return {"refused": refused}
            made, _ = chat._convert_to_internal_request(request)
        except Exception as error:  # as the engine's server does, which answers any of them with an error
            return {"refused": f"{type(error).__name__}: {error}"}
        images = len(made.image_data or ())
        return {"ids": encoded(made.text, images) if made.input_ids is None else list(made.input_ids), "images": images}

    return [prompt(body) for body in bodies]


if __name__ == "__main__":
    print("\n" + json.dumps([prompts(**asked) for asked in json.load(sys.stdin)]))
