"""Cache the token ids of text segments, so that only the new part of a conversation is tokenized.

Texts are cut where :mod:`mmrouter_lib.prompt.text_cuts` proves that the ids of the pieces are the ids of the whole
text: into segments, which are cached, and these into pieces, so that the tokenizer's memory does not grow with the
text. While it works it takes 300 bytes for a digit, at most 1,310 for a character and 330 for a byte in UTF-8.
"""

import re
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from contextvars import ContextVar
from itertools import chain
from threading import Lock
from typing import Any

from tokenizers import Tokenizer

from mmrouter_lib.prompt.text_cuts import cut_tokens, occurrences, settings_of, word_ends
from mmrouter_lib.tokenizer_code import TextLimits

OWNER: ContextVar[str] = ContextVar("owner of the cached segments", default="")
"""The tenant of the text. Tenants share no segment, because the time of a hit would tell what another one sent."""
NEW_TEXT: ContextVar[int] = ContextVar("characters that may be tokenized", default=sys.maxsize)
"""Characters without cached ids that a caller tokenizes in one call at most. Tokenizing takes about 1 us for each,
hundreds of times as long as a hit."""
MAX_BYTES = 64 << 20
MAX_TOKENS = 1_048_576
"""Most tokens of a text."""
PIECE = 1 << 13
"""Characters that the tokenizer gets at a time; more up to the next end of a word, at most :data:`MAX_WORD`."""
MAX_WORD = 1 << 15
MAX_WHOLE = 1 << 20
"""Bytes of a text that a tokenizer without known ends of words gets as a whole, in one thread at a time."""
SHORTEST = 256  # minimum characters of a segment but the last: fewer, longer segments are looked up faster

_ENTRY_BYTES = 250  # overhead of a cached segment: two objects' headers and a dictionary entry


class PromptTooLongError(ValueError):
    """A text has more than :data:`MAX_TOKENS` tokens, or a part that is too long and cannot be cut."""


class NewTextError(Exception):
    """More characters than :data:`NEW_TEXT` have no cached ids; nothing was tokenized."""


class SegmentCache:
    """The tokenizer's ids of texts, cached by segment; the least recently used segments are evicted.

    The tokenizer must not change afterwards. Safe to share between threads: two that get the same new segment both
    tokenize it. ``max_bytes`` bounds the memory of texts, ids and overhead. ``limits``: a text beyond them is refused.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_bytes: int = MAX_BYTES,
        shortest: int = SHORTEST,
        max_tokens: int = MAX_TOKENS,
        piece: int = PIECE,
        limits: TextLimits | None = None,
    ) -> None:
        self._tokenizer, self._max_tokens, self._piece, self._limits = tokenizer, max_tokens, piece, limits
        self._max_bytes = max_bytes
        self._shortest = shortest
        tokens = cut_tokens(tokenizer)
        self._cut = re.compile("|".join(map(re.escape, tokens))) if tokens else None
        self._longest = max(map(len, tokens), default=0)
        self._words = word_ends(tokenizer)
        self._around = _ids_around(settings_of(tokenizer.post_processor))
        self._cached: OrderedDict[tuple[str, str], array[int]] = OrderedDict()  # by owner and segment
        self.size_bytes = 0
        self._lock, self._alone = Lock(), Lock()

    def __len__(self) -> int:
        return len(self._cached)

    def __call__(self, text: str, *, add_special_tokens: bool) -> "array[int]":
        """Return the ids (u32) of a text.

        Raises ``TypeError`` for a text that is not Unicode, :class:`PromptTooLongError`, :class:`NewTextError`.
        """
        if add_special_tokens and self._around is None:
            return self._tokenize([text], add_special_tokens=True)[0]
        segments = list(self._segments(text))
        ids_of = self._look_up(segments)
        if missing := [segment for segment in dict.fromkeys(segments) if segment not in ids_of]:
            fresh = dict(zip(missing, self._tokenize(missing), strict=True))
            self._remember(fresh)
            ids_of |= fresh
        before, after = self._around if add_special_tokens and self._around is not None else ((), ())
        ids = array("I", before)
        for segment in segments:
            ids += ids_of[segment]
        ids.extend(after)
        if len(ids) > self._max_tokens:
            raise self._too_long()
        return ids

    def _segments(self, text: str) -> Iterator[str]:
        """Cut behind the first cut token that ends at least ``shortest`` characters on, and so forth.

        A cut depends only on the text before it, so two texts with the same beginning share its segments.
        """
        start = 0
        for end in occurrences(self._cut, text, self._longest) if self._cut is not None else ():
            if end - start >= self._shortest:
                yield text[start:end]
                start = end
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

    def _tokenize(self, texts: list[str], *, add_special_tokens: bool = False) -> "list[array[int]]":
        if sum(map(len, texts)) > NEW_TEXT.get():
            raise NewTextError
        if self._limits is not None and not all(map(self._limits.allow, texts)):
            raise PromptTooLongError(f"a text is not within {self._limits}, beyond which the tokenizer's code cuts it")
        ids = [array("I") for _ in texts]
        tokens = 0
        for batch in _batches(self._pieces(texts, whole=add_special_tokens), self._piece):
            for (number, _), piece_ids in zip(batch, self._encode(batch, add_special_tokens), strict=True):
                ids[number].extend(piece_ids)
                tokens += len(piece_ids)
            if tokens > self._max_tokens:
                raise self._too_long()
        return ids

    def _too_long(self) -> PromptTooLongError:
        return PromptTooLongError(f"the text has more than {self._max_tokens} tokens")

    def _encode(self, batch: list[tuple[int, str]], add_special_tokens: bool) -> list[list[int]]:
        pieces = [piece for _, piece in batch]
        with self._alone if sum(map(len, pieces)) > 2 * self._piece + MAX_WORD else nullcontext():
            # The batch call, even for one text: it computes no offsets and releases the interpreter's lock.
            encodings = self._tokenizer.encode_batch_fast(pieces, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def _pieces(self, texts: list[str], *, whole: bool) -> Iterator[tuple[int, str]]:
        """Return the pieces of texts, each with the number of its text."""
        words = None if whole else self._words
        for number, text in enumerate(texts):
            for piece in (text,) if words is None else words.pieces(text, self._piece, MAX_WORD):
                if (_utf8_bytes(piece) > MAX_WHOLE) if words is None else (len(piece) > self._piece + MAX_WORD):
                    raise PromptTooLongError(f"a part of the text has {len(piece)} characters and cannot be cut")
                yield number, piece


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _batches(pieces: Iterable[tuple[int, str]], least: int) -> Iterator[list[tuple[int, str]]]:
    """Return pieces in lists of ``least`` characters, or a few more in the last piece of a list."""
    batch: list[tuple[int, str]] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[1])
        if size >= least:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


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


def _size(segment: str, ids: "array[int]") -> int:
    """Return the bytes of a segment; a string takes up to four per character."""
    width = 1 if segment.isascii() else 4
    return _ENTRY_BYTES + width * len(segment) + ids.itemsize * len(ids)
