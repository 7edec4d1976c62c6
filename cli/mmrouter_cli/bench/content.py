"""Words and pictures by name, and the requests made of them. The same salt and name give the same bytes."""

import base64
import functools
import io
import random
from typing import Any

import msgspec
from PIL import Image

from mmrouter_cli.bench.types import Conversation, Shown, Words

VOCABULARY = (  # noqa: SIM905
    "able about above across after again air all along also always among animal answer area around ask back base "
    "bear because been before began begin behind best better between big bird black blue boat body book both bring "
    "build busy call came car carry change check children city class clear close cold colour come common complete "
    "country course cover cross dark day deep door down draw drive early earth east easy eat end enough even every "
    "example eye face fact family far farm fast feel few field figure fill final find fine fire first fish five fly "
    "follow food form four free front full game gave girl give glass go gold good great green ground group grow half "
    "hand happy hard head hear heat help here high hold home horse hot hour house idea inch island keep kind king "
    "know land language large last late laugh lead learn leave left letter life light like line list listen little "
    "live long look love low machine made main make many map mark mean measure might mile mind minute money moon more "
    "morning most mother mountain move much music name near need never new next night north note nothing notice now "
    "number object ocean often old once only open order other over own page paint paper part pass people picture "
    "piece place plain plan plane plant play point power press problem produce pull question quick rain reach read"
).split()
NOISE = 8
"""Pixels per cell of a picture's noise: a file has about as many bytes as a photograph of its size."""
QUALITY = 85
KEPT_TEXTS, KEPT_PICTURES = 512, 64


def text(salt: str, tokens_per_word: float, words: Words) -> str:
    """Return words that make about so many tokens; fewer tokens of a name are the beginning of more."""
    count = max(1, round(words.tokens / tokens_per_word))
    return " ".join(random.Random(f"{salt}/{words.name}").choices(VOCABULARY, k=count))


def photograph(salt: str, shown: Shown) -> str:
    """Return a JPEG as a ``data:`` URI."""
    cells = (max(1, shown.width // NOISE), max(1, shown.height // NOISE))
    noise = random.Random(f"{salt}/{shown.name}").randbytes(3 * cells[0] * cells[1])
    out = io.BytesIO()
    image = Image.frombytes("RGB", cells, noise)
    image.resize((shown.width, shown.height), Image.Resampling.BICUBIC).save(out, "JPEG", quality=QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()


class Writer:
    """Makes the bodies of one run; keeps the last texts and pictures, because most are shown again."""

    def __init__(self, salt: str, tokens_per_word: float, model: str, *, ignore_eos: bool) -> None:
        self._text = functools.lru_cache(KEPT_TEXTS)(functools.partial(text, salt, tokens_per_word))
        self._picture = functools.lru_cache(KEPT_PICTURES)(functools.partial(photograph, salt))
        self._fields: dict[str, Any] = {
            "model": model,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ignore_eos:
            self._fields["ignore_eos"] = True

    def body(self, conversation: Conversation, number: int) -> bytes:
        """Return the chat request of one turn, with all that was said before it."""
        messages: list[dict[str, Any]] = []
        if conversation.system:
            messages.append({"role": "system", "content": self._said(conversation.system)})
        for turn in conversation.turns[:number]:
            messages.append({"role": "user", "content": self._content(turn.parts)})
            messages.append({"role": "assistant", "content": self._text(turn.answer)})
        asked = conversation.turns[number]
        messages.append({"role": "user", "content": self._content(asked.parts)})
        return msgspec.json.encode({**self._fields, "messages": messages, "max_tokens": asked.answer.tokens})

    def _content(self, parts: tuple[Words | Shown, ...]) -> str | list[dict[str, Any]]:
        words = tuple(part for part in parts if isinstance(part, Words))
        pictures = [part for part in parts if isinstance(part, Shown)]
        if not pictures:
            return self._said(words)
        shown: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": self._picture(p)}} for p in pictures]
        return [*shown, {"type": "text", "text": self._said(words)}]

    def _said(self, words: tuple[Words, ...]) -> str:
        return " ".join(map(self._text, words))
