"""Hostile text in every place of a prompt: rendered and expanded, or refused as the client's error.

The text is cut wherever the product may cut one, and has the token ids of the text as a whole.
"""

import copy
import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from campaign.mutation import mutated, places
from campaign.target import BrokenPropertyError, Target
from unit.prompt.conftest import TINY, load
from unit.router.test_intake_fuzz import ODD

from mmrouter_lib.prompt import PlaceholderError, PromptImage, TemplateError
from mmrouter_lib.prompt.segment_cache import SegmentCache
from mmrouter_router.core.errors import RequestError
from mmrouter_router.intake import Limits, parse_chat

LIMITS = Limits(max_request_bytes=1 << 20, max_images=8)
CACHED_BYTES = 1 << 20  # of segments: reached early, so that growth of the process is not the cache that fills
LONG = 1 << 30  # characters
TEXT = {"type": "text", "text": "t"}
PICTURE = {"type": "image_url", "image_url": {"url": "data:,x"}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}]
CALLS = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}]
BODIES = (
    {"messages": [{"role": "user", "content": "hello"}]},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [PICTURE, TEXT]}]},
    {"messages": [{"role": "user", "content": [PICTURE, PICTURE]}, {"role": "assistant", "content": "so"}]},
    {
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": CALLS, "reasoning": "r"},
            {"role": "tool", "tool_call_id": "c", "content": "42"},
        ],
        "tools": TOOLS,
        "documents": [{"title": "t", "text": "d"}],
        "chat_template_kwargs": {"enable_thinking": True, "x": [1]},
    },
    {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "add_special_tokens": True,
    },
)  # fmt: skip


class Prompts(Target):
    """An input: the body of a chat."""

    name = "prompts"
    short = 1200
    words = (
        *b"<|im_start|> <|im_end|> <|vision_start|> <|image_pad|> <|vision_end|> <|endoftext|> <|video_pad|>".split(),
        *b"{{ }} {% %} {# #} __class__ range(9999999) '*1000 \\u0000 \\ufffd \\ud83d\\ude00 \\u202e \\u0301".split(),
        *(b"can't stop, ", b" 1.5\\n", b"a  b", b"\\u3002\\u4e2d\\uff0c", b"'S "),
        *(b'"content":', b'"role":"tool",', b'"tool_calls":', b'"tools":[],', b"null", b"[]", b"{}", b"\\u0130" * 50),
    )

    def __enter__(self) -> Self:
        prompter = load(TINY)
        cut = SegmentCache(prompter.tokenizer, max_bytes=CACHED_BYTES, shortest=1, piece=0)
        whole = SegmentCache(prompter.tokenizer, max_bytes=0, shortest=LONG, piece=LONG)
        self._prompter, self._whole = (
            replace(prompter, codec=replace(prompter.codec, segments=segments)) for segments in (cut, whole)
        )
        return self

    def seeds(self) -> list[bytes]:
        return [json.dumps({"model": "t", **body}).encode() for body in BODIES]

    def draw(self, source: random.Random, kept: Sequence[bytes]) -> bytes:
        chosen = source.choice(kept)
        if source.random() < 0.6:
            try:
                body = json.loads(chosen)
                for _ in range(source.randint(1, 3)):
                    holder, key = source.choice(list(places(body)))
                    word = "".join(source.choice(self.words).decode() for _ in range(source.choice((1, 1, 3, 40))))
                    odd = source.choice((word, word, f"{holder[key]}{word}", source.choice(ODD)))
                    holder[key] = copy.deepcopy(odd)
                return json.dumps(body).encode()
            except (ValueError, TypeError, IndexError):
                pass
        return mutated(source, (chosen,), self.words)

    def check(self, data: bytes) -> str:
        try:
            request = parse_chat(data, LIMITS, "t")
        except RequestError as error:
            return f"not parsed: {error.code}"
        images = [PromptImage(number.to_bytes(32, "big"), 4) for number, _ in enumerate(request.images)]
        try:
            with self.product():
                expanded = self._prompter.prompt(request.body, images)
        except (TemplateError, PlaceholderError) as error:
            return f"{type(error).__name__}: {re.sub(r'[^a-z_ ]+', '#', str(error))[:40]}"
        if self._prompter.codec.segments.size_bytes > CACHED_BYTES:
            raise BrokenPropertyError("the cache of segments is above its bound")
        identities = [span.identity for span in expanded.spans]
        if identities != [image.identity for image in images]:
            raise BrokenPropertyError(f"{len(identities)} spans for {len(images)} images")
        end = 0
        for span in expanded.spans:
            if span.offset < end or span.offset + span.length > len(expanded.ids):
                raise BrokenPropertyError("a span lies outside of the prompt, or within another")
            end = span.offset + span.length
        for prompter, how in ((self._whole, "as a whole"), (self._prompter, "from cached segments")):
            again = prompter.prompt(request.body, images)
            if (again.ids, again.spans) != (expanded.ids, expanded.spans):
                raise BrokenPropertyError(f"the tokens of the text {how} are others")
        return f"{len(images)} images, {len(request.messages)} messages, {bool(request.body.get('tools'))}"
