"""A request as the engines get it: the client's fields without what clients may not set, and ours."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import orjson

from mmrouter.engines.vllm_request import ImageRewrite

CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Outgoing:
    """A body for ``path``. ``images``: what the chat's images became, in the order of the prompt."""

    path: str
    fields: Mapping[str, Any]
    images: tuple[ImageRewrite, ...] = ()

    @cached_property
    def plain(self) -> bytes:
        """The body for an engine that does everything itself."""
        return encode_body(self.fields)


def encode_body(body: object) -> bytes:
    """JSON for an engine."""
    return orjson.dumps(body)
