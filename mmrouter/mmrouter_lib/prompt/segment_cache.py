"""Cache the token ids of text segments, so that only the new part of a conversation is tokenized.

A text may be cut behind a token at which the tokenizer always splits first. Texts are cut only if the tokenizer's own
parts guarantee that the ids of the pieces are the ids of the whole text:

- Added tokens that are not normalized are matched in the raw text before any other step, leftmost and longest first. A
  *cut token* never shares a character with another occurrence of an added token: none contains another, and none ends
  as another begins. So every occurrence is matched, independent of its neighbours.
- It strips no blanks (``lstrip``, ``rstrip``), has none at its ends that a neighbour could strip, and no added token
  depends on its neighbours (``single_word``).
- The text between is normalized, split and merged piece by piece. Parts that look further are not on the lists below:
  ``Metaspace`` with a special first piece, a random model (``dropout``), anything unknown.
- A post-processor only adds the same ids around the whole.
"""

import json
import re
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from itertools import chain
from threading import Lock
from typing import Any

from tokenizers import Tokenizer, models

OWNER: ContextVar[str] = ContextVar("owner of the cached segments", default="")
"""The tenant of the text. Tenants share no segment, because the time of a hit would tell what another one sent."""
NEW_TEXT: ContextVar[int] = ContextVar("characters that may be tokenized", default=sys.maxsize)
"""Characters without cached ids that a caller tokenizes in one call at most. Tokenizing takes about 1 us for each,
hundreds of times as long as a hit."""
MAX_BYTES = 64 << 20
MAX_TOKENS = 1_048_576
"""Most tokens of a text whose ids are converted: a list of this many integers takes 16 ms, in which no other thread
runs."""
SHORTEST = 256  # minimum characters of a segment but the last: fewer, longer segments are looked up faster

_ENTRY_BYTES = 250  # overhead of a cached segment: two objects' headers and a dictionary entry

_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace", "Lowercase"})
_PRE_TOKENIZERS = frozenset({"ByteLevel", "Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"})


class PromptTooLongError(ValueError):
    """A text has more than :data:`MAX_TOKENS` tokens."""


class NewTextError(Exception):
    """More characters than :data:`NEW_TEXT` have no cached ids; nothing was tokenized."""


class SegmentCache:
    """The tokenizer's ids of texts, cached by segment; the least recently used segments are evicted.

    The tokenizer must not change afterwards. Safe to share between threads: two that get the same new segment both
    tokenize it. ``max_bytes`` bounds the memory of texts, ids and overhead.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_bytes: int = MAX_BYTES,
        shortest: int = SHORTEST,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self._tokenizer, self._max_tokens = tokenizer, max_tokens
        self._max_bytes = max_bytes
        self._shortest = shortest
        tokens = cut_tokens(tokenizer)
        self._cut = re.compile("|".join(map(re.escape, tokens))) if tokens else None
        self._around = _ids_around(_settings(tokenizer.post_processor))
        self._cached: OrderedDict[tuple[str, str], array[int]] = OrderedDict()  # by owner and segment
        self.size_bytes = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._cached)

    def __call__(self, text: str, *, add_special_tokens: bool) -> "array[int]":
        """Return the ids (u32) of a text.

        Raises ``TypeError`` for a text that is not Unicode, :class:`PromptTooLongError` for too many tokens,
        :class:`NewTextError`.
        """
        if self._cut is None or (add_special_tokens and self._around is None):
            return self._tokenize([text], add_special_tokens)[0]
        segments = list(self._segments(text, self._cut))
        ids_of = self._look_up(segments)
        if missing := [segment for segment in dict.fromkeys(segments) if segment not in ids_of]:
            fresh = dict(zip(missing, self._tokenize(missing, False), strict=True))
            self._remember(fresh)
            ids_of |= fresh
        before, after = self._around if add_special_tokens and self._around is not None else ((), ())
        ids = array("I", before)
        for segment in segments:
            ids += ids_of[segment]
        ids.extend(after)
        return ids

    def _segments(self, text: str, cut: "re.Pattern[str]") -> Iterator[str]:
        """Cut behind the first cut token that ends at least ``shortest`` characters on, and so forth.

        A cut depends only on the text before it, so two texts with the same beginning share its segments.
        """
        start = 0
        for match in cut.finditer(text):
            if match.end() - start >= self._shortest:
                yield text[start : match.end()]
                start = match.end()
        if start < len(text):
            yield text[start:]

    def _look_up(self, segments: Iterable[str]) -> "dict[str, array[int]]":
        hits: dict[str, array[int]] = {}
        owner = OWNER.get()
        with self._lock:
            for segment in segments:
                ids = self._cached.get((owner, segment))
                if ids is not None:
                    self._cached.move_to_end((owner, segment))
                    hits[segment] = ids
        return hits

    def _remember(self, fresh: "dict[str, array[int]]") -> None:
        owner = OWNER.get()
        with self._lock:
            for segment, ids in fresh.items():
                size = _size(segment, ids)
                if size > self._max_bytes or (owner, segment) in self._cached:
                    continue
                self._cached[owner, segment] = ids
                self.size_bytes += size
            while self.size_bytes > self._max_bytes:
                (_, oldest), ids = self._cached.popitem(last=False)
                self.size_bytes -= _size(oldest, ids)

    def _tokenize(self, texts: list[str], add_special_tokens: bool) -> "list[array[int]]":
        if sum(map(len, texts)) > NEW_TEXT.get():
            raise NewTextError
        # The batch call, even for one text: it computes no offsets and releases the interpreter's lock.
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        if sum(map(len, encodings)) > self._max_tokens:
            raise PromptTooLongError(f"the text has more than {self._max_tokens} tokens")
        return [array("I", encoding.ids) for encoding in encodings]


def cut_tokens(tokenizer: Tokenizer) -> list[str]:
    """Return the tokens behind which a text can be cut, none where the tokenizer gives no guarantee."""
    added = [token for token in tokenizer.get_added_tokens_decoder().values() if token.content]
    if (
        tokenizer.encode_special_tokens  # then special tokens are plain text
        or tokenizer.truncation is not None
        or tokenizer.padding is not None
        or not isinstance(tokenizer.model, models.BPE)
        or tokenizer.model.dropout is not None
        or not _is_local(_settings(tokenizer.normalizer), "normalizers", _NORMALIZERS)
        or not _is_local(_settings(tokenizer.pre_tokenizer), "pretokenizers", _PRE_TOKENIZERS)
        or any(token.single_word for token in added)
    ):
        return []
    sharing = texts_that_can_share({token.content for token in added})
    return [
        token.content
        for token in added
        if not (token.normalized or token.lstrip or token.rstrip)
        and token.content == token.content.strip()
        and token.content not in sharing
    ]


def texts_that_can_share(texts: set[str]) -> set[str]:
    """Return those of some texts of which an occurrence can share a character with another occurrence of any of them.

    By sets of beginnings and ends, because a vocabulary may have thousands of such texts.
    """
    beginnings = {text[:length] for text in texts for length in range(1, len(text) + 1)}
    ends = {text[-length:] for text in texts for length in range(1, len(text) + 1)}
    sharing: set[str] = set()
    for text in texts:
        size = len(text)
        inside = {text[at:end] for at in range(size) for end in range(at + 1, size + 1) if end - at < size} & texts
        overlaps = any(text[:length] in ends or text[-length:] in beginnings for length in range(1, size))
        if inside or overlaps:
            sharing |= inside | {text}
    return sharing


def _is_local(settings: dict[str, Any], inner: str, local: frozenset[str]) -> bool:
    """Whether a normalizer or pre-tokenizer handles each piece independently."""
    match settings.get("type"):
        case None:
            return True
        case "Sequence":
            return all(_is_local(part, inner, local) for part in settings[inner])
        case "Metaspace":
            return settings.get("prepend_scheme") in ("always", "never")
        case name:
            return name in local


def _ids_around(settings: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the ids that a post-processor puts before and behind a text, ``None`` if unknown."""
    match settings.get("type"):
        case None | "ByteLevel":
            return (), ()
        case "Sequence":
            before: tuple[int, ...] = ()
            after: tuple[int, ...] = ()
            for part in settings["processors"]:
                if (ids := _ids_around(part)) is None:
                    return None
                before, after = ids[0] + before, after + ids[1]
            return before, after
        case "TemplateProcessing":
            single = settings["single"]
            places = [at for at, piece in enumerate(single) if "Sequence" in piece]
            if len(places) != 1:
                return None
            tokens = settings["special_tokens"]
            put = [tokens[piece["SpecialToken"]["id"]]["ids"] if "SpecialToken" in piece else [] for piece in single]
            at = places[0]
            return tuple(chain.from_iterable(put[:at])), tuple(chain.from_iterable(put[at:]))
        case _:
            return None


def _settings(part: Any) -> dict[str, Any]:
    """Return the settings of a part of a tokenizer, as in tokenizer.json; empty for a missing part."""
    if part is None:
        return {}
    settings: dict[str, Any] = json.loads(part.__getstate__())
    return settings


def _size(segment: str, ids: "array[int]") -> int:
    """Return the bytes of a segment; a string takes up to four per character."""
    width = 1 if segment.isascii() else 4
    return _ENTRY_BYTES + width * len(segment) + ids.itemsize * len(ids)
