"""Tokenization that remembers: a conversation repeats its beginning, and only what is new is tokenized.

A text may be cut behind a token at which the tokenizer itself always splits first. That the pieces' ids are the whole
text's is read off the tokenizer's own parts, or nothing is cut:

- Added tokens that are not normalized are found in the raw text before anything else happens to it, leftmost first and
  longest first. A *cut token* never shares a character with another occurrence of an added token: none is inside
  another, and none ends as another begins. So every occurrence is found, whatever surrounds it.
- It takes no blanks with it (``lstrip``, ``rstrip``), holds none at its ends that a neighbour could take, and there is
  no token that asks what stands beside it (``single_word``).
- What lies between is normalized, split and merged piece by piece. Parts that look further are not on the lists below:
  ``Metaspace`` that treats the first piece otherwise, a model that draws lots (``dropout``), anything unknown.
- A post-processor only puts the same ids around the whole.
"""

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain
from threading import Lock
from typing import Any

from tokenizers import Tokenizer, models

MAX_BYTES = 64 << 20
SHORTEST = 256
"""Characters that a segment has at least (but for the last): fewer, longer segments are found faster than many."""

_ENTRY_BYTES = 250
"""What a remembered segment costs beside its text and ids: two objects' headers and a place in the dictionary."""

_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace", "Lowercase"})
_PRE_TOKENIZERS = frozenset({"ByteLevel", "Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"})


class SegmentCache:
    """The ids of texts, as the tokenizer gives them; remembered segment by segment, the longest unused forgotten first.

    The tokenizer must not be changed afterwards. Safe to share between threads: two that meet the same new segment both
    tokenize it. ``max_bytes`` bounds what texts, ids and their bookkeeping take together.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_bytes: int = MAX_BYTES, shortest: int = SHORTEST) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._shortest = shortest
        self._cut = _pattern(cut_tokens(tokenizer))
        self._around = _around(tokenizer)
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    @property
    def cuts(self) -> bool:
        """Whether texts are cut at all; where not, each call is the tokenizer's own."""
        return self._cut is not None

    @property
    def size_bytes(self) -> int:
        """What is remembered, in bytes."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._known)

    def __call__(self, text: str, *, add_special_tokens: bool) -> "array[int]":
        """Return the ids (u32) of a text. Raises ``TypeError`` for a text that is not Unicode."""
        if self._cut is None or (add_special_tokens and self._around is None):
            return self._tokenize([text], add_special_tokens)[0]
        segments = list(self._segments(text, self._cut))
        found = self._look_up(segments)
        if missing := [segment for segment in dict.fromkeys(segments) if segment not in found]:
            fresh = dict(zip(missing, self._tokenize(missing, False), strict=True))
            self._remember(fresh)
            found |= fresh
        before, after = self._around if add_special_tokens and self._around is not None else ((), ())
        ids = array("I", before)
        for segment in segments:
            ids += found[segment]
        ids.extend(after)
        return ids

    def _segments(self, text: str, cut: "re.Pattern[str]") -> Iterator[str]:
        """Cut behind the first cut token that ends at least ``shortest`` characters on, and so forth.

        Where a cut is depends on nothing behind it, so a text that goes on differently keeps its segments.
        """
        start = 0
        for match in cut.finditer(text):
            if match.end() - start >= self._shortest:
                yield text[start : match.end()]
                start = match.end()
        if start < len(text):
            yield text[start:]

    def _look_up(self, segments: Iterable[str]) -> "dict[str, array[int]]":
        found: dict[str, array[int]] = {}
        with self._lock:
            for segment in segments:
                ids = self._known.get(segment)
                if ids is not None:
                    self._known.move_to_end(segment)
                    found[segment] = ids
        return found

    def _remember(self, fresh: "dict[str, array[int]]") -> None:
        with self._lock:
            for segment, ids in fresh.items():
                size = _size(segment, ids)
                if size > self._max_bytes or segment in self._known:
                    continue
                self._known[segment] = ids
                self._bytes += size
            while self._bytes > self._max_bytes:
                self._bytes -= _size(*self._known.popitem(last=False))

    def _tokenize(self, texts: list[str], add_special_tokens: bool) -> "list[array[int]]":
        # The batch call, even for one text: it computes no offsets and runs without the interpreter's lock.
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [array("I", encoding.ids) for encoding in encodings]


def cut_tokens(tokenizer: Tokenizer) -> list[str]:
    """Return the tokens behind which a text can be cut; none for a tokenizer of which that is not known."""
    added = [token for token in tokenizer.get_added_tokens_decoder().values() if token.content]
    if (
        tokenizer.encode_special_tokens  # special tokens in the text are text then
        or tokenizer.truncation is not None
        or tokenizer.padding is not None
        or not isinstance(tokenizer.model, models.BPE)
        or tokenizer.model.dropout is not None
        or not _is_local(_settings(tokenizer.normalizer), "normalizers", _NORMALIZERS)
        or not _is_local(_settings(tokenizer.pre_tokenizer), "pretokenizers", _PRE_TOKENIZERS)
        or any(token.single_word for token in added)
    ):
        return []
    contents = {token.content for token in added}
    return [
        token.content
        for token in added
        if not (token.normalized or token.lstrip or token.rstrip)
        and token.content == token.content.strip()
        and not any(_can_share(token.content, other) for other in contents)
    ]


def _can_share(token: str, other: str) -> bool:
    """Whether occurrences of the two, other than one and the same, can have a character in common."""
    if token != other and (token in other or other in token):
        return True
    shorter = min(len(token), len(other))
    return any(
        token[:length] == other[-length:] or other[:length] == token[-length:]
        for length in range(1, shorter if token == other else shorter + 1)
    )


def _is_local(settings: dict[str, Any], inner: str, known: frozenset[str]) -> bool:
    """Whether a normalizer or pre-tokenizer works on each piece for itself."""
    match settings.get("type"):
        case None:
            return True
        case "Sequence":
            return all(_is_local(part, inner, known) for part in settings[inner])
        case "Metaspace":
            return settings.get("prepend_scheme") in ("always", "never")
        case name:
            return name in known


def _around(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the ids that ``add_special_tokens`` puts before and behind a text, ``None`` where they are not known."""
    return _ids_around(_settings(tokenizer.post_processor))


def _ids_around(settings: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
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
    """Return what a part of a tokenizer is made of, as in tokenizer.json; empty for a part that is not there."""
    if part is None:
        return {}
    found: dict[str, Any] = json.loads(part.__getstate__())
    return found


def _pattern(tokens: list[str]) -> "re.Pattern[str] | None":
    return re.compile("|".join(map(re.escape, tokens))) if tokens else None


def _size(segment: str, ids: "array[int]") -> int:
    """Return the bytes of a segment; a string takes up to four per character."""
    width = 1 if segment.isascii() else 4
    return _ENTRY_BYTES + width * len(segment) + ids.itemsize * len(ids)
