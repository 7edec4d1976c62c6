"""Conversations for models whose templates or images the plain ones do not suit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from secrets import token_hex

import openai
from scenarios import Chat, Message, Seen
from waiting import wait_for

LEARN_SECONDS = 120.0
QUESTION = "What is to be seen here, and what of it is in the middle? " * 4


class Instructed(Chat):
    """Has a conversation's own text in a system message: some templates put a message's images before its text."""

    def messages(self, *content: str) -> list[Message]:
        (message,) = super().messages(*content)
        own, *asked = message["content"]
        return [{"role": "system", "content": own["text"]}, {"role": "user", "content": asked or "Go on."}]


@dataclass
class Taught(Instructed):
    """Shows each image behind other texts until every frontend has learned it from the engine's events.

    ``frontends``: a client of each, where there are several.
    """

    frontends: Sequence[openai.OpenAI] = ()

    def send(self, *content: str, messages: list[Message] | None = None) -> Seen:
        messages = messages or self.messages(*content)
        parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
        for url in {part["image_url"]["url"]: None for part in parts if part["type"] == "image_url"}:
            for client in self.frontends or [self.client]:
                other = replace(self, client=client, nonce=token_hex(8))
                wait_for(lambda o=other, u=url: o.known(u), LEARN_SECONDS, "the image is known")
        return super().send(messages=messages)

    def known(self, url: str) -> bool:
        return bool(self.decided(url, QUESTION)["exactness"] == "exact")
