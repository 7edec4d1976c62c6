"""Prompts by vLLM's own code: its request models, renderer and tokenizer, without an engine.

    python own_prompts.py < [{"folder": ..., "chats": [...], "completions": [...], "responses": [...]}, ...]
    python own_prompts.py PACKAGES < ...

``PACKAGES``: folders of modules that the environment lacks. Run by the environment's Python. ``context``: tokens of the
model's context, 8,192 by default. The last line of the output is a JSON array: for each folder a list with the
token ids of every chat, then of every completion and of every request of /v1/responses, or the reason of a refusal; a
text where vLLM does not take the folder. A prompt with images, videos or audio is an object of ``ids`` and ``images``,
(name, offset, length) each, and with ``block_size`` also of ``keys``, what vLLM adds to the hash of each block of that
many tokens. ``trusted``: the folder's path without its first slash, which names under a request's options depend on.
Such options are taken then. ``processor``: the options that the engine is started with.
"""

import asyncio
import json
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Kind = str
KINDS = "chats", "completions", "responses"


def extra_keys(tokens: int, named: list[tuple[str, Any]], block_size: int) -> list[list[list[Any]]]:
    """Return the extra keys of a prompt's complete blocks, (name, offset) each, by vLLM's own function."""
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    features = [SimpleNamespace(identifier=name, mm_position=place) for name, place in named]
    request = SimpleNamespace(mm_features=features, lora_request=None, cache_salt=None, prompt_embeds=None)
    keys, at = [], 0
    for start in range(0, tokens - tokens % block_size, block_size):
        extra, at = generate_block_hash_extra_keys(request, start, start + block_size, at)  # type: ignore[arg-type]
        keys.append([list(key[-2:]) for key in extra or ()])  # 0.30 has no "mm" before the two
    return keys


async def prompts(
    folder: str,
    context: int = 8192,
    block_size: int | None = None,
    trusted: str = "",
    processor: dict[str, int] | None = None,
    **bodies: list[dict[str, Any]],
) -> list[Any]:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.model_executor.models import registry
    from vllm.renderers import renderer_from_config
    from vllm.renderers.online_renderer import OnlineRenderer

    registry._run_in_subprocess = lambda look: look()  # each process would import all of vLLM again
    config = ModelConfig(
        model=folder,
        trust_remote_code=any(Path(folder).glob("*.py")),
        dtype="float32",
        max_model_len=context,
        limit_mm_per_prompt={"image": 32, "video": 32},
        **({"mm_processor_kwargs": processor} if processor else {}),
    )
    server = OnlineRenderer(
        config,
        renderer_from_config(VllmConfig(model_config=config)),
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
        **({"trust_request_mm_kwargs": True} if trusted else {}),
    )

    async def asked(kind: Kind, body: dict[str, Any]) -> Any:
        body = {**body, "model": "m"}
        try:
            if kind == "chats":
                made = await server.render_chat(ChatCompletionRequest(**body))
                made = made[1] if isinstance(made, tuple) else made
            elif kind == "responses":
                made = await server.render_responses(ResponsesRequest(**body))
                made = [made.engine_input] if hasattr(made, "engine_input") else made
            else:
                made = await server.render_completion(CompletionRequest(**body))
        except Exception as error:  # as the engine's server does, which answers any of them with an error
            return {"refused": f"{type(error).__name__}: {error}"}
        if not isinstance(made, list):
            return {"refused": str(made)}
        ids, places = list(made[0]["prompt_token_ids"]), made[0].get("mm_placeholders")
        if not places:
            return ids
        named = [pair for kind in places for pair in zip(made[0]["mm_hashes"][kind], places[kind], strict=True)]
        named.sort(key=lambda pair: pair[1].offset)
        answer = {"ids": ids, "images": [[name, place.offset, place.length] for name, place in named]}
        return answer if block_size is None else {**answer, "keys": extra_keys(len(ids), named, block_size)}

    return [await asked(kind, body) for kind in KINDS for body in bodies.get(kind, ())]


def answers_of(asked: dict[str, Any]) -> list[Any] | str:
    try:
        return asyncio.run(prompts(**asked))
    except Exception as error:  # of one folder; the others have answers
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"


def main() -> None:
    output, sys.stdout = sys.stdout, sys.stderr  # logs are no part of the answer
    sys.path += sys.argv[1:]
    answers = [answers_of(asked) for asked in json.load(sys.stdin)]
    output.write("\n" + json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
