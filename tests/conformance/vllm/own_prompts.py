"""Prompts by vLLM's own code: its request models, renderer and tokenizer, without an engine.

    python own_prompts.py < {"folders": [...], "chats": [...], "completions": [...]}

Run by the engine environment's Python. The last line of the output is a JSON object: for each folder a list with the
token ids of every chat, then of every completion, or the reason of a refusal. A chat with images is an object of
``ids`` and ``images``, (name, offset, length) each.
"""

import asyncio
import json
import sys
from typing import Any


async def prompts(folder: str, chats: list[dict[str, Any]], completions: list[dict[str, Any]]) -> list[Any]:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.renderers import renderer_from_config
    from vllm.renderers.online_renderer import OnlineRenderer

    config = ModelConfig(model=folder, dtype="float32", max_model_len=8192, limit_mm_per_prompt={"image": 32})
    server = OnlineRenderer(
        config,
        renderer_from_config(VllmConfig(model_config=config)),
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
    )

    async def asked(body: dict[str, Any], *, chat: bool) -> Any:
        try:
            if chat:
                made = await server.render_chat(ChatCompletionRequest(**body, model="m"))
                made = made[1] if isinstance(made, tuple) else made
            else:
                made = await server.render_completion(CompletionRequest(**body, model="m"))
        except Exception as error:  # as the engine's server does, which answers any of them with an error
            return {"refused": f"{type(error).__name__}: {error}"}
        if not isinstance(made, list):
            return {"refused": str(made)}
        ids, places = list(made[0]["prompt_token_ids"]), made[0].get("mm_placeholders")
        if not places:
            return ids
        named = zip(made[0]["mm_hashes"]["image"], places["image"], strict=True)
        return {"ids": ids, "images": [[name, place.offset, place.length] for name, place in named]}

    return [*[await asked(body, chat=True) for body in chats], *[await asked(body, chat=False) for body in completions]]


def main() -> None:
    request = json.load(sys.stdin)
    output, sys.stdout = sys.stdout, sys.stderr  # logs are no part of the answer
    answers = {
        folder: asyncio.run(prompts(folder, request["chats"], request["completions"])) for folder in request["folders"]
    }
    output.write("\n" + json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
